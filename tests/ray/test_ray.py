"""Analyses on a real cluster of Ray on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.errors import LayersimError

from ..tiny_models import random_tokens
from .loaders import assert_same, load, load_drawn, load_missing, load_mortal, load_plain, load_verified, texts

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray", "ignore:Intervals of")


def test_a_run_whose_worker_is_killed_equals_one_process_to_the_last_bit(cluster, one_thread, tmp_path):
    import ray.data

    from tl_layersim.ray import analyze_on_ray

    # One test, as each process of Ray imports torch anew; a model without transformers, whose import takes longer still.
    tokens = random_tokens(60, 12).tolist()
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=32), lsim.LogitLens()]
    expected = lsim.analyze(load_plain(), lsim.Data(tokens, batch_size=2), analyzers, intervals=True)
    flag = tmp_path / "flag"
    flag.touch()
    rows = ray.data.from_items([{"input_ids": row} for row in tokens], override_num_blocks=4)
    # Blocks pass through a stage of Ray Data, which may hand them on out of order.
    rows = rows.map(lambda row: {"input_ids": list(row["input_ids"])})
    data = lsim.Data(rows, batch_size=2)
    found = analyze_on_ray(partial(load_mortal, flag, 6), data, analyzers, num_workers=2, intervals=True)
    assert not flag.exists()
    # The hook that ends the worker is a change of its model.
    assert_same(expected, found, ("seconds", "changes"))
    assert not rows.context.execution_options.preserve_order

    with pytest.raises(ValueError, match="banana"):
        analyze_on_ray(load_plain, rows, ["cka"], num_workers=1, resources={"banana": 3})
    with pytest.raises(FileNotFoundError, match="no such checkpoint") as missing:
        analyze_on_ray(load_missing, rows, ["cka"], num_workers=1)
    assert any("in load_missing" in note for note in missing.value.__notes__)


def test_what_cannot_be_done_on_ray_is_refused(monkeypatch, small_ray):
    from tl_layersim.ray import analyze_on_ray

    for loader, workers, match in (
        (lambda: lsim.open_model(None, remote=True), 1, r"`load_model`.*\bremote\b.*True"),
        (load_verified, 1, r"`load_model`.*\bverify\b.*'hf'"),
        (load, 0, "`num_workers`.* 0,"),
        (load(), 1, "`load_model`.*LlamaForCausalLM"),
    ):
        with pytest.raises(LayersimError, match=match):
            analyze_on_ray(loader, texts(4), ["cka"], num_workers=workers)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LayersimError, match=r"tl_layersim\[ray\]"):
        analyze_on_ray(load, texts(4), ["cka"], num_workers=1)


def test_a_copy_of_another_model_is_refused():
    from tl_layersim.ray.model_copy import ModelCopy, Settings, equal_fields_of

    own = ModelCopy(load_drawn, "resid_post").facts(Settings()).model
    settings = Settings(1, equal_fields_of(own))
    assert ModelCopy(load_drawn, "resid_post").facts(settings).model.weights_hash == own.weights_hash
    with pytest.raises(LayersimError, match=r"`load_model` gave another model .* weights_hash"):
        ModelCopy(load, "resid_post").facts(settings)


def test_a_copy_follows_settings_and_adds_as_a_tree():
    from tl_layersim.data.batches import Batches
    from tl_layersim.ray.model_copy import ModelCopy, Settings
    from tl_layersim.remote.open import open_source

    copy = ModelCopy(load, "resid_post")
    points = copy.ask(Settings(), "hook_points", "attn_out", False)
    batches = list(Batches(lsim.Data(texts(7), batch_size=1), open_source(load()).model))
    settings = Settings(1, None, None, points, batches[0].first_row)
    assert copy.facts(settings).sites == tuple(point.name for point in points)
    assert copy.facts(replace(settings, number=2, points=None, settled_on=None)).sites[0] == "blocks.0.hook_resid_pre"
    kernels = OnThisMachine("a", {"norm": norms})
    found = copy.sums(replace(settings, number=3), kernels, batches, 5)
    assert [part.count for part in found.parts] == [1, 2, 4]
    terms = [copy.sums(settings, kernels, [batch], 0).parts[0].out["norm"]["x"] for batch in batches]
    assert torch.equal(found.parts[1].out["norm"]["x"], terms[1] + terms[2])
    assert torch.equal(found.parts[2].out["norm"]["x"], (terms[3] + terms[4]) + (terms[5] + terms[6]))


@dataclass
class OnThisMachine:
    key: str
    value: dict

    def get(self):
        return self.value


def norms(view):
    return {"x": view.activations.double().square().sum((1, 2))}
