"""Figures of results and tables, and the HTML page of a report."""

from ..core.rendering import register_renderer

# By its place, since its module imports plotly.
register_renderer(f"{__name__}.renderer:RENDERER")
