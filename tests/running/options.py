"""Calls whose options are in one mapping: those of reading go to `Data`, those of opening to `open_model`."""

from __future__ import annotations

import inspect
from typing import Any

import tl_layersim as lsim

READING = {name for name in inspect.signature(lsim.Data).parameters if name != "source"}
OPENING = {name for name in inspect.signature(lsim.open_model).parameters if name != "model"}
MODELS = ("model", "model_a", "model_b", "front", "back", "before", "after", "clip")
DATA = ("data", "prompt", "images")


def called(call: Any, *args: Any, **options: Any) -> Any:
    """`call(*args, **options)`. A pair in `layers`, `remote` or `verify` has one entry for each of two models."""
    parameters = inspect.signature(call).parameters
    own = {name: options.pop(name) for name in list(options) if name in parameters}
    reading = {name: options.pop(name) for name in list(options) if name in READING}
    opening = {name: options.pop(name) for name in list(options) if name in OPENING}
    given = inspect.signature(call).bind_partial(*args, **own, **options).arguments
    own_options = given.pop("options", {})
    for number, name in enumerate(name for name in MODELS if name in given):
        pair = {key: value[number] if isinstance(value, tuple) else value for key, value in opening.items()}
        if pair := {key: value for key, value in pair.items() if value not in (None, False)}:
            given[name] = lsim.open_model(given[name], **pair)
    for name in DATA:
        if name in given and reading:
            given[name] = lsim.Data(given[name], **reading)
    return call(**given, **own_options)
