"""Hooks of a probe: they let compiled forward passes go on, and copies of the model do not carry them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class ProbeHook:
    """A forward hook or forward pre-hook that is not copied with its module.

    A deep copy of the module has no hook in place of this one. A pickled module has a hook that does nothing.

    Args:
        module: the module that the hook is registered on.
        call: the function that torch calls.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., None]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that accepts any arguments and returns None, so that a pickled model can be
        # loaded without this package.
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        made = memo.get(id(self.module))
        if isinstance(made, torch.nn.Module):
            # `copy` keeps this list alive until the whole copy is made.
            memo.setdefault(id(memo), []).append(_Sweeper(made))
        return _nothing


class _Sweeper:
    """Removes the placeholder hooks of a copied module when the sweeper is freed.

    Args:
        module: the copy.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __del__(self) -> None:
        state = vars(self.module)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            for number in [number for number, hook in state.get(name, {}).items() if hook is _nothing]:
                for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                    state.get(kind, {}).pop(number, None)


def _nothing(*_: Any) -> None:
    """Placeholder for a hook in a copy of its module, until `_Sweeper` removes it."""


def uncompiled(hook: Callable[..., None], missed: Callable[[], None]) -> Callable[..., None]:
    """A hook that only reads, and that lets forward passes under `torch.compile` go on.

    The hook runs between two compiled graphs. Where a single graph is required, as by `fullgraph=True`, it does not run.

    Args:
        hook: of any arguments.
        missed: called while such a graph is made.
    """
    # Its functions have no annotations.
    compiler: Any = torch.compiler
    run = compiler.disable(hook)

    # While a graph is made, torch calls a function of a constant result, and traces all others.
    def look() -> bool:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        # torch has no public name for these. True where a later version has other names: no hook is then traced.
        now = InstructionTranslator.current_tx()
        single = bool(getattr(now, "one_graph", True) or getattr(now, "error_on_graph_break", False))
        if single:
            missed()
        return single

    is_skipped = compiler.assume_constant_result(look)

    def call(*args: Any) -> None:
        if not (torch.compiler.is_compiling() and is_skipped()):
            run(*args)

    return call
