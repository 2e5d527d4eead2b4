"""A few families of the conformance run, and its page."""

from __future__ import annotations

import pytest

from .causal_families import causal_model
from .conformance import CAPABILITIES, END, START, Reference, outcome, run, write_page


@pytest.mark.light(
    "granite-stream",
    "granite-sublayers",
    "lfm2-lens without norm",
    "falcon_h1-lens",
    "modernbert-decoder-stream",
    "modernbert-decoder-sublayers",
)
@pytest.mark.parametrize("capability", ["stream", "lens", "lens without norm", "sublayers"])
@pytest.mark.parametrize("family", ["granite", "lfm2", "falcon_h1", "modernbert-decoder"])
def test_a_family_that_no_table_names_is_right(family, capability):
    assert outcome(Reference(causal_model(family)), capability) == ("right", "")


@pytest.mark.parametrize("family", ["gemma3n_text", "hrm_text"])
def test_a_family_that_cannot_be_read_is_refused(family):
    outcomes = run([family], list(CAPABILITIES))[family]
    assert {what for what, _ in outcomes.values()} == {"refused"}


def test_the_table_is_written_between_its_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    write_page({"a": {"stream": ("right", "")}, "b": {"stream": ("refused", "why")}}, page)
    lines = page.read_text().splitlines()

    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| stream | 1 | 1 | 0 | 0 |" in lines
    assert "| stream | b |" in lines
    assert "old" not in lines
