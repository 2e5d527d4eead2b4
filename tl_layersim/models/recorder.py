"""Recorder: forward hooks that read the residual stream, and give one view for each forward pass with its tokens and mask."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import next_tokens
from ..data.labels import NO_LABEL
from .block_call import CACHES, first_tensor
from .hooks import StopForward, in_kernel, on_enter, on_leave
from .nested_passes import Frame
from .unembed import Unembed, tensor_of, unembed_gap
from .view import View, place

CACHE_ARGUMENTS = (*CACHES, "past_kv_cache")
# Inputs that a stack inside a model may take in place of tokens.
OTHER_INPUTS = ("pixel_values", "input_features", "input_values")


@dataclass(frozen=True)
class Tap:
    """The place at which one residual layer is read: the input or the output of a module.

    Attributes:
        module: the module.
        incoming: whether the input is read.
    """

    module: torch.nn.Module
    incoming: bool


@dataclass(frozen=True)
class Stack:
    """The stack, encoder or decoder, of an encoder-decoder model whose residual stream is read.

    Attributes:
        side: "encoder" or "decoder"; "" for a model of one stack, "both" for blocks of both.
        start: the token id with which the model itself begins its decoder input, None where its configuration has none.
    """

    side: Literal["", "encoder", "decoder", "both"]
    start: int | None = None


@dataclass(frozen=True)
class Call:
    """Shape and inputs of one forward pass, as known when its first residual layer is read.

    Attributes:
        shape: `batch pos` of the activations in the blocks (one position per row in cached generation).
        tokens: `batch pos`, None if the model was called with embeddings.
        attention: the attention mask of the stack that is read, in the form that the model was given, None if there is none.
        texts: number of texts that the model was given to tokenise by itself.
        cached: whether the model was given keys and values of earlier positions, which the mask then covers too.
        start: see `Stack`.
    """

    shape: tuple[int, int]
    tokens: Tensor | None
    attention: Any
    texts: int
    cached: bool = False
    start: int | None = None


@dataclass(frozen=True)
class Choice:
    """Positions of a forward pass that are counted, and positions that the model attends to.

    Attributes:
        counted: `batch pos`, positions that become tokens of the view.
        attended: `batch pos`, positions that the model attends to.
        pooled: as in `Batch`.
    """

    counted: Tensor
    attended: Tensor
    pooled: bool = False


@dataclass(frozen=True)
class Callbacks:
    """Functions that a recorder calls; see `HookedSource.tapped`.

    Attributes:
        on_view: takes each view.
        choose: gives the positions of a call that count.
        compare: called once, with the difference between the lens and the logits.
        on_error: takes errors of the hooks; None where errors are raised.
    """

    on_view: Callable[[View], None]
    choose: Callable[[Call], Choice]
    compare: Callable[[Tensor, torch.dtype], None] | None
    on_error: Callable[[Exception], None] | None


class Recorder:
    """Fills a view with the residual layers of a forward pass, in order. Layers out of order or in a backward pass are ignored.

    Every thread has its own frames, so forward passes of different threads are kept apart.

    Args:
        layers: names of the residual layers.
        callbacks: functions that take views, choose positions, compare logits and take errors.
        lens: gives the logit lens with the model's current modules.
        direct: whether the model's `forward` may be called directly, without its hooks.
        aside: true while the forward pass is not to be recorded.
        stack: the stack of an encoder-decoder that is read.
    """

    def __init__(
        self,
        layers: tuple[str, ...],
        callbacks: Callbacks,
        lens: Callable[[], Unembed | None],
        direct: bool,
        aside: Callable[[], bool],
        stack: Stack,
    ) -> None:
        self.layers, self.on_view, self.choose = layers, callbacks.on_view, callbacks.choose
        self.compare, self.on_error = callbacks.compare, callbacks.on_error
        self.lens, self.direct, self.aside, self.stack = lens, direct, aside, stack
        self.thread, self.local, self.stopped = threading.get_ident(), threading.local(), False

    # ---- registration of hooks

    def watch(self, module: torch.nn.Module, level: int) -> list[Any]:
        """Register hooks at the start and the end of a forward pass of the model (level 0), or of a stack inside it."""

        def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            self._begin(level, module, args, kwargs)

        return [
            on_enter(module, self._guarded(begin)),
            # Also after an exception, so that a later call does not see the state of a failed one.
            on_leave(module, self._guarded(self._end), always=True),
        ]

    def watch_embedding(self, module: torch.nn.Module) -> Any:
        """Register a hook that reads the tokens at the embedding."""
        return on_enter(module, self._guarded(self._see_tokens))

    def watch_mask(self, block: torch.nn.Module) -> Any:
        """Register a hook that reads the mask at the first block, for models whose `forward` is called without their hooks."""

        def see(_module: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            mask, frame = (kwargs or {}).get("attention_mask"), self._frame()
            if frame.attention is None and isinstance(mask, Tensor) and mask.dim() == 2:
                frame.attention = mask
            frame.cached |= (kwargs or {}).get("past_kv_cache_entry") is not None

        return on_enter(block, self._guarded(see))

    def watch_layer(self, tap: Tap, layer: int) -> Any:
        """Register a hook that reads one residual layer."""
        if tap.incoming:

            def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
                self._see(layer, first_tensor((*args, *(kwargs or {}).values())))

            return on_enter(tap.module, self._guarded(before))

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._see(layer, first_tensor(output))

        return on_leave(tap.module, self._guarded(after))

    def watch_head(self, head: torch.nn.Module) -> Any:
        """Register a hook that compares the lens with the output of the head, on the first row of its first call."""
        return on_leave(head, self._guarded(self._see_logits))

    def _guarded(self, handle: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            # Gradient checkpointing runs blocks again inside the backward pass; torch's own checkpointing uses the same test.
            if self.stopped or in_kernel() or torch._C._current_graph_task_id() != -1:
                return
            if self.on_error is None and threading.get_ident() != self.thread:
                return
            try:
                handle(*args)
            except StopForward:
                raise
            except Exception as error:
                if self.on_error is None:
                    raise
                # An error of a measurement must not end the user's forward pass.
                self.stopped = True
                self.on_error(error)

        return call

    # ---- calls of hooks

    def _frame(self) -> Frame:
        """The innermost running call in this thread."""
        if not hasattr(self.local, "frame"):
            self.local.frame = Frame(None, -1, None)
        frame: Frame = self.local.frame
        return frame

    def _running(self, frame: Frame) -> bool:
        return self.direct or frame.level >= 0

    def _begin(self, level: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        parent = self._frame()
        frame = self.local.frame = Frame(module, level, parent)
        if frame.inner:
            frame.tokens, frame.attention, frame.texts = parent.tokens, parent.attention, parent.texts
            frame.decoder, frame.cached = parent.decoder, parent.cached
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        frame.cached |= any(given.get(name) is not None for name in CACHE_ARGUMENTS)
        texts = given.get("input")
        if isinstance(texts, list) and texts and isinstance(texts[0], str):
            frame.texts = len(texts)
        if self.stack.side == "decoder" and ("decoder_input_ids" in names or "decoder_input_ids" in given):
            # The modules around the decoder also take the encoder's tokens and mask, which do not belong to the decoder.
            if not frame.decoder:
                frame.tokens, frame.attention, frame.decoder = None, None, True
            tokens, mask = given.get("decoder_input_ids"), given.get("decoder_attention_mask")
        else:
            first = given.get("input_ids", given.get(names[0]) if names else None)
            tokens, mask = first, given.get("attention_mask")
            if any(given.get(name) is not None for name in OTHER_INPUTS) and not _is_tokens(tokens):
                # A separate tower of a model that also reads text.
                frame.tokens, frame.attention = None, None
        if _is_tokens(tokens):
            frame.tokens = tokens.detach()
        # The outer model takes the plain mask; the stack inside it may take a mask that is computed from it.
        if mask is not None and (frame.attention is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            frame.attention = mask

    def _end(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        frame: Frame | None = self._frame()
        while frame is not None and frame.module is not module:
            # A frame that an interrupt left behind.
            frame = frame.parent
        if frame is None or frame.parent is None:
            return
        if frame.inner:
            frame.parent.last = frame.last
        self.local.frame = frame.parent

    def _see_tokens(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        frame = self._frame()
        given = [x for x in (*args, *(kwargs or {}).values()) if _is_tokens(x)]
        # A user may embed tokens outside of any forward pass; an encoder-decoder embeds those of both stacks.
        if given and self._running(frame) and not self.stack.side:
            frame.tokens = given[0].detach()

    def _see_logits(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        frame, compare = self._frame(), self.compare
        hidden, frame.last = frame.last, None
        lens = None if hidden is None or compare is None or not self._running(frame) else self.lens()
        if hidden is None or compare is None or lens is None:
            return
        self.compare = None
        logits = tensor_of(output)[0].detach()
        with torch.no_grad(), torch.autocast(device_type=hidden.device.type, enabled=False):
            compare(unembed_gap(lens, hidden, logits, len(hidden) - 1, finished=False), logits.dtype)

    def _see(self, layer: int, hidden: Tensor) -> None:
        frame = self._frame()
        if self.aside() or not self._counts(frame):
            return
        if layer == 0:
            frame.superseded = frame.next or None
            frame.restart()
            self._start(frame, hidden)
        elif layer != frame.next:
            if layer == frame.superseded:
                raise LayersimError(
                    "A forward pass was interrupted by another one of the same model, and continued after it.",
                    given=f"{self.layers[layer]} after the start of a second pass",
                    expected="one forward pass after the other, or calls of the model itself, which are kept apart",
                    do="model(tokens) in place of model.run_with_hooks(...) or model.forward(...) inside a hook",
                )
            return
        rows = self._unsharded(layer, hidden, frame)
        frame.buffer = place(frame.buffer, layer, len(self.layers), rows, frame.keep)
        frame.next += 1
        if frame.next == len(self.layers):
            if self.compare is not None:
                frame.last = hidden[0].detach()
            view = self._view(frame, frame.buffer)
            frame.restart()
            if frame.level < 0:
                frame.tokens, frame.attention, frame.texts, frame.cached = None, None, 0, False
            self.on_view(view)

    def _counts(self, frame: Frame) -> bool:
        """True where the running layers belong to a forward pass that is measured."""
        if frame.level >= 0:
            # A run of this package reads the forward pass that it started, not one that a user's hook starts inside it.
            return not (frame.nested and self.on_error is None)
        # The tokens and the mask of a forward pass that another thread began before the hooks were registered are not known.
        return self.direct and (frame.tokens is not None or threading.get_ident() == self.thread)

    def _start(self, frame: Frame, hidden: Tensor) -> None:
        if hidden.dim() != 3:
            raise self._misfit(0, hidden, "batch x pos x d_model")
        frame.shape = (hidden.shape[0], hidden.shape[1])
        start = self.stack.start if self.stack.side == "decoder" else None
        choice = self.choose(Call(frame.shape, frame.tokens, frame.attention, frame.texts, frame.cached, start))
        if tuple(choice.counted.shape) != frame.shape:
            raise self._misfit(
                0, hidden, f"{' x '.join(map(str, choice.counted.shape))} x d_model, the shape of the input tokens"
            )
        frame.keep, frame.attended = choice.counted.reshape(-1).nonzero()[:, 0], choice.attended

    def _unsharded(self, layer: int, hidden: Tensor, frame: Frame) -> Tensor:
        """The activations as one tensor, which must have the shape of the first layer."""
        shared: Any = hidden
        placements = getattr(shared, "placements", None)
        if placements is not None and all(placement.is_replicate() for placement in placements):
            hidden = shared.to_local()
        elif placements is not None:
            raise self._misfit(layer, hidden, "whole activations on every process, not parts of them (sequence parallelism)")
        width = hidden.shape[-1] if frame.buffer is None else frame.buffer.shape[-1]
        if tuple(hidden.shape) != (*frame.shape, width):
            raise self._misfit(layer, hidden, f"{frame.shape[0]} x {frame.shape[1]} x {width}, as {self.layers[0]}")
        return hidden

    def _misfit(self, layer: int, hidden: Tensor, expected: str) -> LayersimError:
        return LayersimError(
            f"The activations at {self.layers[layer]} do not have the shape of a residual stream.",
            given=" x ".join(map(str, hidden.shape)) + (" in parts" if hasattr(hidden, "placements") else ""),
            expected=expected,
            do="layers=[...] with blocks whose inputs and outputs are batch x pos x d_model",
        )

    def _view(self, frame: Frame, activations: Tensor) -> View:
        shape, keep = frame.shape, frame.keep.to(activations.device)
        tokens, following = torch.zeros(shape, dtype=torch.int64), torch.full(shape, NO_LABEL)
        if frame.tokens is not None:
            if frame.tokens.dim() != 2 or frame.tokens.shape[1] != shape[1] or frame.tokens.shape[0] not in (1, shape[0]):
                raise LayersimError(
                    "The input tokens do not match the positions that run through the blocks.",
                    given=f"tokens of shape {tuple(frame.tokens.shape)} and activations of {shape[0]} x {shape[1]} positions",
                    expected="one position for each token",
                    do="model(inputs_embeds=...), or blocks of the part of the model that reads the tokens",
                )
            tokens = frame.tokens.expand(shape)
            following = next_tokens(tokens, frame.attended.to(tokens.device))
        return View(
            activations=activations,
            tokens=tokens.to(activations.device).reshape(-1)[keep],
            sequence=keep // shape[1],
            position=keep % shape[1],
            next_token=following.to(activations.device).reshape(-1)[keep],
            unembed=self.lens(),
        )


def _is_tokens(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point()


def stack_side(module: torch.nn.Module, blocks: list[torch.nn.Module]) -> Stack:
    """The stack of an encoder-decoder to which the blocks belong."""
    config = getattr(module, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return Stack("")
    members = set(blocks)
    for side in ("decoder", "encoder"):
        find: Any = getattr(module, f"get_{side}", None)
        stack = find() if find is not None else None
        if isinstance(stack, torch.nn.Module) and stack is not module and members <= set(stack.modules()):
            start = getattr(config, "decoder_start_token_id", None)
            return Stack("decoder", start if isinstance(start, int) else None) if side == "decoder" else Stack("encoder")
    return Stack("both")
