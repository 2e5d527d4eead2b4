"""Settings of all tests, and fixtures that any of them may use."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import types
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors of tests are small, and threads of several processes only wait for each other; read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import tl_layersim as lsim

from .models.tiny_models import random_tokens, tiny_llama
from .running.levels import mark_heavy_cases, mark_transformer_lens

# No example fails because the machine is busy.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")
# The same examples on every machine of continuous integration; new ones wherever a person runs the tests.
settings.register_profile("ci", settings.get_profile("any load"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# What is imported and collected is no garbage; looking for some in it would take a third of the time of collecting.
gc.disable()

# A program of its own, which hides this package from itself.
collect_ignore = ["remote/small_ndif.py"]


# nnsight parses the source of every function that it ships again for each request, which took a third of the time of tests of
# servers. The source of a function does not change.
_parse_source = inspect.getsourcelines
_parsed_sources: weakref.WeakKeyDictionary[types.FunctionType, tuple[list[str], int]] = weakref.WeakKeyDictionary()


def source_lines(function):
    """`inspect.getsourcelines`, which parses the source of a function once."""
    if not isinstance(function, types.FunctionType):
        return _parse_source(function)
    if function not in _parsed_sources:
        _parsed_sources[function] = _parse_source(function)
    lines, first = _parsed_sources[function]
    return list(lines), first


inspect.getsourcelines = source_lines


def pytest_make_parametrize_id(val):
    """Name a case by its value, where pytest would number it, such as `torch.float16` and not `dtype1`."""
    if isinstance(val, types.LambdaType) and val.__name__ == "<lambda>":
        # What it calls, such as `lsim.analyze tiny_llama`.
        return " ".join(val.__code__.co_names)[:60] or None
    if isinstance(val, tuple | list | dict | torch.dtype | torch.Size) or (
        dataclasses.is_dataclass(val) and not isinstance(val, type)
    ):
        text = " ".join(repr(val).split())
        # Addresses and large values say nothing.
        return text[:60] if "0x" not in text and "tensor(" not in text else None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before pytest leaves out what `-m` leaves out."""
    mark_heavy_cases(items)
    mark_transformer_lens(items)


def pytest_collection_finish():
    """Leave what was imported out of each later garbage collection: it is most of all objects, and none of it is garbage."""
    gc.freeze()
    # Old objects are looked through a tenth as often as by default.
    gc.set_threshold(700, 10, 100)
    gc.enable()


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def demo():
    return lsim.demo_model()


@pytest.fixture(scope="session")
def data():
    mask = torch.ones(6, 20, dtype=torch.int64)
    mask[3, 12:] = 0
    mask[4, :5] = 0
    return {"input_ids": random_tokens(6, 20), "attention_mask": mask}
