"""Warnings of a run are listed in its record and issued too, in every thread and under every filter."""

from __future__ import annotations

import threading
import warnings

import pytest

import tl_layersim as lsim
from tl_layersim.core.errors import recorded_warnings, warn

from ..models.tiny_models import random_tokens, tiny_llama


def _warned(*texts: str, fails: bool = False) -> list[str]:
    with recorded_warnings() as recorded:
        for text in texts:
            warn(text)
        if fails:
            raise KeyError
    return recorded


def test_warnings_are_listed_and_issued():
    with pytest.warns(lsim.LayersimWarning) as issued:
        texts = _warned("Too few.", "See https://me:secret@host/x.")
    assert texts == ["Too few.", "See https://host/x."] == [str(warning.message) for warning in issued]


def test_warnings_of_an_inner_block_are_kept_from_the_user_and_from_the_outer_list():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorded_warnings() as outer, recorded_warnings(issued=False) as inner:
            warn("Of a part.")
    assert (outer, inner) == ([], ["Of a part."])


@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
def test_a_filter_that_hides_warnings_does_not_take_them_from_the_record():
    with recorded_warnings() as texts:
        warn("Too few.")
    assert texts == ["Too few."]


@pytest.mark.filterwarnings("always")
def test_warnings_before_an_error_are_issued(recwarn):
    with pytest.raises(KeyError):
        _warned("Too few.", fails=True)
    assert [str(warning.message) for warning in recwarn] == ["Too few."]


def test_a_record_is_of_one_thread():
    """Threads that stand in the block at the same time, as runs in several threads do, and leave it in the order of entry."""
    barrier = threading.Barrier(2, timeout=600)
    second_left = threading.Event()
    texts: dict[str, list[str]] = {}

    def run(name: str) -> None:
        with recorded_warnings(issued=False) as recorded:
            barrier.wait()
            warn(name)
            if name == "second":
                second_left.wait(600)
        second_left.set()
        texts[name] = recorded

    filters = list(warnings.filters)
    shown = warnings.showwarning
    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {"first": ["first"], "second": ["second"]}
    assert (list(warnings.filters), warnings.showwarning) == (filters, shown)


def test_a_run_with_intervals_leaves_the_filters_of_other_threads(monkeypatch):
    """Filters are of the whole process: a run that changes them for a moment hides the warnings of all threads."""
    filters = []
    compute = lsim.Cosine.compute

    def watched(self, sums, run):
        filters.append(list(warnings.filters))
        return compute(self, sums, run)

    monkeypatch.setattr(lsim.Cosine, "compute", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lsim.LayersimWarning)
        report = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(3), batch_size=1), "cosine", intervals=True)
        assert filters == [list(warnings.filters)] * 4
    assert "rest on 3 jackknife blocks" in report["cosine"].provenance.warnings[0]
