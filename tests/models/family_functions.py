"""The functions of the package as a user calls them on a tiny model of a family."""

from __future__ import annotations

import copy
from typing import Any

import torch

import tl_layersim as lsim

from .family_cases import CASES, model_of

QUICK = lsim.AlignedTraining(steps=1)


def labelled(key: str) -> dict[str, Any]:
    """The data with labels, where the model has a head."""
    case = CASES[key]
    targets = case.targets()
    return case.data() | ({} if targets is None else {"labels": targets})


def analyze(key: str) -> Any:
    return lsim.analyze(model_of(key), CASES[key].data(), [lsim.Cosine(), lsim.CKA(minibatch=8)], positions="all")


def predictions(key: str) -> Any:
    analyzers = [lsim.LogitLens(labels="data"), lsim.Saturation(), lsim.ExitCurve(labels="data")]
    return lsim.analyze(model_of(key), labelled(key), analyzers)


def attach(key: str) -> Any:
    with torch.no_grad(), lsim.attach(model_of(key), [lsim.Cosine(center="none"), lsim.CKA(minibatch=8)], positions="all") as probe:
        model_of(key)(**CASES[key].data())
    return probe.results()


def compare(key: str) -> Any:
    return lsim.compare(model_of(key), model_of(key, 1), CASES[key].data(), lsim.CKA(minibatch=8), positions="all")


def stitch(key: str) -> Any:
    fit = {"adapter": "affine", "fit": "lstsq", "labels": "data"}
    return lsim.stitch(model_of(key), model_of(key, 1), labelled(key), at=(1, 1), **fit)


def finetune_aligned(key: str) -> Any:
    model = copy.deepcopy(model_of(key))
    return lsim.finetune_aligned(model, labelled(key), QUICK, labels="data", batch_size=2)


def evaluate_layers(key: str) -> Any:
    return lsim.evaluate_layers(model_of(key), model_of(key, 1), labelled(key), labels="data")


def early_exit(key: str) -> Any:
    return lsim.EarlyExit(model_of(key), threshold=0.4, at=(1,)).logits(**CASES[key].data())


def truncate(key: str) -> Any:
    return lsim.truncate(model_of(key), 1)


def block_coupling(key: str) -> Any:
    return lsim.analyze(model_of(key), CASES[key].data(2), lsim.BlockCoupling(k=2), positions="last")


FUNCTIONS = {
    "`analyze`": analyze,
    "`attach`": attach,
    "`compare`": compare,
    "predictions": predictions,
    "`stitch`": stitch,
    "`finetune_aligned`": finetune_aligned,
    "`evaluate_layers`": evaluate_layers,
    "`EarlyExit`": early_exit,
    "`truncate`": truncate,
    "`BlockCoupling`": block_coupling,
}
