"""HTML of results and reports for notebooks, which `reporting` writes when a notebook shows them."""

from __future__ import annotations

from typing import Any


def result_as_html(result: Any) -> str:
    """A result as HTML, for `_repr_html_`."""
    from ..reporting.html import result_html

    return result_html(result)


def report_as_html(report: Any) -> str:
    """A report as HTML, for `_repr_html_`."""
    from ..reporting.html import report_html

    return report_html(report)
