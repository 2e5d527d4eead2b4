"""The one file format of interrupted runs: written whole, read by the same call alone, saved once in a while."""

from __future__ import annotations

import re

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import file_format, resumable_file
from tl_layersim.core.resumable_file import ResumableFile

NOTES = {"step": 3, "name": "x"}
TENSORS = {"a": torch.arange(4), "b": torch.ones(2, dtype=torch.float64)}


def parse(notes, tensors):
    return notes["step"], notes["name"], tensors


@pytest.mark.parametrize("kind", sorted(resumable_file.CONTENTS))
@pytest.mark.parametrize("identity", [None, {"model": ("m", 1), "seed": 0}])
def test_a_state_is_read_back_exactly(kind, identity, tmp_path):
    path = tmp_path / "run"
    assert ResumableFile(path, kind, identity).resume(parse) is None

    ResumableFile(path, kind, identity).write(NOTES, TENSORS)
    step, name, tensors = ResumableFile(path, kind, identity).resume(parse)
    assert (step, name) == (3, "x")
    assert all(torch.equal(tensors[key], value) and tensors[key].dtype == value.dtype for key, value in TENSORS.items())


def test_no_path_keeps_nothing():
    file = ResumableFile(None, "training", {})
    assert file.resume(parse) is None

    file.write(NOTES, TENSORS)
    file.save(NOTES, TENSORS)
    assert not file.due
    with pytest.raises(KeyboardInterrupt) as caught, file.saved_on_interrupt(lambda: (NOTES, TENSORS), lambda: "All is"):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")


def test_another_run_and_another_kind_are_refused(tmp_path):
    path = tmp_path / "run"
    ResumableFile(path, "training", {"seed": 0, "data": {"rows": 3}}).write(NOTES, TENSORS)
    with pytest.raises(lsim.LayersimError, match=r"/run .*data: rows: 3.*data: rows: 4"):
        ResumableFile(path, "training", {"seed": 0, "data": {"rows": 4}}).resume(parse)
    with pytest.raises(lsim.LayersimError, match=r"training.*stitches"):
        ResumableFile(path, "stitches", {"seed": 0, "data": {"rows": 3}}).resume(parse)
    with pytest.raises(lsim.LayersimError, match=re.escape(str(path))):
        ResumableFile(path, "training", {"seed": 0, "data": {"rows": 3}}).resume(lambda notes, tensors: tensors["missing"])


def test_an_interrupt_writes_the_state_and_says_where(tmp_path):
    file = ResumableFile(tmp_path / "run", "training", {})
    with pytest.raises(KeyboardInterrupt) as caught, file.saved_on_interrupt(lambda: (NOTES, TENSORS), lambda: "The state is"):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"The state is in {file.path}; the same call continues from there."]
    assert file.resume(parse)[0] == 3
    with pytest.raises(ValueError, match="x") as other_error, file.saved_on_interrupt(lambda: None, lambda: "The state is"):
        raise ValueError("x")
    assert not hasattr(other_error.value, "__notes__")


def test_a_full_disk_is_a_warning_and_on_an_interrupt_a_note(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_format.os, "fsync", full)
    file = ResumableFile(tmp_path / "run", "training", {})
    with pytest.warns(lsim.LayersimWarning, match="continues without it"):
        file.save(NOTES, TENSORS)
    with pytest.raises(KeyboardInterrupt) as caught, file.saved_on_interrupt(lambda: (NOTES, TENSORS), lambda: "All is"):
        raise KeyboardInterrupt
    assert "No space left" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


def test_saves_are_spaced_by_time_and_by_their_own_duration(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resumable_file.time, "monotonic", lambda: now[0])
    file = ResumableFile(tmp_path / "run", "training", {})
    now[0] = 29.0

    assert not file.due

    now[0] = 31.0
    assert file.due

    plain = resumable_file.write
    monkeypatch.setattr(resumable_file, "write", lambda *arguments: now.__setitem__(0, now[0] + 10) or plain(*arguments))
    # A save of 10 s: the next one comes after 200 s.
    file.save(NOTES, TENSORS)
    now[0] = 41.0 + 199

    assert not file.due

    now[0] = 41.0 + 201
    assert file.due
