"""Context managers that add hooks, stop forward passes or change a model's mode, and restore the model at the end.

No other module registers torch hooks or stops forward passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..activations.block_call import first_tensor
from ..architectures.module_paths import modules_by_path
from ..core.arguments import typed


def on_enter(module: torch.nn.Module, call: Callable[..., Any], first: bool = False) -> RemovableHandle:
    """Register a forward pre-hook.

    Args:
        module: the module.
        call: function of the module, its positional and its keyword arguments; if it returns a pair, the pair replaces the
            arguments.
        first: whether to run before existing hooks.
    """
    return module.register_forward_pre_hook(call, with_kwargs=True, prepend=first)


def on_leave(
    module: torch.nn.Module, call: Callable[..., Any], with_kwargs: bool = False, always: bool = False
) -> RemovableHandle:
    """Register a forward hook.

    Args:
        module: the module.
        call: function of the module, its positional arguments and its output; if it returns a value, the value replaces the
            output.
        with_kwargs: whether `call` also gets the keyword arguments, before the output.
        always: whether to run even after an exception in the module's forward.
    """
    return module.register_forward_hook(call, with_kwargs=with_kwargs, always_call=always)


def on_tensor(module: torch.nn.Module, incoming: bool, see: Callable[[Tensor], object]) -> RemovableHandle:
    """Register a hook that reads the first tensor of a module's input or output, in this thread only.

    Args:
        module: the module.
        incoming: True to read the input, False for the output.
        see: function that gets the tensor.
    """

    def enter(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(first_tensor((*args, *kwargs.values())))

    def leave(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        see(first_tensor(output))

    if incoming:
        return on_enter(module, in_this_thread(enter))
    return on_leave(module, in_this_thread(leave))


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict a hook to the current thread; other threads may run the same modules."""
    thread = threading.get_ident()

    def call(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return call


@contextmanager
def temporary_hooks() -> Iterator[list[RemovableHandle]]:
    """A context manager that yields a list of handles, and removes their hooks at the end."""
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


class StopForward(Exception):
    """Exception that ends a forward pass early; its argument is the `ForwardRun` to end."""


class ForwardRun:
    """A context manager for forward passes that a hook may end early.

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
        """End the forward pass. Hooks call this method."""
        raise StopForward(self)

    def __enter__(self) -> ForwardRun:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return isinstance(error, StopForward) and error.args[0] is self


@contextmanager
@typed
def eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """A context manager that sets all submodules to evaluation mode, and restores each mode at the end."""
    with in_mode(module, training=False):
        yield


@contextmanager
def in_mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """A context manager that sets all submodules to training or evaluation mode."""
    modes = [(submodule, submodule.training) for submodule in every_module(module)]
    try:
        _set_modes((submodule, training) for submodule, _ in modes)
        yield
    finally:
        _set_modes(modes)


def _set_modes(modes: Iterable[tuple[torch.nn.Module, bool]]) -> None:
    """Set the mode of modules that have another one."""
    for submodule, training in modes:
        # The assignment takes a hundred times as long as the look-up, and most models are in evaluation mode before.
        if submodule.training != training:
            submodule.training = training


@contextmanager
def frozen_weights(module: torch.nn.Module) -> Iterator[None]:
    """A context manager in which weights get no gradients and inference mode is off."""
    trainable = [p for p in module.parameters() if p.requires_grad and not p.is_inference()]
    with torch.inference_mode(False):
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


def every_module(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All submodules, including those inside a TransformerBridge that the bridge does not list."""
    modules = list(modules_by_path(module).values())
    # A bridge keeps its Hugging Face model in its dict, where torch does not see it.
    original_model = vars(module).get("original_model")
    if isinstance(original_model, torch.nn.Module):
        modules += modules_by_path(original_model).values()
    return list(dict.fromkeys(modules))


_local = threading.local()


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context manager in which probes (`lsim.attach`) do not record forward passes of this thread."""
    was_unrecorded = is_unrecorded()
    _local.unrecorded = True
    try:
        yield
    finally:
        _local.unrecorded = was_unrecorded


def is_unrecorded() -> bool:
    """Whether this thread is inside the context manager `unrecorded`."""
    return getattr(_local, "unrecorded", False)


# Kernels set the precision of float32 products, and some of them the kind of attention, for the whole process.
_KERNELS = threading.RLock()


@contextmanager
def kernels_alone() -> Iterator[None]:
    """A context manager in which only this thread runs the functions of analyzers (kernels); other threads wait."""
    with _KERNELS, unrecorded():
        yield
