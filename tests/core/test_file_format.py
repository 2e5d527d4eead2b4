"""Files of results: whole, ours, and of this version."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import curve


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


def test_files_hold_no_pickle(report, tmp_path):
    path = report.save(tmp_path / "report.safetensors")
    head = path.read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert json.loads(head[8 : 8 + length])["__metadata__"]["tl_layersim"].startswith('{"format": 3')


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    path = curve(1000).save(tmp_path / "x.safetensors")
    for size in (0, 4, 100, path.stat().st_size - 8):
        short = tmp_path / "short.safetensors"
        short.write_bytes(path.read_bytes()[:size])
        with pytest.raises(lsim.LayersimError, match=r"short\.safetensors .*\b\d+ bytes"):
            lsim.load(short)


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(lsim.LayersimError, match=r"weights\.safetensors .*\['w'\]"):
        lsim.load(tmp_path / "weights.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(lsim.LayersimError, match="is truncated"):
        lsim.load(tmp_path / "pickle.pt")
    with pytest.raises(FileNotFoundError, match="/nothing does not exist"):
        lsim.load(tmp_path / "nothing")


def test_nowhere_to_save(tmp_path):
    with pytest.raises(OSError, match=r"folder .*/nowhere does not exist"):
        curve().save(tmp_path / "nowhere" / "x")


def test_a_folder_without_a_report_is_called_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a file"):
        lsim.load(tmp_path)


def test_the_folder_of_a_report_names_its_file(report, tmp_path):
    """The command line writes a folder, and its name is what a user has at hand."""
    report.save(tmp_path / "report.safetensors")
    with pytest.raises(FileNotFoundError, match=r"is not a file\. .*report\.safetensors"):
        lsim.load(tmp_path)
