"""Runs that are interrupted or killed, and their checkpoints."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import resumable_file
from tl_layersim.sources.hooked_module import HookedSource

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.processes import kill_when, started
from ..running.runs import cosine_and_cka


class Stopped(KeyboardInterrupt):
    pass


@pytest.mark.light("22")
@pytest.mark.parametrize("at", [1, 14, 22])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_numbers(at, tmp_path, monkeypatch):
    """Three batches of four forward passes twice over: the interrupt falls into the first pass or into the second."""
    model = tiny_llama()
    data = list(random_tokens(48, 11))
    path = tmp_path / "run.safetensors"
    undisturbed = lsim.analyze(model, lsim.Data(data, batch_size=4), cosine_and_cka())
    calls = []
    run = HookedSource.run

    def interrupted(self, batch, kernels):
        calls.append(1)
        if len(calls) == at + 1:
            raise Stopped
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    with pytest.raises(Stopped) as caught:
        lsim.analyze(model, lsim.Data(data, batch_size=4), cosine_and_cka(), checkpoint=path)
    assert "the same call continues from there" in caught.value.__notes__[0]
    assert path.exists()
    report = lsim.analyze(model, lsim.Data(data, batch_size=4), cosine_and_cka(), checkpoint=path)
    # Forward passes of the batch that was interrupted run again.
    total = 24 + at % 4 + 1
    assert len(calls) == total
    for name in report:
        assert worst(report[name], undisturbed[name]) == 0
        assert report[name].provenance.tokens == undisturbed[name].provenance.tokens
        assert report[name].provenance.data == undisturbed[name].provenance.data
    # A run that is complete is read back without a forward pass.
    again = lsim.analyze(model, lsim.Data(data, batch_size=4), cosine_and_cka(), checkpoint=path)
    assert len(calls) == total
    assert worst(again["cka"], undisturbed["cka"]) == 0


KILLED = """
import sys, time
import tl_layersim as lsim
from tl_layersim.core import resumable_file
from tl_layersim.sources.hooked_module import HookedSource
from tests.models.tiny_models import random_tokens, tiny_llama
resumable_file.SECONDS_BETWEEN_SAVES = 0.0
run, passes = HookedSource.run, []

def waiting(self, batch, kernels):
    # In the tenth forward pass it waits to be killed.
    passes.append(1)
    if len(passes) == 10:
        open(sys.argv[2], "x")
        time.sleep(3600)
    return run(self, batch, kernels)

HookedSource.run = waiting
data = lsim.Data(list(random_tokens(40, 11)), batch_size=2)
lsim.analyze(tiny_llama(), data, lsim.Cosine(center="none"), checkpoint=sys.argv[1])
"""


@pytest.mark.heavy("a killed process")
def test_a_killed_process_loses_at_most_the_time_between_saves(tmp_path):
    path = tmp_path / "run.safetensors"
    kill_when(tmp_path / "waits", started(KILLED, str(path), str(tmp_path / "waits")))
    assert path.exists()

    model = tiny_llama()
    data = list(random_tokens(40, 11))
    resumed = lsim.analyze(model, lsim.Data(data, batch_size=2), lsim.Cosine(center="none"), checkpoint=path)
    whole = lsim.analyze(model, lsim.Data(data, batch_size=2), lsim.Cosine(center="none"))

    assert worst(resumed["cosine"], whole["cosine"]) == 0


def test_a_checkpoint_of_other_marked_positions_is_refused(tmp_path):
    tokens = random_tokens(4, 8)
    model = tiny_llama()
    path = tmp_path / "run"
    first, second = (torch.zeros(4, 8, dtype=torch.bool) for _ in range(2))
    first[:, 1:4], second[:, 2:5] = True, True

    marked = lambda mask: lsim.Data({"input_ids": tokens, "keep": mask}, positions="keep")  # noqa: E731
    lsim.analyze(model, marked(first), lsim.Cosine(center="none"), checkpoint=path)

    with pytest.raises(lsim.LayersimError, match="`data`"):
        lsim.analyze(model, marked(second), lsim.Cosine(center="none"), checkpoint=path)


def test_a_checkpoint_of_another_run_or_other_data_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    model = tiny_llama()
    data = list(random_tokens(8, 11))
    lsim.analyze(model, data, "cka", checkpoint=path)
    with pytest.raises(lsim.LayersimError, match=r"run.safetensors.*minibatch: 256.*minibatch: 8"):
        lsim.analyze(model, data, lsim.CKA(minibatch=8), checkpoint=path)
    with pytest.raises(lsim.LayersimError, match=r"skip_first: 0.*skip_first: 1"):
        lsim.analyze(model, lsim.Data(data, skip_first=1), "cka", checkpoint=path)
    with pytest.raises(lsim.LayersimError, match="folder that does not exist"):
        lsim.analyze(model, data, "cka", checkpoint=tmp_path / "nowhere" / "run")
    partial = tmp_path / "partial.safetensors"
    source = HookedSource(model)
    run = source.run
    batches = []

    def stop(batch, kernels):
        batches.append(1)
        if len(batches) == 6:
            raise KeyboardInterrupt
        return run(batch, kernels)

    source.run = stop
    # Batches of 32 rows, which have 256 samples.
    data = list(random_tokens(64, 11))
    with pytest.raises(KeyboardInterrupt):
        lsim.analyze(source, lsim.Data(data, batch_size=8), "cka", checkpoint=partial)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*checkpoint"):
        lsim.analyze(model, lsim.Data(data[::-1], batch_size=8), "cka", checkpoint=partial)


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tl_layersim.core.file_format.os.fsync", full)
    monkeypatch.setattr(resumable_file, "SECONDS_BETWEEN_SAVES", 0.0)
    path = tmp_path / "run.safetensors"
    with pytest.warns(lsim.LayersimWarning, match=r"continues without it(.|\n)*No space left"):
        report = lsim.analyze(tiny_llama(), random_tokens(8, 11), "cka", checkpoint=path)
    assert report["cka"].samples == 88
    assert list(tmp_path.iterdir()) == []


def test_a_finished_checkpoint_answers_for_its_own_data_and_weights_only(tmp_path):
    model = tiny_llama()
    data = list(random_tokens(8, 11))
    path = tmp_path / "run"
    lsim.analyze(model, lsim.Data(data, batch_size=2), "cka", checkpoint=path)

    for changed in (data[::-1], data[:4], [*data, data[0]]):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*checkpoint"):
            lsim.analyze(model, lsim.Data(changed, batch_size=2), "cka", checkpoint=path)

    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.01
    with pytest.raises(lsim.LayersimError, match="belongs to another run"):
        lsim.analyze(model, lsim.Data(data, batch_size=2), "cka", checkpoint=path)
