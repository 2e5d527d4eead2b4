"""Recorder: forward hooks that read sites of a model, and give one view for each forward pass with its tokens and mask."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..data.batches import next_tokens
from ..data.labels import NO_LABEL
from .block_call import CACHES, first_tensor
from .feature_maps import to_positions
from .firing_order import not_once
from .hooks import StopForward, in_kernel, on_enter, on_leave, uncompiled
from .nested_passes import Frame
from .reading import Call, Callbacks, Reading, Stack
from .site_buffer import SiteBuffer
from .unembed import Unembed, tensor_of, unembed_gap
from .view import View

CACHE_ARGUMENTS = (*CACHES, "past_kv_cache")
# Inputs that a stack inside a model may take in place of tokens.
OTHER_INPUTS = ("pixel_values", "input_features", "input_values")


class Recorder:
    """Fills a view with the sites of a forward pass, in order. Sites out of order or in a backward pass are ignored.

    Every thread has its own frames, so forward passes of different threads are kept apart.

    Args:
        reading: the sites.
        callbacks: functions that take views, choose positions, compare logits and take errors.
        lens: gives the logit lens with the model's current modules.
        direct: whether the model's `forward` may be called directly, without its hooks.
        aside: true while the forward pass is not to be recorded.
        stack: the stack of an encoder-decoder that is read.
    """

    def __init__(
        self,
        reading: Reading,
        callbacks: Callbacks,
        lens: Callable[[], Unembed | None],
        direct: bool,
        aside: Callable[[], bool],
        stack: Stack,
    ) -> None:
        self.reading, self.order = reading, reading.order
        self.on_view, self.choose = callbacks.on_view, callbacks.choose
        self.compare, self.on_error = callbacks.compare, callbacks.on_error
        self.lens, self.direct, self.aside, self.stack = lens, direct, aside, stack
        self.thread, self.local, self.stopped = threading.get_ident(), threading.local(), False
        self.missed = False

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

    def watch_sites(self, module: torch.nn.Module, incoming: bool, sites: list[int]) -> Any:
        """Register a hook that reads the sites that are parts of a module's input, or of its output."""
        if incoming:

            def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
                self._see(sites, first_tensor((*args, *(kwargs or {}).values())))

            return on_enter(module, self._guarded(before))

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._see(sites, first_tensor(output))

        return on_leave(module, self._guarded(after))

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

        return call if self.on_error is None else uncompiled(call, self._miss)

    def _miss(self) -> None:
        """Report a forward pass that torch compiles to one graph."""
        if self.on_error is not None and not self.stopped:
            self.stopped = True
            self.on_error(
                LayersimError(
                    "A compiled forward pass cannot be measured: one graph for the whole model leaves no place for hooks. "
                    'Compile without fullgraph=True, or use torch.compiler.set_stance("force_eager").'
                )
            )

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
            frame.tokens, frame.attention = parent.tokens, parent.attention
            frame.decoder, frame.cached = parent.decoder, parent.cached
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        frame.cached |= any(given.get(name) is not None for name in CACHE_ARGUMENTS)
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

    def _end(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        frame: Frame | None = self._frame()
        while frame is not None and frame.module is not module:
            # A frame that an interrupt left behind.
            frame = frame.parent
        if frame is None or frame.parent is None:
            return
        if frame.inner:
            frame.parent.last = frame.last
            frame.parent.complete |= frame.complete
            if self.reading.inside:
                frame.parent.read_here |= frame.read_here
        self.local.frame = frame.parent
        # A pass that failed, or that another run of this package ended early, has no output.
        whole = output is not None and frame.level == 0 and not frame.inner and self._counts(frame)
        if whole and self.order is None and not self.reading.inside and not self.aside():
            missing = next(site for site in range(len(self.reading.names)) if site not in frame.seen)
            raise self._not_once(missing, "the forward pass did not run it")
        if whole and not frame.complete and self.on_error is not None and not self.missed and not self.aside():
            self.missed = True
            missing = next(site for site in range(len(self.reading.names)) if site not in {*frame.seen, *frame.read_here})
            # A filter of the user may make errors of warnings.
            with suppress(Warning):
                warn(
                    f"A forward pass did not run the module of {self.reading.names[missing]}, and is not measured. Modules "
                    "that are replaced need a new probe. A graph that torch compiled before runs modules only under "
                    'torch.compiler.set_stance("force_eager").'
                )

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
            attended = torch.ones(len(hidden), dtype=torch.bool)
            compare(unembed_gap(lens, hidden, logits, attended, finished=False), logits.dtype)

    def _see(self, sites: list[int], hidden: Tensor) -> None:
        here = self._frame()
        if self.aside() or not self._counts(here):
            return
        frame = here if self.reading.inside else here.outermost
        for site in sites:
            if not self.reading.inside and here.level >= 0 and site in here.read_here:
                raise self._not_once(site, "it runs more than once in a forward pass")
            if not self._expected(site, frame):
                return
            here.read_here.add(site)
            pos = None if here.tokens is None or here.tokens.dim() != 2 else here.tokens.shape[1]
            tap, whole = self.reading.taps[site], self._unsharded(site, hidden)
            places = to_positions(whole, tap.channels, self.reading.names[site], pos)
            buffer = frame.buffer if frame.buffer is not None and frame.seen else self._start(site, here, frame, places)
            buffer.put(site, places, tap.part)
            frame.buffer = buffer
            frame.seen.append(site)
            if site == self.reading.last and self.compare is not None:
                frame.last = hidden[0].detach()
        if frame.buffer is not None and len(frame.seen) == len(self.reading.names):
            self.order = tuple(frame.seen)
            view = self._view(frame, frame.buffer)
            here.complete = frame.complete = True
            frame.restart()
            if frame.level < 0:
                frame.tokens, frame.attention, frame.cached = None, None, False
            self.on_view(view)

    def _expected(self, site: int, frame: Frame) -> bool:
        """True if this site is the next of the forward pass, or the first of a new one, which then begins."""
        if self.order is None:
            # A site that was read in this pass begins another pass.
            if site in frame.seen:
                frame.restart()
            return True
        if site == self.order[0]:
            frame.superseded = len(frame.seen) or None
            frame.restart()
            return True
        if frame.seen and site == self.order[len(frame.seen)]:
            return True
        if frame.superseded is not None and site == self.order[frame.superseded]:
            raise LayersimError(
                "A forward pass was interrupted by another one of the same model, and continued after it: "
                f"{self.reading.names[site]} ran after the start of a second pass. Call model(tokens) inside hooks, not "
                "model.forward(...)."
            )
        return False

    def _counts(self, frame: Frame) -> bool:
        """True where the running layers belong to a forward pass that is measured."""
        if frame.level >= 0:
            # A run of this package reads the forward pass that it started, not one that a user's hook starts inside it.
            return not (frame.nested and self.on_error is None)
        # The tokens and the mask of a forward pass that another thread began before the hooks were registered are not known.
        return self.direct and (frame.tokens is not None or threading.get_ident() == self.thread)

    def _start(self, site: int, here: Frame, frame: Frame, hidden: Tensor) -> SiteBuffer:
        """Choose the positions of a forward pass that count, when its first site is read."""
        shape = (hidden.shape[0], hidden.shape[1] if hidden.dim() > 2 else 1)
        if hidden.dim() == 2 and here.tokens is not None and here.tokens.dim() == 2 and here.tokens.numel() == shape[0]:
            # Some modules, such as the MLP of OPT, run on batch and positions as one axis.
            shape = (here.tokens.shape[0], here.tokens.shape[1])
        start = self.stack.start if self.stack.side == "decoder" else None
        choice = self.choose(Call(shape, here.tokens, here.attention, here.cached, start))
        if choice.pooled and not choice.has_tokens:
            # Each site of an image may have positions of its own, of which the mean is taken.
            shape = (choice.counted.shape[0], choice.counted.shape[1])
        if tuple(choice.counted.shape) != shape:
            raise self._misfit(
                site, hidden, f"{' x '.join(map(str, choice.counted.shape))} x width, the shape of the input tokens"
            )
        frame.attended, frame.read = choice.attended, here.tokens
        keep = choice.counted.reshape(-1).nonzero()[:, 0]
        return SiteBuffer(self.reading.names, keep, shape, choice.pooled, choice.has_tokens)

    def _unsharded(self, site: int, hidden: Tensor) -> Tensor:
        """The activations as one tensor."""
        shared: Any = hidden
        placements = getattr(shared, "placements", None)
        if placements is None:
            return hidden
        if all(placement.is_replicate() for placement in placements):
            whole: Tensor = shared.to_local()
            return whole
        raise self._misfit(site, hidden, "whole activations on every process, not parts of them (sequence parallelism)")

    def _not_once(self, site: int, why: str) -> LayersimError:
        return not_once(self.reading.names[site], self.reading.taps[site].path, why)

    def _misfit(self, site: int, hidden: Tensor, expected: str) -> LayersimError:
        return LayersimError(
            f"The activations at {self.reading.names[site]} do not fit this forward pass: they are "
            f"{' x '.join(map(str, hidden.shape))}{' in parts' if hasattr(hidden, 'placements') else ''}, and must be "
            f"{expected}."
        )

    def _view(self, frame: Frame, buffer: SiteBuffer) -> View:
        shape, samples = buffer.shape, buffer.samples.to(buffer.activations.device)
        tokens, following = torch.zeros(shape, dtype=torch.int64), torch.full(shape, NO_LABEL)
        if frame.read is not None:
            if frame.read.dim() != 2 or frame.read.shape[1] != shape[1] or frame.read.shape[0] not in (1, shape[0]):
                raise LayersimError(
                    f"The input tokens have shape {tuple(frame.read.shape)}, and {shape[0]} x {shape[1]} positions run "
                    "through the blocks. Call model(inputs_embeds=...), or name blocks of the part of the model that reads "
                    "the tokens."
                )
            tokens = frame.read.expand(shape)
            if not buffer.pooled:
                following = next_tokens(tokens, frame.attended.to(tokens.device))
        known = {"tokens": tokens, "next_token": following}
        fields: dict[str, Any] = {name: values.to(samples.device).reshape(-1)[samples] for name, values in known.items()}
        return View(**buffer.fields(), **fields, unembed=self.lens())


def _is_tokens(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point()
