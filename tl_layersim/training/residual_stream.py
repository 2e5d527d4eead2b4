"""A model's residual stream with its derivatives: one forward pass, up to the highest layer that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from ..models.block_call import first_tensor
from ..models.hooked import HookedSource
from ..models.hooks import ForwardRun, eval_mode, every_module, in_this_thread, on_enter, on_leave
from ..models.layout import classes_with_head
from ..models.source import refuse_inference_weights
from ..models.split_model import logits_of
from ..models.validation import lens_gap, need_stream, refuse_other_logits
from ..remote.open import open_source
from .losses import positions_with_targets, summed_loss


@dataclass(frozen=True)
class TrainingBatch:
    """One forward pass of training.

    Attributes:
        main: `batch pos` token ids, or the pixel values of a vision model.
        options: what else the model is called with.
        targets: `batch pos`, or `batch` of a head that reads one position of a row; NO_LABEL where nothing is asked.
        attended: `batch pos`, None where there is no padding.
    """

    main: Tensor
    options: Mapping[str, Any]
    targets: Tensor
    attended: Tensor | None

    @property
    def first_row(self) -> TrainingBatch:
        """Its first row alone."""
        return self.row(0)

    def row(self, number: int) -> TrainingBatch:
        """One row alone."""
        at, rows = slice(number, number + 1), len(self.main)
        # Some inputs are shared by all rows, such as one row of positions.
        cut = {n: v[at] if isinstance(v, Tensor) and v.dim() and len(v) == rows else v for n, v in self.options.items()}
        attended = None if self.attended is None else self.attended[at]
        return TrainingBatch(self.main[at], cut, self.targets[at], attended)

    def to(self, device: torch.device) -> TrainingBatch:
        """The same on a device."""
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        attended = None if self.attended is None else self.attended.to(device)
        return TrainingBatch(self.main.to(device), options, self.targets.to(device), attended)


class ResidualStream:
    """What training needs of a model of this process.

    Args:
        source: where its blocks, its final norm and its head are.
    """

    def __init__(self, source: HookedSource) -> None:
        head = source.model.head
        if head is None or source.unembed is None:
            raise LayersimError(
                f"{source.model.name} has no head that is known, so its layers cannot be asked anything.",
                given=type(source.module).__name__,
                expected="a model with a final norm and a head",
                do=f"load it by {classes_with_head(source.model.source)}; or unembed=['path.of.final_norm', 'path.of.head']",
            )
        need_stream(source.model, "Aligned training")
        self.source, self.unembed, self.reads = source, source.unembed, head.reads
        self.module, self.blocks = source.module, source.blocks
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            refuse_inference_weights(self.module)
        self._top = source.module.get_submodule(head.norm or head.parts[0])

    @property
    def n_layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.module.parameters()).device

    def call(self, piece: TrainingBatch) -> Any:
        """The model's own forward pass."""
        main, options = self.arguments(piece)
        return self.module(main, **options)

    def arguments(self, piece: TrainingBatch) -> tuple[Tensor, dict[str, Any]]:
        """What the model's forward pass is called with."""
        options, main = dict(piece.options), piece.main
        pad = self._pad
        if pad is not None and piece.attended is not None:
            main = torch.where(piece.attended, main, pad)
        if hasattr(getattr(self.module, "config", None), "use_cache"):
            options.setdefault("use_cache", False)
        return usable(main), {name: usable(value) for name, value in options.items()}

    @property
    def _pad(self) -> int | None:
        """The id by which a classifier of Hugging Face finds the last token of a row, whatever the mask says."""
        pad = getattr(getattr(self.module, "config", None), "pad_token_id", None)
        return pad if self.reads == "last" and isinstance(pad, int) and pad >= 0 else None

    def residuals(self, layers: Collection[int], run: Callable[[], Any], whole: bool = False) -> dict[int, Tensor]:
        """`batch pos d_model` of each layer asked for, counted from 1, with its derivatives.

        Args:
            layers: which.
            run: starts the forward pass.
            whole: let it run to its end, where what surrounds it must see that (a wrapper of many processes).
        """
        found: dict[int, Tensor] = {}
        top = max(layers)
        # A block that is computed again in the backward pass must not be left by an exception.
        recomputes = any(getattr(block, "gradient_checkpointing", False) and block.training for block in self.blocks)

        def read(layer: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                found.setdefault(layer, first_tensor(output))
                if layer == top and not (whole or recomputes):
                    forward.stop()

            return hook

        def stop(*_: Any) -> None:
            if top in found and not whole:
                forward.stop()

        # Forward passes of other threads go on to their end.
        handles = [on_leave(self.blocks[layer - 1], in_this_thread(read(layer))) for layer in layers]
        handles.append(on_enter(self._top, in_this_thread(stop)))
        try:
            with ForwardRun() as forward:
                run()
        finally:
            for handle in handles:
                handle.remove()
        if len(found) < len(set(layers)):
            raise LayersimError(
                f"The forward pass of {self.source.model.name} did not go through all of its layers.",
                given=f"layers {sorted(set(layers) - set(found))} were not seen",
                expected="each block to run as a module of its own; a compiled graph runs past their hooks",
                do="the model before torch.compile, and every block (no layer drop)",
            )
        return found

    def normed(self, layer: int, x: Tensor, norm: bool) -> Tensor:
        """What the head reads of a layer; the last one always has its norm."""
        return self.unembed.normed(x) if norm or layer == self.n_layers else x

    def at_targets(self, piece: TrainingBatch, found: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], Tensor]:
        """`token d_model` of each layer where the head answers, and the right answers there."""
        shape = next(iter(found.values())).shape
        index, wanted = positions_with_targets(self.reads, piece.targets, self._read_from(piece), shape[1])
        return {layer: x.flatten(0, 1).index_select(0, index.to(x.device)) for layer, x in found.items()}, wanted

    def _read_from(self, piece: TrainingBatch) -> Tensor | None:
        """`batch pos`, the positions of which the last one may be read."""
        if self._pad is None or piece.main.is_floating_point():
            return piece.attended
        kept = piece.main != self._pad
        return kept if piece.attended is None else kept & piece.attended

    def loss(
        self,
        piece: TrainingBatch,
        terms: Mapping[int, float],
        norm: bool,
        run: Callable[[], Any] | None = None,
        whole: bool = False,
    ) -> tuple[Tensor, int]:
        """Sum over answers of the weighted sum over layers of cross-entropies; and how many answers there are.

        Args:
            piece: what goes in and what should come out.
            terms: weights by layer.
            norm: whether the final norm is applied below the last layer.
            run: starts the forward pass, where it is not the model's own.
            whole: see `residuals`.
        """
        found = self.residuals(terms, run or (lambda: self.call(piece)), whole)
        rows, wanted = self.at_targets(piece, found)
        return self.weighted(rows, wanted, terms, norm), len(wanted)

    def weighted(self, rows: Mapping[int, Tensor], wanted: Tensor, terms: Mapping[int, float], norm: bool) -> Tensor:
        """Weighted sum over layers of the sums of cross-entropies at rows `token d_model`."""
        device = next(iter(rows.values())).device
        # All layers in one go: the gradient of the head is then held once.
        x = torch.cat([self.normed(layer, rows[layer], norm) for layer in terms])
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        share = torch.tensor(list(terms.values()), dtype=wide, device=device).repeat_interleave(len(wanted))
        return summed_loss(self.unembed, x, wanted.to(device).repeat(len(terms)), share)

    def check(self, piece: TrainingBatch) -> None:
        """See that the last layer, read as training reads it, says what the model says, on one row.

        Raises:
            LayersimError: it does not.
        """
        piece = piece.first_row

        def gap() -> Tensor:
            seen: list[Tensor] = []
            handle = on_leave(self.blocks[-1], lambda _m, _a, output: seen.append(first_tensor(output)))
            try:
                with torch.no_grad(), eval_mode(self.module), self.source.settling():
                    logits = logits_of(self.call(piece))
            finally:
                handle.remove()
            if self.reads == "every":
                theirs = logits[0]
                ours = self.unembed(seen[-1][0])
            else:
                index, _ = positions_with_targets(
                    self.reads, torch.zeros(1, dtype=torch.int64), self._read_from(piece), seen[-1].shape[1]
                )
                theirs, ours = logits[0], self.unembed(seen[-1][0, int(index)])
            if ours.shape != theirs.shape:
                return torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
            kept = slice(None) if piece.attended is None or self.reads != "every" else piece.attended[0]
            ours, theirs = ours.detach().double().cpu()[kept], theirs.double().cpu()[kept]
            return torch.stack([(ours - theirs).norm(), theirs.norm()])

        with torch.no_grad():
            found = lens_gap(self.source.model, gap)
        need_stream(self.source.model, "Aligned training")
        refuse_other_logits(found, self.source.model)


def usable(value: Any) -> Any:
    """An input as autograd can keep it: a copy of a tensor that was made under `torch.inference_mode()`."""
    made_there = isinstance(value, Tensor) and value.is_inference() and not torch.is_inference_mode_enabled()
    return value.clone() if made_there else value


# Which heads were seen to give their model's logits.
_CHECKED: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def check_once(stream: ResidualStream, piece: TrainingBatch, paths: Any) -> None:
    """`Stream.check`, the first time that a model comes with these paths."""
    known = _CHECKED.setdefault(stream.module, set())
    if paths not in known:
        stream.check(piece)
        known.add(paths)


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Training mode for a while; each module is then as it was."""
    before = {part: part.training for part in every_module(module)}
    try:
        for part in before:
            part.training = True
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


def open_residual_stream(model: Any, layers: list[str] | None, unembed: list[str] | None) -> ResidualStream:
    """The stream of a model that is trained here.

    Raises:
        LayersimError: it cannot be.
    """
    source = open_source(model, layers=layers, unembed=unembed)
    if not (source.can_hook and source.is_single_model):
        raise LayersimError(
            "Only a model whose weights are modules of this process can be fine-tuned.",
            given=f"{source.model.source}",
            expected="a HookedTransformer, TransformerBridge or Hugging Face model",
            do="finetune_aligned(nnsight_model._model, ...) for the module inside; train_adapters(...) for a model on a server",
        )
    return ResidualStream(cast(HookedSource, source))
