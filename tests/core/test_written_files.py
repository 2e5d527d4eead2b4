"""Files are written whole or not at all: links are replaced, devices refused, and what a killed process left is removed."""

from __future__ import annotations

import os
import time

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, file_format

from ..inputs.views import provenance


def curve(n: int = 3) -> LayerCurve:
    values = torch.arange(n, dtype=torch.float64)
    return LayerCurve(values=values, layers=tuple(f"blocks.{i}.x" for i in range(n)), provenance=provenance())


SAVES = {"save": lambda path: curve().save(path), "to_html": lambda path: lsim.Report({"a": curve()}).to_html(path)}


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("how", SAVES)
def test_an_interrupted_write_leaves_the_old_file(how, tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"Could not write .*No space left(.|\n)*unchanged"):
            SAVES[how](path)

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]

    SAVES[how](path)
    assert path.read_text(errors="ignore") != "old"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("how", SAVES)
def test_a_link_is_replaced_and_not_written_through(how, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "x").symlink_to(tmp_path / "precious")
    SAVES[how](tmp_path / "x")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "x").is_symlink()


@pytest.mark.parametrize("how", SAVES)
def test_a_pipe_or_a_folder_is_not_replaced(how, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="is not a file"):
            SAVES[how](tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        path = curve().save(tmp_path / "x")
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)

    assert len(lsim.load(path).values) == 3
    assert os.listdir(tmp_path) == ["x"]


def test_what_was_left_long_ago_is_removed(tmp_path):
    for name, age in (
        (".x.0123.part", 2 * file_format.ABANDONED),
        (".x.4567.part", 0.0),
        (".y.89ab.part", 2 * file_format.ABANDONED),
    ):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    curve().save(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == [".x.4567.part", ".y.89ab.part", "x"]


def test_every_dtype_comes_back(tmp_path):
    held = {str(dtype): torch.arange(6).to(dtype).view(2, 3).t() for dtype in file_format.DTYPES}
    held |= {"none": torch.zeros(0, 3), "one": torch.tensor(1.5)}
    _, tensors = file_format.read(file_format.write(tmp_path / "x", "test", {}, held), ("test",))

    assert tensors.keys() == held.keys()
    for name, value in held.items():
        assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape)
        assert torch.equal(tensors[name], value)
