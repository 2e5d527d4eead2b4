"""Evaluation mode of a model for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.typed import named

if TYPE_CHECKING:
    pass


import functools
import threading
import types
from collections import OrderedDict
from contextlib import nullcontext


@named
@contextmanager
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """Every submodule in evaluation mode, and each one's own mode back at the end."""
    modes = [(sub, sub.training) for sub in every_module(module)]
    try:
        for sub, _ in modes:
            sub.training = False
        yield
    finally:
        for sub, training in modes:
            sub.training = training


def every_module(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Its submodules, and those of the model inside a TransformerBridge, some of which the bridge does not list."""
    inner = vars(module).get("original_model")
    more = inner.modules() if isinstance(inner, torch.nn.Module) else ()
    return list(dict.fromkeys((*module.modules(), *more)))


# One thread at a time: kernels run with float32 products at full precision, a setting of the whole process.
_KERNELS = threading.RLock()
_THREAD = threading.local()


@contextmanager
def kernels_alone() -> Iterator[None]:
    """A context for kernels: no other thread runs one, and blocks that they call again are no forward pass of the model."""
    with _KERNELS:
        before = in_kernel()
        _THREAD.in_kernel = True
        try:
            yield
        finally:
            _THREAD.in_kernel = before


def in_kernel() -> bool:
    """Whether this thread runs a kernel."""
    return getattr(_THREAD, "in_kernel", False)


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which does nothing in other threads: they may run the same modules at the same time."""
    thread = threading.get_ident()

    def call(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return call


class Hook:
    """A forward hook or forward pre-hook of one module that a copy of that module does not carry.

    A deep copy has no hook in its place, a pickled module one that does nothing.

    Args:
        module: which it is registered on.
        call: what torch calls.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of Python's own that takes anything and gives None: a pickled model is loaded without this package.
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        made = memo.get(id(self.module))
        if isinstance(made, torch.nn.Module):
            # What `copy` keeps alive for a copy is freed when the copy is whole.
            memo.setdefault(id(memo), []).append(_Sweeper(made))
        return _nothing


class _Sweeper:
    """Takes the hooks that do nothing off a copied module when it is freed itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __del__(self) -> None:
        state = vars(self.module)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            for number in [number for number, hook in state.get(name, {}).items() if hook is _nothing]:
                for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    state.get(kind, {}).pop(number, None)


def _nothing(*_: Any) -> None:
    """In a copy's place of a hook, until it is swept."""


@dataclass(frozen=True)
class Quiet:
    """A module of the model, called without anybody's hooks and without dropout: a lens is no part of a user's run.

    The module itself stays as it is: other threads may be running it.
    """

    module: torch.nn.Module

    def __call__(self, x: Tensor) -> Any:
        return _shadow(self.module, {})(x)


def _shadow(module: torch.nn.Module, made: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """A module with the same parameters and buffers, without hooks, in evaluation mode; so are those inside it."""
    if id(module) in made:
        return made[id(module)]
    shadow = made[id(module)] = object.__new__(type(module))
    state = dict(vars(module))
    for name, value in state.items():
        # accelerate and others put a `forward` into the instance that holds the module itself.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            state[name] = types.MethodType(value.__func__, shadow)
        elif isinstance(value, functools.partial) and any(part is module for part in value.args):
            args = [shadow if part is module else part for part in value.args]
            state[name] = functools.partial(value.func, *args, **value.keywords)
    inside = {name: None if sub is None else _shadow(sub, made) for name, sub in module._modules.items()}
    state |= {"_modules": inside, "_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict(), "training": False}
    # Straight into the instance: TransformerBridge's components hand attributes on to what they wrap.
    vars(shadow).update(state)
    return shadow
