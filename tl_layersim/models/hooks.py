"""Forward hooks, early ends of forward passes and evaluation mode: how this package runs a model and leaves it unchanged.

No other module registers torch hooks or stops forward passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from ..core.argument_checks import typed


def on_enter(module: torch.nn.Module, call: Callable[..., Any], first: bool = False) -> RemovableHandle:
    """Register a forward pre-hook.

    Args:
        module: the module.
        call: called with the module, its positional and its keyword arguments; a pair returned replaces these arguments.
        first: whether to run before the hooks that the module has already.
    """
    return module.register_forward_pre_hook(Hook(module, call), with_kwargs=True, prepend=first)


def on_leave(
    module: torch.nn.Module, call: Callable[..., Any], with_kwargs: bool = False, always: bool = False
) -> RemovableHandle:
    """Register a forward hook.

    Args:
        module: the module.
        call: called with the module, its positional arguments and its output; a value returned replaces the output.
        with_kwargs: whether to call with the keyword arguments too, before the output.
        always: whether to call also after an exception in the module's forward.
    """
    return module.register_forward_hook(Hook(module, call), with_kwargs=with_kwargs, always_call=always)


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """A context that yields a list; the hooks whose handles the caller appends to the list are removed at the end."""
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


class StopForward(Exception):
    """Ends a forward pass early.

    Args:
        run: the run that ends with it.
    """

    def __init__(self, run: ForwardRun) -> None:
        super().__init__(run)
        self.run = run


class ForwardRun:
    """A context for forward passes that a hook may end early.

    A hook that calls `stop` ends the forward pass, and execution continues after the `with` block. A `StopForward` of another
    run passes through.

    Examples:
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))  # the second would raise
        >>> seen = []
        >>> with temporary_hooks() as handles, ForwardRun() as run:
        ...     handles.append(on_leave(module[0], lambda _m, _args, output: (seen.append(output), run.stop())))
        ...     _ = module(torch.ones(1, 2))
        >>> seen[0].shape
        torch.Size([1, 2])
    """

    def stop(self) -> NoReturn:
        """End the forward pass; called by a hook."""
        raise StopForward(self)

    def __enter__(self) -> ForwardRun:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return isinstance(error, StopForward) and error.run is self


@contextmanager
@typed
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """A context in which every submodule is in evaluation mode; each submodule's own mode is restored at the end."""
    modes = [(sub, sub.training) for sub in every_module(module)]
    try:
        for sub, _ in modes:
            sub.training = False
        yield
    finally:
        for sub, training in modes:
            sub.training = training


def every_module(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All submodules of a module, including those inside a TransformerBridge that the bridge itself does not list."""
    inner = vars(module).get("original_model")
    more = inner.modules() if isinstance(inner, torch.nn.Module) else ()
    return list(dict.fromkeys((*module.modules(), *more)))


# Kernels run in one thread at a time, because they set the precision of float32 products for the whole process.
_KERNELS = threading.RLock()
_THREAD = threading.local()


@contextmanager
def kernels_alone() -> Iterator[None]:
    """A context for kernels: no other thread runs kernels, and block calls made inside are not recorded as a forward pass."""
    with _KERNELS:
        before = in_kernel()
        _THREAD.in_kernel = True
        try:
            yield
        finally:
            _THREAD.in_kernel = before


def in_kernel() -> bool:
    """True while this thread runs a kernel."""
    return getattr(_THREAD, "in_kernel", False)


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs only in the current thread, because other threads may run the same modules at the same time."""
    thread = threading.get_ident()

    def call(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return call


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


class Hook:
    """A forward hook or forward pre-hook that is not copied with its module.

    A deep copy of the module has no hook in place of this one. A pickled module has a hook that does nothing.

    Args:
        module: the module that the hook is registered on.
        call: the function that torch calls.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        self.module, self.call = module, call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that accepts any arguments and returns None, so that a pickled model can be
        # loaded without this package.
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
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
