"""Results are drawn by the renderer that is registered."""

from __future__ import annotations

import tl_layersim as lsim
from tl_layersim.core import rendering

PLAIN = rendering.Renderer(
    figure=lambda result, field, width, title: "a figure",
    panels=lambda figures, width, title: "panels",
    result_html=lambda result: "a result",
    report_html=lambda report: f"a report of {len(report)} results",
    write_html=lambda report, path: path,
)


def test_the_renderer_that_was_registered_last_draws(monkeypatch, tmp_path):
    monkeypatch.setattr(rendering, "_place", rendering._place)
    rendering.register_renderer(f"{__name__}:PLAIN")
    report = lsim.Report({})
    assert report._repr_html_() == "a report of 0 results"
    assert report.to_html(tmp_path / "page.html") == tmp_path / "page.html"
    assert not (tmp_path / "page.html").exists()
