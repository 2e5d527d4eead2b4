"""A disk that is full or read-only: said before anything is computed, and no reason to lose a result afterwards."""

from __future__ import annotations

import os
import warnings

import pytest

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.core import file_format, resumable_file
from tl_layersim.training import train_adapters

from ..commands.helpers import run
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer


def analysed(path):
    return lsim.analyze(tiny_llama(), lsim.Data(random_tokens(), batch_size=2), lsim.CKA(minibatch=16), checkpoint=path)["cka"]


def stitched(path):
    training = lsim.stitching.StitchTraining(steps=3)
    models = (tiny_llama(), tiny_llama(seed=1))
    data = lsim.Data(random_tokens(40), batch_size=4)
    return lsim.stitch(*models, data, at=(0, 0), fit="lstsq+sgd", training=training, checkpoint=path)


def tuned(path, **options):
    training = lsim.AlignedTraining(steps=3, warmup=0, **options)
    return lsim.finetune_aligned(tiny_llama(), lsim.Data(random_tokens(), batch_size=2), training, checkpoint=path)


def adapted(path):
    import nnsight

    return train_adapters(
        nnsight.NNsight(tiny_llama()), lsim.Data(random_tokens(), batch_size=2), steps=3, rank=1, checkpoint=path
    )


CALLS = {"analyze": analysed, "stitch": stitched, "finetune_aligned": tuned, "train_adapters": adapted}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def full_disk(monkeypatch):
    """A disk on which files can be made, and nothing can be written into them; saves are due at once."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_format.os, "fsync", full)
    monkeypatch.setattr(resumable_file, "SECONDS_BETWEEN_SAVES", 0.0)


@pytest.mark.light("analyze")
@each_call
def test_a_full_disk_costs_the_checkpoint_and_not_the_result(call, tmp_path, full_disk):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Least squares has")
        with pytest.warns(lsim.LayersimWarning, match=r"continues without it(.|\n)*No space left"):
            result = call(tmp_path / "run")
        assert isinstance(result, lsim.Result)
        assert os.listdir(tmp_path) == []
        plain = call(None)
    assert result.values.equal(plain.values)


@pytest.mark.light("analyze")
@each_call
@pytest.mark.filterwarnings("ignore:.*(continues without it|Least squares has)")
def test_an_interrupt_on_a_full_disk_is_still_an_interrupt(call, tmp_path, full_disk, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for name in (
        "engine.run.PassState.add",
        "stitching.stitch.StitchExperiment._evaluate",
        "training.finetune.FineTuning.loss_and_gradients",
        "training.adapter_training.AdapterSteps.apply",
    ):
        monkeypatch.setattr(f"tl_layersim.{name}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path / "run")


@pytest.fixture
def read_only_disk(monkeypatch):
    plain = os.open

    def refused(path, flags, *arguments, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return plain(path, flags, *arguments, **options)

    monkeypatch.setattr(file_format.os, "open", refused)


@each_call
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(call, tmp_path, read_only_disk, monkeypatch):
    monkeypatch.setattr(View, "__init__", None)
    with pytest.raises(lsim.LayersimError, match=r"^`checkpoint` .*Read-only"):
        call(tmp_path / "run")


def test_other_places_are_refused_at_the_start_too(tmp_path, read_only_disk):
    with pytest.raises(lsim.LayersimError, match=r"^`save_to` .*cannot be written"):
        tuned(None, save_to=tmp_path / "model")
    with pytest.raises(lsim.LayersimError, match=r"^`cache` .*cannot be written"):
        lsim.stitch(tiny_llama(), tiny_llama(), random_tokens(), at=(0, 0), cache=tmp_path)

    process = run("report", "--out", tmp_path / "out")
    assert "`--out` names a folder that cannot be written" in str(process.exception)


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_a_checkpoint_is_a_file(name, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(lsim.LayersimError, match=r"^`checkpoint` is .*(folder|pipe)"):
        analysed(tmp_path / name)


@pytest.mark.light("truncate-False", "finetune_aligned-True")
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("save", ["truncate", "finetune_aligned"])
def test_a_model_is_written_whole_or_not_at_all(save, old, tmp_path, monkeypatch):
    model = tiny_llama()
    folder = tmp_path / "model"
    model.tokenizer = tiny_tokenizer()
    if old:
        tiny_llama(seed=1).save_pretrained(folder, max_shard_size="10kB")
        (folder / "notes.txt").write_text("mine")

    def write():
        if save == "truncate":
            lsim.truncate(model, 1, save_to=folder)
        else:
            training = lsim.AlignedTraining(steps=1, warmup=0, save_to=folder)
            lsim.finetune_aligned(model, lsim.Data(random_tokens(), batch_size=2, tokenizer=model.tokenizer), training)

    def contents():
        return {path.name: path.read_bytes() for path in folder.rglob("*")}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(type(model.tokenizer), "save_pretrained", full)
        with pytest.warns(lsim.LayersimWarning) if save != "truncate" else pytest.raises(OSError, match=r"model: .*No space"):
            write()
    assert contents() == before
    assert len(list(tmp_path.iterdir())) == old
    write()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    # The weights of the old model, which were in several files, are gone.
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert (folder / "notes.txt").exists() == old
    assert type(model).from_pretrained(folder).config.num_hidden_layers == (1 if save == "truncate" else 3)


def test_a_trained_model_that_cannot_be_written_is_not_lost(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", full)
    with pytest.warns(lsim.LayersimWarning, match=r"could not be written(.|\n)*No space left(.|\n)*save_pretrained"):
        training = tuned(None, save_to=tmp_path / "model")
    assert len(training.loss) == 3
