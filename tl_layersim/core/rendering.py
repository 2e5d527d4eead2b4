"""The registry through which results reach their figures and pages.

`core` imports no other package. The package that draws results registers a `Renderer` by its place, and the module there is
imported when the first result is drawn: `import tl_layersim` imports no plotly, and a user imports nothing to draw.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Renderer:
    """The functions that draw results.

    Attributes:
        figure: figure of a field, from the result, the field, the width and the title that `Result.plot` takes.
        panels: figure whose panels are the given figures, from these, the width and the title that `Report.plot` takes.
        result_html: a result as a cell of a notebook.
        report_html: a report as a cell of a notebook.
        write_html: writes a report as a page, from the report and the path of the page; returns the path.
    """

    figure: Callable[[Any, str | None, str | None, str | None], Figure]
    panels: Callable[[list[Figure], str | None, str], Figure]
    result_html: Callable[[Any], str]
    report_html: Callable[[Any], str]
    write_html: Callable[[Any, str | os.PathLike[str]], Path]


# Module and name of the renderer.
_place: str | None = None


def register_renderer(place: str) -> None:
    """Draw results with this renderer from now on.

    Args:
        place: the module and the name of a `Renderer`, such as "tl_layersim.reporting.renderer:RENDERER".
    """
    global _place
    _place = place


def registered_renderer() -> Renderer:
    """The renderer that was registered last. Its module is imported if it is not yet."""
    assert _place is not None
    renderer: Renderer = pkgutil.resolve_name(_place)
    return renderer
