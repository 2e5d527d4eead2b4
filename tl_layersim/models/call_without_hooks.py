"""Calls of a module without its hooks and without dropout, as the logit lens calls the final norm and the unembedding."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quiet:
    """Calls a module of the model without hooks and without dropout, because the logit lens is not part of a forward pass.

    The module itself is not changed, because other threads may be running it.
    """

    module: torch.nn.Module

    def __call__(self, x: Tensor) -> Any:
        return _shadow(self.module, {})(x)


def _shadow(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """A module with the same parameters and buffers, in evaluation mode and without hooks, submodules included."""
    if id(module) in made:
        return made[id(module)]
    shadow = made[id(module)] = object.__new__(type(module))
    state = dict(vars(module))
    for name, value in state.items():
        # accelerate and others store on the instance a `forward` that is bound to the module itself.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            state[name] = types.MethodType(value.__func__, shadow)
        elif isinstance(value, functools.partial) and any(part is module for part in value.args):
            args = [shadow if part is module else part for part in value.args]
            state[name] = functools.partial(value.func, *args, **value.keywords)
    inside = {name: None if sub is None else _shadow(sub, made) for name, sub in module._modules.items()}
    state |= {"_modules": inside, "_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict(), "training": False}
    # Into the instance's dict: the components of a TransformerBridge pass attributes on to the modules that they wrap.
    vars(shadow).update(state)
    return shadow
