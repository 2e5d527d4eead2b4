"""A small script of a user, which `test_typed_user.py` checks with `mypy --strict` outside of this repository and runs."""

from __future__ import annotations

from typing import assert_type

import torch

import tl_layersim as lsim
from tl_layersim.analyzers.cka import CKAResult
from tl_layersim.engine import RemoteRun
from tl_layersim.user_loops import Probe


def one_model(model: torch.nn.Module, texts: list[str]) -> lsim.Report:
    """A report of several analyzers, of one, and of names."""
    report = lsim.analyze(
        model, lsim.Data(texts, batch_size=4, max_tokens=512, seq_len=64), [lsim.Cosine(center="none"), "cka"]
    )
    assert_type(report, lsim.Report)
    assert_type(lsim.analyze(model, torch.ones(2, 8, dtype=torch.long), lsim.Trajectory(), blocking=True), lsim.Report)
    return report


def on_a_server(model: object, blocking: bool) -> RemoteRun:
    """A run that is not waited for."""
    assert_type(
        lsim.analyze(lsim.open_model(model, remote=True), ["a text"], "cka", blocking=blocking), lsim.Report | RemoteRun
    )
    run = lsim.analyze(lsim.open_model(model, remote=True), ["a text"], "cka", blocking=False)
    assert_type(run, RemoteRun)
    return run


def two_models(model: torch.nn.Module, texts: list[str]) -> float:
    """The result of a single analyzer, with the methods of its class, and a report of several."""
    similarity = lsim.compare(model, model, texts, lsim.CKA(minibatch=32))
    assert_type(similarity, CKAResult)
    assert_type(lsim.compare(model, model, texts, "cka"), lsim.Result)
    assert_type(lsim.compare(model, model, texts, [lsim.CKA(minibatch=32)]), lsim.Report)
    return float(similarity.values[0, 0])


def own_loop(model: torch.nn.Module, tokens: torch.Tensor) -> lsim.Report:
    """Sums from inside a loop."""
    with lsim.attach(model, [lsim.Cosine(center="none")]) as probe:
        model(tokens)
    assert_type(probe, Probe)
    return probe.results()


def main() -> list[str]:
    """Run all but what needs a server; return the names of the results."""
    model, texts = lsim.demo_model(), lsim.demo_text()[:4]
    names = list(one_model(model, texts)) + list(own_loop(model, torch.arange(3, 43).view(2, 20)))
    assert two_models(model, texts) > 0
    return names
