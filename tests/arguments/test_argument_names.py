"""A bad value in an argument of a public function that takes a model, data or a path: an error that names this argument."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer

MODEL, TOKENS = tiny_llama(layers=2), random_tokens(6, 8)
MODEL.tokenizer = tiny_tokenizer()
COSINE, CKA = lsim.Cosine(center="none"), lsim.CKA(minibatch=8)
TRAINING = lsim.AlignedTraining(steps=1, warmup=0)
LABELLED = {"input_ids": TOKENS, "labels": TOKENS % 3}

# By function: the call, valid arguments, and the arguments that hold a model, data and a path.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any], str, str, str]] = {
    "analyze": (lsim.analyze, {"analyzers": COSINE}, "model", "data", "checkpoint"),
    "compare": (lsim.compare, {"analyzers": CKA}, "model_a model_b", "data", "checkpoint"),
    "stitch": (lsim.stitch, {"at": (0, 0), "fit": "lstsq"}, "front back", "data eval_data", "checkpoint cache"),
    "evaluate_layers": (lsim.evaluate_layers, {}, "before after", "data", ""),
    "finetune_aligned": (lsim.finetune_aligned, {"training": TRAINING}, "model", "data eval_data", "checkpoint"),
    "linear_probe": (lsim.linear_probe, {"data": LABELLED}, "model", "data test_data", "checkpoint"),
    "estimate": (lsim.estimate, {"analyzers": COSINE, "seq_len": 16}, "model_or_config", "", ""),
    "truncate": (lsim.truncate, {"n_layers": 1}, "model", "", "save_to"),
    "sites": (lsim.sites, {}, "model", "", ""),
    "EarlyExit": (lsim.EarlyExit, {}, "model", "", "heads"),
    "frequent_tokens": (lsim.early_exit.frequent_tokens, {"size": 5}, "model", "data", ""),
    "block_jacobians": (lsim.prompts.block_jacobians, {}, "model", "prompt", ""),
    "coupling_matrices": (lsim.prompts.coupling_matrices, {"k": 2}, "model", "prompt", ""),
    "prediction_grid": (lsim.prompts.prediction_grid, {}, "model", "prompt", ""),
    "trajectory_pca": (lsim.prompts.trajectory_pca, {}, "model", "prompt", ""),
    "aligned_loss": (lsim.training.aligned_loss, {"tokens": TOKENS}, "model", "tokens", ""),
    "attach": (lambda **given: lsim.attach(**given).__enter__(), {"analyzers": COSINE}, "model", "", ""),
    "capabilities": (lsim.costs.capabilities, {}, "model", "", ""),
    "generate": (lsim.EarlyExit(MODEL).generate, {"max_new_tokens": 1}, "", "prompt", ""),
    "load": (lsim.load, {}, "", "", "path"),
    "Report.load": (lsim.Report.load, {}, "", "", "path"),
    "ExitHeads.load": (ExitHeads.load, {}, "", "", "path"),
    "load_run": (lsim.load_run, {}, "", "", "path"),
    "merge": (lsim.merge, {}, "", "", "files"),
    "save": (lsim.Report({}).save, {}, "", "", "path"),
    "to_csv": (lsim.Report({}).to_csv, {}, "", "", "path"),
    "to_json": (lsim.Report({}).to_json, {}, "", "", "path"),
    "to_html": (lsim.Report({}).to_html, {}, "", "", "path"),
    "save_to of a training": (lsim.AlignedTraining, {}, "", "", "save_to"),
}
VALID = {"model": MODEL, "data": TOKENS, "prompt": TOKENS[0]} | dict.fromkeys(
    ("model_a", "model_b", "front", "back", "before", "after", "model_or_config"), MODEL
)
MODELS = {"None": None, "a name": "gpt2", "a class": LlamaForCausalLM, "a module without blocks": torch.nn.Linear(2, 2)}
DATA = {
    "a number": 3,
    "nothing": [],
    "other ids": TOKENS + 1000,
    "a negative id": [[-1, 3]],
    "a model": MODEL,
    "floats": TOKENS[0] / 2,
}
PATHS = {"a zero byte": "a\0b", "a long name": "x" * 300, "half a pair": "a\ud800", "a number": 3, "bytes": b"a"}
KINDS = ((2, MODELS), (3, DATA), (4, PATHS))
CALLS = [
    pytest.param(name, argument, value, id=f"{name}-{argument}-{what}")
    for name, own in FUNCTIONS.items()
    for place, values in KINDS
    for argument in own[place].split()
    for what, value in values.items()
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument", "value"), CALLS)
def test_the_argument_of_the_caller_is_named(name, argument, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, valid, models, data, _ = FUNCTIONS[name]
    needed = {other: VALID[other] for other in f"{models} {data}".split() if other in VALID}
    with pytest.raises(lsim.LayersimError) as caught:
        call(**{**needed, **valid, argument: value})
    assert f"`{argument}`" in str(caught.value)
    assert os.listdir() == []


@pytest.mark.parametrize("call", [lsim.compare_grid, lsim.sweep, lsim.stitch_grid])
@pytest.mark.parametrize("value", MODELS.values(), ids=MODELS)
def test_a_model_in_a_mapping_is_named_with_its_key(call, value):
    options = {"analyzers": COSINE, "analyzer": CKA, "adapter": "identity"}
    own = {name: option for name, option in options.items() if name in inspect.signature(call).parameters}
    with pytest.raises(lsim.LayersimError) as caught:
        call({"good": MODEL, "bad one": value}, TOKENS, **own)
    assert "`models`" in str(caught.value)
    assert "'bad one'" in str(caught.value) or value is LlamaForCausalLM


ADDRESSES = (
    "hf://",
    "hf://a",
    "hf://../../x",
    "hf://a/b@../../c",
    "hf://a/b/../../c",
    "hf://a b/c",
    "hf://a/b@",
    "hf://-a/b",
    "hf://a/b--c",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_malformed_address_on_the_hub_is_refused(address):
    with pytest.raises(lsim.LayersimError) as caught:
        lsim.load(address)
    assert "`path`" in str(caught.value)
    assert repr(address) in str(caught.value)


PLACES = (".", "/dev/null/x", "missing/x", "file/x", "/dev/null")


@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_written_is_refused_before_a_run(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for call in (
        lambda: lsim.analyze(MODEL, TOKENS, COSINE, checkpoint=place),
        lambda: lsim.analyze(MODEL, TOKENS, COSINE, shard=(0, 1), save_to=place),
        lambda: lsim.stitch(MODEL, MODEL, TOKENS, at=(0, 0), fit="lstsq", checkpoint=place),
        lambda: lsim.Report({}).save(place),
    ):
        with pytest.raises((lsim.LayersimError, OSError)) as caught:
            call()
        assert (os.path.dirname(place) or place) in str(caught.value)
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("axis", ["nope", "", 5, None, ["row"], "value", "layers", "replicate", "block_token"])
def test_an_axis_that_a_result_lacks_is_refused(axis):
    result = lsim.analyze(MODEL, TOKENS, COSINE)["cosine"]
    with pytest.raises(lsim.LayersimError, match="`axis`"):
        result.coordinates(axis)
    assert result.coordinates("row") == result.layers


@pytest.mark.parametrize("at", [torch.full((6, 8), -1), int, object(), 1.5, [None], [b"x"], {}])
def test_sites_of_another_type_are_refused(at):
    with pytest.raises(lsim.LayersimError, match="`at`"):
        lsim.linear_probe(MODEL, LABELLED, at=at)


SUFFIXES = {".csv": "to_csv", ".json": "to_json", ".html": "to_html", ".pkl": "", ".PT": "", ".parquet": "to_frame", ".npz": ""}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_does_not_write_under_the_name_of_another_format(suffix, tmp_path):
    report = lsim.analyze(MODEL, TOKENS, COSINE)
    for saved in (report, report["cosine"]):
        with pytest.raises(lsim.LayersimError) as caught:
            saved.save(tmp_path / f"x{suffix}")
        assert "`path`" in str(caught.value)
        assert SUFFIXES[suffix] in str(caught.value)
    assert os.listdir(tmp_path) == []
    assert report.save(tmp_path / "v1.2 of a run").exists()
