"""Models whose modules run here: TransformerLens's HookedTransformer and TransformerBridge, and plain Hugging Face models.

All are read by torch forward hooks, on TransformerLens hook points where there are any: nothing of the model changes.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import BlockCall, first_tensor, note_call
from ..data import Batch, next_tokens
from ..errors import LayersimError
from ..layout import call_options, describe, find_blocks, head_dtype
from ..source import (
    NO_LABEL,
    Kernel,
    Model,
    Reduced,
    Source,
    View,
    eval_mode,
    place,
    reduce,
    tokens_alone,
)
from ..unembed import Unembed, plain_linear, tensor_of, unembed_gap
from .tl_models import is_transformer_lens, open_transformer_lens


@dataclass(frozen=True)
class _Tap:
    """Where one residual layer is read: what a module takes in, or what it gives out."""

    module: torch.nn.Module
    incoming: bool


@dataclass(frozen=True)
class Call:
    """What is known of one forward pass when its first layer is read.

    Attributes:
        shape: `batch pos` of what runs through the blocks now (one position a row in cached generation).
        tokens: `batch pos`, None if the model was fed embeddings.
        attention: the attention mask that the model was given, of whatever kind, None if none.
        texts: how many texts the model was given to tokenise by itself.
    """

    shape: tuple[int, int]
    tokens: Tensor | None
    attention: Any
    texts: int


@dataclass(frozen=True)
class Choice:
    """Which positions of a forward pass count, and which the model attends to; both `batch pos`."""

    counted: Tensor
    attended: Tensor


def taps(blocks: list[torch.nn.Module]) -> list[_Tap]:
    """Every residual layer of blocks that follow one another: what enters the first, and what each gives."""
    return [_Tap(blocks[0], True), *(_Tap(block, False) for block in blocks)]


class _LastLayer(Exception):
    """Ends a forward pass once the last residual layer is read: neither final norm nor unembedding has to run."""


@dataclass(frozen=True)
class _Quiet:
    """A module of the model, called without anybody's hooks and without dropout: a lens is no part of a user's run."""

    module: torch.nn.Module

    def __call__(self, x: Tensor) -> Any:
        # Straight into the instance: TransformerBridge's components hand attributes on to what they wrap.
        states = [module.__dict__ for module in self.module.modules()]
        kept = [{name: state[name] for name in ("_forward_hooks", "_forward_pre_hooks", "training")} for state in states]
        try:
            for state in states:
                state.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), training=False)
            return self.module(x)
        finally:
            for state, before in zip(states, kept, strict=True):
                state.update(before)


class HookedSource(Source):
    """A model whose blocks are modules of this process.

    Args:
        model: HookedTransformer, TransformerBridge, or a Hugging Face model.
        layers: paths of the blocks of a plain model, where they are not found by themselves.
        unembed: paths of its final norm and head, where they are not found by themselves.
    """

    def __init__(self, model: torch.nn.Module, layers: list[str] | None = None, unembed: list[str] | None = None) -> None:
        self.module = model
        self._embed: torch.nn.Module | None
        self.blocks: list[torch.nn.Module]
        self._is_transformer_lens = is_transformer_lens(model)
        self._open(layers, unembed)
        self.head, self.unembed = self._open_head()

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        """Find the blocks, where the residual is read, the embedding, and what is known of the model."""
        model = self.module
        if self._is_transformer_lens:
            if layers is not None or unembed is not None:
                raise LayersimError(
                    "TransformerLens models have their own layers.",
                    given=f"layers={layers}" if unembed is None else f"unembed={unembed}",
                    expected="layers=None and unembed=None for HookedTransformer and TransformerBridge",
                    do="leave them out, or pass the Hugging Face model",
                )
            points, self._embed, self._model = open_transformer_lens(model)
            self._taps = [_Tap(point, False) for point in points]
            self.blocks = list(model.blocks)  # type: ignore[arg-type]  # its list of blocks
        else:
            paths = find_blocks(model, layers)
            self.blocks = [model.get_submodule(path) for path in paths]
            self._taps = taps(self.blocks)
            find: Any = getattr(model, "get_input_embeddings", lambda: None)
            self._embed = find()
            self._model = describe(model, paths, type(model).__name__, getattr(model, "tokenizer", None), unembed)

    def _open_head(self) -> tuple[torch.nn.Module | None, Unembed | None]:
        """The module that gives logits, before scale and soft-cap, and the lens."""
        head = self._model.head
        if head is None:
            return None, None
        parts = [self.module.get_submodule(path) for path in head.parts]
        # What accelerate placed moves its inputs by itself; elsewhere a head may still live on another device than its norm.
        weight = next(parts[-1].parameters(), None)
        return parts[-1], Unembed(
            norm=_Quiet(self.module.get_submodule(head.norm)) if head.norm else None,
            parts=tuple(_Quiet(part) for part in parts),
            reads=head.reads,
            scale=head.scale,
            soft_cap=head.soft_cap,
            dtype=head_dtype(parts),
            device=None if weight is None or weight.is_meta else weight.device,
            linear=plain_linear(parts[-1]),
            norm_dtype=head_dtype([self.module.get_submodule(head.norm)]) if head.norm else None,
        )

    @property
    def model(self) -> Model:
        return self._model

    def aside(self) -> bool:
        """Whether what runs now is no part of what is measured."""
        return False

    def evaluating(self) -> AbstractContextManager[None]:
        return eval_mode(self.module)

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return reduce(kernels, self.collect(batch))

    def collect(self, batch: Batch) -> View:
        views: list[View] = []

        def stop(view: View) -> None:
            views.append(view)
            if not self.calling:
                raise _LastLayer

        calls: list[BlockCall] = []
        with (
            torch.no_grad(),
            _noting(self.blocks if self.calling else [], calls, self.aside),
            self.tapped(stop, lambda _call: Choice(batch.counted, batch.attention)),
            suppress(_LastLayer),
        ):
            self.call(batch)
        if views:
            view = views[0]
            # The batch knows them all, also where the model's embedding is not known and cannot be watched.
            known, device = tokens_alone(batch), view.residual.device
            names = ("tokens", "next_token", "row", "column", "labels")
            given = {name: getattr(known, name).to(device) for name in names if getattr(known, name) is not None}
            return replace(view, calls=tuple(calls) if self.calling else None, **given)
        raise LayersimError(
            f"The forward pass of {self.model.name} did not go through its layers in order.",
            given=f"{len(self._taps)} residual layers",
            expected="each block to run once, first to last",
            do="pass layers=[...] with the blocks in the order in which they run",
        )

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self.unembed is not None
        row = batch.first_row
        seen: list[Tensor] = []
        last = self._taps[-1].module.register_forward_hook(lambda _m, _a, output: seen.append(first_tensor(output)))
        try:
            with torch.no_grad():
                logits = tensor_of(self.call(row))
                return unembed_gap(self.unembed, seen[-1][0], logits[0], row.tokens.shape[1] - 1)
        finally:
            last.remove()

    def call(self, batch: Batch) -> Any:
        """One forward pass, with what the model needs besides tokens."""
        device = next(self.module.parameters()).device
        if self._embed is not None:
            device = next(self._embed.parameters(), torch.empty(0, device=device)).device
        options = call_options(self.module, batch)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        return self.module(batch.tokens.to(device), **options)

    @contextmanager
    def tapped(
        self,
        on_view: Callable[[View], None],
        choose: Callable[[Call], Choice],
        compare: Callable[[Tensor, torch.dtype], None] | None = None,
    ) -> Iterator[None]:
        """Hooks on every residual layer; each whole forward pass gives one view. None is left behind, whatever happens.

        Args:
            on_view: called when the last layer is read.
            choose: which positions of a call to count.
            compare: called once, when the head has run, with the lens beside its logits (`unembed_gap`) and their dtype.
        """
        recorder = _Recorder(len(self._taps), self.unembed, on_view, choose, self._is_transformer_lens, self.aside)
        handles: list[Any] = []
        try:
            # A caller may run the model, or the stack of blocks inside it.
            inner = getattr(self.module, getattr(self.module, "base_model_prefix", "") or "", None)
            for module in (self.module, inner):
                if isinstance(module, torch.nn.Module):
                    handles.append(module.register_forward_pre_hook(recorder.begin, with_kwargs=True))
                    # Also after an exception: what a failed call left behind belongs to no later one.
                    handles.append(module.register_forward_hook(recorder.end, always_call=True))
            if self._embed is not None:
                handles.append(self._embed.register_forward_pre_hook(recorder.see_tokens, with_kwargs=True))
            for layer, tap in enumerate(self._taps):
                handles.append(recorder.attach(tap, layer))
            if compare is not None and self.head is not None:
                handles += recorder.compare_once(self._taps[-1].module, self.head, compare)
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _noting(blocks: list[torch.nn.Module], calls: list[BlockCall], aside: Callable[[], bool]) -> Iterator[None]:
    """Hooks that note each block's call, with all its arguments, into the list."""
    given: dict[torch.nn.Module, tuple[Any, dict[str, Any]]] = {}
    handles: list[Any] = []

    def before(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[block] = (args, kwargs)

    def after(block: torch.nn.Module, _args: Any, output: Any) -> None:
        if not aside():
            calls.append(note_call(block, *given.pop(block), output))

    try:
        for block in blocks:
            # Before anybody else's, which will change the arguments once more when the block is called again.
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(block.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """Fills a view as layers are read in order; anything out of order, or inside a backward pass, is no forward pass."""

    def __init__(
        self,
        n_layers: int,
        unembed: Unembed | None,
        on_view: Callable[[View], None],
        choose: Callable[[Call], Choice],
        direct: bool,
        aside: Callable[[], bool],
    ) -> None:
        self.n_layers, self.unembed, self.on_view, self.choose = n_layers, unembed, on_view, choose
        # TransformerLens's run_with_hooks and generate call the model's `forward` past its own hooks.
        self.direct, self.aside = direct, aside
        self.outermost: torch.nn.Module | None = None
        self.keep = torch.empty(0, dtype=torch.int64)
        self.attended = torch.empty(0, dtype=torch.bool)
        self.shape = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self.tokens: Tensor | None = None
        self.attention: Any = None
        self.texts = 0
        self.buffer: Tensor | None = None
        self.next = 0

    def _running(self) -> bool:
        return self.direct or self.outermost is not None

    def end(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if module is self.outermost:
            self.outermost = None
            self._forget()

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.outermost = self.outermost or module
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        texts = given.get("input")
        if isinstance(texts, list) and texts and isinstance(texts[0], str):
            self.texts = len(texts)
        if self.tokens is None:
            first = given.get(names[0]) if names else None
            self.tokens = first.detach() if isinstance(first, Tensor) and not first.is_floating_point() else None
        mask = given.get("attention_mask")
        # The outer model is given the plain mask, the stack inside it perhaps one that is made of it.
        if self.attention is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            self.attention = mask

    def see_tokens(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()]
        # A user may embed tokens outside of any forward pass.
        if given and self._running() and torch._C._current_graph_task_id() == -1:
            self.tokens = given[0].detach()

    def attach(self, tap: _Tap, layer: int) -> Any:
        if tap.incoming:

            def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self.see(layer, first_tensor((*args, *kwargs.values())))

            return tap.module.register_forward_pre_hook(before, with_kwargs=True)

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self.see(layer, first_tensor(output))

        return tap.module.register_forward_hook(after)

    def compare_once(
        self, last: torch.nn.Module, head: torch.nn.Module, compare: Callable[[Tensor, torch.dtype], None]
    ) -> list[Any]:
        """Hooks that set the lens at the end of the first row beside what the head gives, in the first pass that reaches it."""
        seen: list[Tensor] = []

        def before(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1 and self._running() and self.unembed is not None:
                seen[:] = [first_tensor(output)[0].detach()]

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if not seen or self.unembed is None or not self._running() or torch._C._current_graph_task_id() != -1:
                return
            hidden, logits = seen.pop(), tensor_of(output)[0].detach()
            with torch.no_grad(), torch.autocast(device_type=hidden.device.type, enabled=False):
                compare(unembed_gap(self.unembed, hidden, logits, len(hidden) - 1, finished=False), logits.dtype)
            for handle in handles:
                handle.remove()

        handles = [last.register_forward_hook(before), head.register_forward_hook(after)]
        return handles

    def see(self, layer: int, hidden: Tensor) -> None:
        # Gradient checkpointing runs blocks again inside the backward pass; torch's own checkpointing asks the same way.
        if torch._C._current_graph_task_id() != -1 or self.aside():
            return
        if layer == 0:
            self.shape = (hidden.shape[0], hidden.shape[1])
            choice = self.choose(Call(self.shape, self.tokens, self.attention, self.texts))
            self.keep, self.attended = choice.counted.reshape(-1).nonzero()[:, 0], choice.attended
            self.buffer, self.next = None, 0
        if layer != self.next:
            return
        self.buffer = place(self.buffer, layer, self.n_layers, hidden, self.keep)
        self.next += 1
        if self.next == self.n_layers:
            view = self._view(self.buffer)
            self._forget()
            self.on_view(view)

    def _view(self, residual: Tensor) -> View:
        keep = self.keep.to(residual.device)
        tokens, following = torch.zeros(self.shape, dtype=torch.int64), torch.full(self.shape, NO_LABEL)
        if self.tokens is not None:
            tokens = self.tokens.expand(self.shape)
            following = next_tokens(tokens, self.attended.to(tokens.device))
        return View(
            residual=residual,
            tokens=tokens.to(residual.device).reshape(-1)[keep],
            sequence=keep // self.shape[1],
            position=keep % self.shape[1],
            next_token=following.to(residual.device).reshape(-1)[keep],
            unembed=self.unembed,
        )
