"""The functions of the package as a user calls them on a tiny model of a family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import tl_layersim as lsim

from ..running.options import called
from .family_cases import CASES, model_of

STEP = lsim.AlignedTraining(steps=1)


def labelled(key: str) -> dict[str, torch.Tensor]:
    """The data with labels, where the model has a head."""
    case = CASES[key]
    targets = case.targets()
    return case.data() | ({} if targets is None else {"labels": targets})


def positions(key: str) -> str:
    return "mean" if CASES[key].pooled else "all"


def similarities(key: str) -> list[Any]:
    """CKA, and cosines where all sites have one width."""
    return [lsim.CKA(minibatch=6), *([] if CASES[key].pooled else [lsim.Cosine(center="none")])]


def analyze(key: str) -> Any:
    case = CASES[key]
    return called(lsim.analyze, model_of(key), case.data(), similarities(key), positions=positions(key), **case.named)


def predictions(key: str) -> Any:
    analyzers = [lsim.LogitLens(labels="data"), lsim.Saturation(), lsim.ExitCurve(labels="data")]
    return called(lsim.analyze, model_of(key), labelled(key), analyzers, **CASES[key].named_head)


def attach(key: str) -> Any:
    case = CASES[key]
    probed = {"positions": positions(key)}
    with torch.no_grad(), called(lsim.attach, model_of(key), similarities(key), **probed, **case.named) as probe:
        model_of(key)(**case.data())
    return probe.results()


def compare(key: str) -> Any:
    case = CASES[key]
    layers = {"layers": (list(case.layers), list(case.layers))} if case.layers else {}
    models = (model_of(key), model_of(key, 1))
    return called(lsim.compare, *models, case.data(), lsim.CKA(minibatch=6), positions=positions(key), **layers)


def stitch(key: str) -> Any:
    case = CASES[key]
    # Classes also for an encoder of images, which has no tokens to predict either.
    classes = torch.arange(6) % 3 if case.side and not case.labels else None
    options: dict[str, Any] = {"labels": "data" if case.labels else classes}
    options |= {"layers": (list(case.layers), list(case.layers))} if case.layers else {}
    return called(lsim.stitch, model_of(key), model_of(key, 1), labelled(key), at=(0, 0), fit="lstsq", **options)


def finetune_aligned(key: str) -> Any:
    model = copy.deepcopy(model_of(key))
    return called(lsim.finetune_aligned, model, labelled(key), STEP, labels="data", batch_size=2, **CASES[key].named_head)


def evaluate_layers(key: str) -> Any:
    return called(lsim.evaluate_layers, model_of(key), model_of(key, 1), labelled(key), labels="data", **CASES[key].named_head)


def early_exit(key: str) -> Any:
    data = CASES[key].data()
    main = next(data[name] for name in ("pixel_values", "input_ids", "x") if name in data)
    mask = {name: values for name, values in data.items() if name == "attention_mask"}
    return called(lsim.EarlyExit, model_of(key), threshold=0.4, at=(0,), **CASES[key].named_head).logits(main, **mask)


def truncate(key: str) -> Any:
    return lsim.truncate(model_of(key), 1)


def block_coupling(key: str) -> Any:
    case = CASES[key]
    return called(lsim.analyze, model_of(key), case.data(2), lsim.BlockCoupling(k=2), positions="last", **case.named)


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "`analyze`": analyze,
    "`attach`": attach,
    "`compare`": compare,
    "predictions by layer": predictions,
    "`stitch`": stitch,
    "`finetune_aligned`": finetune_aligned,
    "`evaluate_layers`": evaluate_layers,
    "`EarlyExit`": early_exit,
    "`truncate`": truncate,
    "`BlockCoupling`": block_coupling,
}
