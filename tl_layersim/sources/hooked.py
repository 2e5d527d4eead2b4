"""Models whose modules run here: TransformerLens's HookedTransformer and TransformerBridge, and plain Hugging Face models.

All are read by torch forward hooks, on TransformerLens hook points where there are any: nothing of the model changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data import Batch
from ..errors import LayersimError
from ..layout import call_options, describe, find_blocks, hash_config, hash_weights
from ..source import Kernel, Model, Reduced, Source, View, eval_mode, first_tensor, layer_names, place, reduce


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


class _LastLayer(Exception):
    """Ends a forward pass once the last residual layer is read: neither final norm nor unembedding has to run."""


class HookedSource(Source):
    """A model whose blocks are modules of this process.

    Args:
        model: HookedTransformer, TransformerBridge, or a Hugging Face model.
        layers: paths of the blocks of a plain model, where they are not found by themselves.
    """

    def __init__(self, model: torch.nn.Module, layers: list[str] | None = None) -> None:
        self._module = model
        self._embed: torch.nn.Module | None
        self._is_transformer_lens = is_transformer_lens(model)
        if self._is_transformer_lens:
            if layers is not None:
                raise LayersimError(
                    "TransformerLens models have their own layers.",
                    given=f"layers={layers}",
                    expected="layers=None for HookedTransformer and TransformerBridge",
                    do="leave layers out, or pass the Hugging Face model",
                )
            self._taps, self._embed, self._model = _open_transformer_lens(model)
        else:
            paths = find_blocks(model, layers)
            blocks = [model.get_submodule(path) for path in paths]
            self._taps = [_Tap(blocks[0], True), *(_Tap(block, False) for block in blocks)]
            find: Any = getattr(model, "get_input_embeddings", lambda: None)
            self._embed = find()
            self._model = describe(model, paths, type(model).__name__, getattr(model, "tokenizer", None))

    @property
    def model(self) -> Model:
        return self._model

    def evaluating(self) -> AbstractContextManager[None]:
        return eval_mode(self._module)

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return reduce(kernels, self.collect(batch))

    def collect(self, batch: Batch) -> View:
        views: list[View] = []

        def stop(view: View) -> None:
            views.append(view)
            raise _LastLayer

        device = next(self._module.parameters()).device
        if self._embed is not None:
            device = next(self._embed.parameters(), torch.empty(0, device=device)).device
        options = call_options(self._module, batch)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        with torch.no_grad(), self.tapped(stop, lambda _call: batch.counted):
            try:
                self._module(batch.tokens.to(device), **options)
            except _LastLayer:
                return views[0]
        raise LayersimError(
            f"The forward pass of {self.model.name} did not go through its layers in order.",
            given=f"{len(self._taps)} residual layers",
            expected="each block to run once, first to last",
            do="pass layers=[...] with the blocks in the order in which they run",
        )

    @contextmanager
    def tapped(self, on_view: Callable[[View], None], choose: Callable[[Call], Tensor]) -> Iterator[None]:
        """Hooks on every residual layer; each whole forward pass gives one view. None is left behind, whatever happens.

        Args:
            on_view: called when the last layer is read.
            choose: `batch pos`, which positions of a call to count.
        """
        recorder = _Recorder(len(self._taps), on_view, choose)
        handles: list[Any] = []
        try:
            # A caller may run the model, or the stack of blocks inside it.
            inner = getattr(self._module, getattr(self._module, "base_model_prefix", "") or "", None)
            for module in (self._module, inner):
                if isinstance(module, torch.nn.Module):
                    handles.append(module.register_forward_pre_hook(recorder.begin, with_kwargs=True))
                    # Also after an exception: what a failed call left behind belongs to no later one.
                    handles.append(module.register_forward_hook(recorder.end, always_call=True))
            if self._embed is not None:
                handles.append(self._embed.register_forward_pre_hook(recorder.see_tokens, with_kwargs=True))
            for layer, tap in enumerate(self._taps):
                handles.append(recorder.attach(tap, layer))
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Recorder:
    """Fills a view as layers are read in order; anything out of order, or inside a backward pass, is no forward pass."""

    def __init__(self, n_layers: int, on_view: Callable[[View], None], choose: Callable[[Call], Tensor]) -> None:
        self.n_layers, self.on_view, self.choose = n_layers, on_view, choose
        self.outermost: torch.nn.Module | None = None
        self.keep = torch.empty(0, dtype=torch.int64)
        self.shape = (0, 0)
        self._forget()

    def _forget(self) -> None:
        self.tokens: Tensor | None = None
        self.attention: Any = None
        self.texts = 0
        self.buffer: Tensor | None = None
        self.next = 0

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
        mask = given.get("attention_mask")
        # The outer model is given the plain mask, the stack inside it perhaps one that is made of it.
        if self.attention is None or (isinstance(mask, Tensor) and mask.dim() == 2):
            self.attention = mask

    def see_tokens(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()]
        # A user may embed tokens outside of any forward pass.
        if given and self.outermost is not None and torch._C._current_graph_task_id() == -1:
            self.tokens = given[0].detach()

    def attach(self, tap: _Tap, layer: int) -> Any:
        if tap.incoming:

            def before(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self.see(layer, first_tensor((*args, *kwargs.values())))

            return tap.module.register_forward_pre_hook(before, with_kwargs=True)

        def after(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self.see(layer, first_tensor(output))

        return tap.module.register_forward_hook(after)

    def see(self, layer: int, hidden: Tensor) -> None:
        # Gradient checkpointing runs blocks again inside the backward pass; torch's own checkpointing asks the same way.
        if torch._C._current_graph_task_id() != -1:
            return
        if layer == 0:
            self.shape = (hidden.shape[0], hidden.shape[1])
            counted = self.choose(Call(self.shape, self.tokens, self.attention, self.texts))
            self.keep = counted.reshape(-1).nonzero()[:, 0]
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
        tokens = self.tokens if self.tokens is not None else torch.zeros(self.shape, dtype=torch.int64)
        return View(
            residual=residual,
            tokens=tokens.to(residual.device).expand(self.shape).reshape(-1)[keep],
            sequence=keep // self.shape[1],
            position=keep % self.shape[1],
        )


def is_transformer_lens(model: Any) -> bool:
    """Whether a model is TransformerLens's, without importing it."""
    return any(
        cls.__module__.split(".")[0] == "transformer_lens" and cls.__name__ in ("HookedTransformer", "TransformerBridge")
        for cls in type(model).__mro__
    )


def _open_transformer_lens(model: Any) -> tuple[list[_Tap], torch.nn.Module, Model]:
    cfg = model.cfg
    names = layer_names(cfg.n_layers)
    missing = [name for name in names if name not in model.hook_dict]
    if missing:
        raise LayersimError(
            f"{cfg.model_name} has no residual stream that TransformerLens names.",
            given=f"no hook point {missing[0]}",
            expected="blocks.{i}.hook_resid_pre and hook_resid_post",
            do="pass the Hugging Face model itself, with layers=[...] if its layout is not known",
        )
    plain = {
        key: value for key, value in cfg.to_dict().items() if key not in ("model_name", "device", "dtype", "tokenizer_name")
    }
    described = Model(
        name=str(cfg.model_name),
        config_hash=hash_config(plain),
        weights_hash=hash_weights(model),
        source=type(model).__name__,
        basis=_transformer_lens_basis(model),
        dtype=str(cfg.dtype),
        layers=names,
        d_model=cfg.d_model,
        vocabulary=cfg.d_vocab,
        context=cfg.n_ctx,
        tokenizer=model.tokenizer,
    )
    return [_Tap(model.hook_dict[name], False) for name in names], model.embed, described


def _transformer_lens_basis(model: Any) -> str:
    """What weight processing did to the residual stream: it changes every number that is not invariant to it."""
    if type(model).__name__ == "TransformerBridge":
        return "TransformerBridge, compatibility mode" if model.compatibility_mode else "raw weights, before the final norm"
    folded = "layer norms folded" if str(model.cfg.normalization_type).endswith("Pre") else "layer norms not folded"
    scale = model.W_E.abs().mean()
    centred = "centred" if bool(model.W_E.mean(-1).abs().max() < 1e-4 * scale) else "not centred"
    return f"HookedTransformer, {folded}, writing weights {centred}"
