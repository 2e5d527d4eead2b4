"""The renderer of this package: figures by plotly, and pages that hold them."""

from __future__ import annotations

from ..core.rendering import Renderer
from .figures import figure, panels
from .html import report_html, result_html, write_html

RENDERER = Renderer(
    figure=figure, panels=panels, result_html=result_html, report_html=report_html, write_html=write_html
)
