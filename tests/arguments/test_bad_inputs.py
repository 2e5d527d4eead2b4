"""Bad values in place of each argument of the public functions, classes and results: an error of this package or of Python."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

import tl_layersim as lsim
from tl_layersim import early_exit, sources
from tl_layersim.analyzers import find_analyzers

from ..models.tiny_models import random_tokens, tiny_llama

BAD = [None, float("nan"), -1, 10**30, "", "no such name", [], object(), True, 1j]
# Arguments that take any object and look at it later.
LATER = {("AlignedTraining", "lora"), ("relate", "values"), ("relate", "scores")}


@contextmanager
def within(seconds: int):
    def ended(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def raw_errors(name: str, call: Callable[..., Any], valid: dict[str, Any], use: Callable[[Any], Any] = lambda made: made):
    """Exceptions of other kinds, or that cannot be printed, and their arguments."""
    found = []
    for argument, declared in inspect.signature(call).parameters.items():
        if declared.kind in (declared.VAR_KEYWORD, declared.VAR_POSITIONAL) or (name, argument) in LATER:
            continue
        for number, value in enumerate(BAD):
            if value is declared.default:
                continue
            try:
                with within(10):
                    use(call(**{**valid, argument: value}))
            except (lsim.LayersimError, TypeError, OverflowError, OSError) as error:
                str(error)
            except Exception as error:
                found.append(f"{name}({argument}=BAD[{number}]): {type(error).__name__}: {error}"[:160])
    return found


@pytest.fixture(scope="module")
def valid():
    model, tokens, cosine = tiny_llama(layers=2), random_tokens(6, 8), lsim.Cosine(center="none")
    comparison = {"data": tokens, "analyzer": lsim.CKA(minibatch=8, unit="token")}
    report = lsim.analyze(model, tokens, cosine)
    prompt = {"model": model, "prompt": tokens[0]}
    return {
        "analyze": {"model": model, "data": tokens, "analyzers": cosine},
        "compare_grid": {"models": {"a": model, "b": model}, **comparison},
        "attach": {"model": model, "analyzers": cosine},
        "block_jacobians": prompt,
        "coupling_matrices": {**prompt, "k": 2},
        "prediction_grid": prompt,
        "trajectory_pca": prompt,
        "estimate": {"model_or_config": model, "analyzers": cosine, "seq_len": 64},
        "exponential_fit": {"given": report["cosine"]},
        "frequent_tokens": {"model": model, "data": tokens, "size": 5},
        "linear_probe": {"model": model, "data": {"input_ids": tokens, "labels": tokens % 3}},
        "sites": {"model": model},
        "stitch": {"front": model, "back": model, "data": tokens, "at": (0, 0), "fit": "lstsq", "ridge": 0.1},
        "sweep": {"models": {0: model, 1: model}, "data": tokens, "analyzers": cosine},
        "stack": {"runs": {"a": report, "b": report}},
        "plot": {"table": lsim.stack({0: report["cosine"], 1: report["cosine"]})},
        "relate": {"values": {0: 1.0, 1: 2.0, 2: 4.0}, "scores": {0: 1.0, 1: 2.0, 2: 3.0}},
        "truncate": {"model": model, "n_layers": 1},
        "untrained": {"model": model},
        "EarlyExit": {"model": model},
    }


@pytest.mark.heavy("every function with every wrong value")
@pytest.mark.filterwarnings("ignore")
def test_functions(valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public = {
        name: getattr(part, name) for part in (sources, early_exit, lsim.prompts, lsim.many, lsim) for name in part.__all__
    }
    assert [error for name, own in valid.items() for error in raw_errors(name, public[name], own)] == []


@pytest.mark.heavy("every setting with every wrong value")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [lsim.AlignedTraining, lsim.stitching.StitchTraining, *find_analyzers().values()])
def test_settings(made, valid):
    def measure(settings):
        if isinstance(settings, lsim.CKA | lsim.Cosine | lsim.LogitLens | lsim.LinearPredictivity):
            lsim.analyze(valid["sites"]["model"], valid["analyze"]["data"], settings)

    assert raw_errors(made.__name__, made, {}, measure) == []


@pytest.mark.heavy("every method with every wrong value")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("analyzer", [lsim.Cosine(), lsim.LogitLens(), lsim.ExitCurve(), lsim.BlockCoupling(k=2)])
def test_methods_of_results(analyzer, valid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [result] = lsim.analyze(valid["sites"]["model"], valid["analyze"]["data"], analyzer, intervals=True).values()
    needed = {"path": "file", "threshold": 0.5, "eps": 0.1, "agreement": None}
    for name, call in inspect.getmembers(result, inspect.ismethod):
        if not name.startswith("_"):
            own = {argument: needed[argument] for argument in inspect.signature(call).parameters if argument in needed}
            assert raw_errors(f"{type(result).__name__}.{name}", call, own) == []
