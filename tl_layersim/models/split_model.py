"""Halves of models: the part below a layer, read; the part above it, run from there on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.labels import NO_LABEL
from .block_call import first_tensor
from .hooked import HookedSource
from .hooks import eval_mode, in_this_thread
from .layout import classes_with_head
from .model_info import Model
from .softmax import cross_entropy, cross_entropy_slopes
from .source import Source
from .unembed import rounding, tensor_of
from .validation import need_stream

Give = Callable[[Tensor], Tensor]
Moments = Callable[[Tensor, Tensor], dict[str, Tensor]]


def score_of(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What a model's logits are worth: sum of the cross-entropy, how many first choices are right, and of how many positions.

    Arguments as those of `answers_of`.
    """
    chosen, wanted = answers_of(logits, targets)
    right = (chosen.argmax(-1) == wanted).sum()
    return {"loss": cross_entropy(chosen, wanted).sum(), "correct": right, "count": torch.tensor(len(wanted))}


def loss_and_slope(logits: Tensor, targets: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of a model's answers, float64, and its derivative by `x`, which the logits were made from.

    Arguments as those of `answers_of`.
    """
    chosen, wanted = answers_of(logits, targets)
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    losses, slopes = cross_entropy_slopes(chosen, wanted, torch.full_like(wanted, 1 / max(1, len(wanted)), dtype=chosen.dtype))
    (slope,) = torch.autograd.grad(chosen, x, slopes)
    return losses.mean(), slope


def answers_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`answer vocabulary`, the logits where something is asked, and `answer`, what is right there.

    Args:
        logits: `batch pos vocabulary`, or `batch classes` of a classifier.
        targets: `batch pos` or `batch`, NO_LABEL where nothing is asked.
    """
    targets = targets.to(logits.device)
    if logits.dim() != targets.dim() + 1:
        raise LayersimError(
            "The labels do not fit what the model says.",
            given=f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(targets.shape)}",
            expected="one label for each position of a model that speaks at each, one for each row of a classifier",
            do="labels='next_token' for a language model, labels='data' for a classifier",
        )
    keep = targets != NO_LABEL
    wanted = targets[keep]
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < logits.shape[-1]:
        raise LayersimError(
            "A label is none of the model's classes.",
            given=f"labels from {int(wanted.min())} to {int(wanted.max())}",
            expected=f"0 to {logits.shape[-1] - 1}",
            do="map the labels to the classes of the model's head",
        )
    # Not logits[keep], whose derivative adds up one entry at a time.
    return logits.flatten(0, -2).index_select(0, keep.flatten().nonzero()[:, 0]), wanted


def logits_of(output: Any) -> Tensor:
    """A model's logits.

    Raises:
        LayersimError: it has none.
    """
    if getattr(output, "last_hidden_state", None) is not None and getattr(output, "logits", None) is None:
        raise LayersimError(
            "This model says nothing that could be right or wrong: it has no head.",
            given=f"an output with {', '.join(output.keys())}",
            expected="a model with logits",
            do=f"load it by {classes_with_head('')}",
        )
    return tensor_of(output)


class SplitModel(ABC):
    """One side of a stitch: a model of which the part below a layer is read, or the part above it is run.

    Layers are counted as residual layers are: 0 is what enters block 0, i is what leaves the i-th block.
    """

    model: Model
    module: nn.Module
    source: Source
    is_remote: bool = False

    @property
    def device(self) -> torch.device:
        """Where what is handed to it is made."""
        return torch.device("cpu")

    @property
    def local(self) -> LocalSplitModel | None:
        """This model where its modules are in this process; None for one on a server."""
        return None

    def settle(self, batch: Batch) -> None:
        """Refuse, where the layout does not say it, modules that a forward pass shows to hand on no stream."""
        if self.model.stream == "unknown":
            self.source.settle(batch)
            need_stream(self.source.model, "Stitching")
            self.model = replace(self.model, stream="whole", basis=self.source.model.basis)

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """A context without dropout, in which no gradient reaches the weights; the model is left as it was found."""

    @abstractmethod
    def hidden(self, batch: Batch, layer: int) -> Tensor:
        """`batch pos d_model`: the residual at a layer, padding included; what stands above does not run."""

    @abstractmethod
    def score(self, batch: Batch, targets: Tensor, layer: int = 0, x: Tensor | None = None) -> dict[str, Tensor]:
        """`score_of` the model with `x` in place of its own residual at a layer; of the whole model without `x`."""

    @abstractmethod
    def loss_and_gradient(self, batch: Batch, targets: Tensor, layer: int, x: Tensor) -> tuple[float, Tensor]:
        """Mean cross-entropy with `x` in place of the residual at a layer, and its derivative by `x`."""

    @abstractmethod
    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        """Sums over attended tokens of the front's residual and this model's own at a layer, computed where this model is.

        Args:
            batch: the tokens.
            layer: the layer of this model.
            moments_of: from residuals `token d_front` and `token d_back` to sums. It travels to servers as source.
            h: the front's residual, `batch pos d_front`.
        """

    def padded(self, batch: Batch) -> Batch:
        """The batch with the padding token of this model's own configuration.

        Hugging Face classifiers find the last token of a row by it, whatever the mask says.
        """
        pad = getattr(getattr(self.module, "config", None), "pad_token_id", None)
        if not isinstance(pad, int) or pad < 0 or not batch.padded:
            return batch
        return replace(batch, tokens=torch.where(batch.attention, batch.tokens, pad))

    def check(self, batch: Batch, targets: Tensor, layer: int) -> None:
        """See that this model gives what it gives when it is entered at the layer with its own residual, and not with another.

        Raises:
            LayersimError: it does not.
        """
        own, x = self.score(batch, targets), self.hidden(batch, layer)
        again = self.score(batch, targets, layer, x)
        # Reversed coordinates: another direction, of the same size.
        other = self.score(batch, targets, layer, x.flip(-1))
        ours, theirs, wrong = (float(found["loss"]) for found in (again, own, other))
        if ours != ours and theirs != theirs:
            raise LayersimError(
                f"The loss of {self.model.name} on the first row is NaN, before anything is stitched.",
                given=f"{self.model.dtype} weights",
                expected="a finite loss",
                do="load it in float32 or bfloat16",
            )
        tolerance = rounding(x.dtype if x.is_floating_point() else torch.float32) * (1.0 + abs(theirs))
        if not abs(ours - theirs) <= tolerance or wrong == theirs:
            raise LayersimError(
                f"{self.model.name} cannot be entered at {self.model.layers[layer]}.",
                given=f"loss {ours:.6g} when its own residual is put there, {theirs:.6g} otherwise, {wrong:.6g} with "
                "another one",
                expected="the same twice, and another with another",
                do="a model whose blocks run one after the other on one residual stream; layers=[...] names the right blocks",
            )


def attended(batch: Batch, x: Tensor) -> Tensor:
    """`token d_model`: the positions of `batch pos d_model` that the model attends to."""
    return x[batch.attention.to(x.device)]


class Enough(Exception):
    """Ends a forward pass at the layer that was asked for."""


class LocalSplitModel(SplitModel):
    """A model of this process.

    Args:
        source: where its blocks are.
        model: what is known of it.
    """

    source: HookedSource

    def __init__(self, source: HookedSource, model: Model) -> None:
        self.source, self.model = source, model
        self.module, self.blocks = source.module, source.blocks
        self._tuples: list[int] | None = None

    @property
    def local(self) -> LocalSplitModel:
        return self

    @property
    def device(self) -> torch.device:
        """Where its first weights are; those that are offloaded are nowhere."""
        here = (p.device for p in self.module.parameters() if not p.is_meta)
        return next(here, torch.device("cpu"))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        learning = [p for p in self.module.parameters() if p.requires_grad and not p.is_inference()]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.autocast(device_type=self.device.type, enabled=False))
            stack.enter_context(eval_mode(self.module))
            try:
                for parameter in learning:
                    parameter.requires_grad_(False)
                yield
            finally:
                for parameter in learning:
                    parameter.requires_grad_(True)

    def hidden(self, batch: Batch, layer: int) -> Tensor:
        with torch.no_grad():
            return self.read(layer, lambda: self.source.call(self.padded(batch))).detach()

    def read(self, layer: int, call: Callable[[], Any]) -> Tensor:
        """The residual at a layer in a forward pass, which ends there.

        Args:
            layer: which.
            call: starts the forward pass.
        """
        seen: list[Tensor] = []

        def see(hidden: Tensor) -> None:
            seen.append(hidden)
            raise Enough

        # Forward passes of other threads go on to their end.
        if layer == 0:
            handle = self.blocks[0].register_forward_pre_hook(
                in_this_thread(lambda _m, args, kwargs: see(first_tensor((*args, *kwargs.values())))), with_kwargs=True
            )
        else:
            after = in_this_thread(lambda _m, _a, output: see(first_tensor(output)))
            handle = self.blocks[layer - 1].register_forward_hook(after)
        try:
            with suppress(Enough):
                call()
        finally:
            handle.remove()
        if not seen:
            raise LayersimError(
                f"The forward pass of {self.model.name} did not come to {self.model.layers[layer]}.",
                given=type(self.module).__name__,
                expected="each block to run as a module of its own; a compiled graph runs past their hooks",
                do="the model before torch.compile, or only its blocks compiled",
            )
        return seen[0]

    @contextmanager
    def entered(self, layer: int, give: Give) -> Iterator[None]:
        """Every forward pass starts at a layer: what block `layer - 1` gives, or at 0 what enters block 0, is what `give` says.

        The model's own forward pass runs around it: masks, positions, what blocks are called with, norm and head are its own.
        Blocks below do not run; hooks on the model see what is put there as its own.

        Args:
            layer: where.
            give: from what stands there otherwise, whose dtype and device it takes, to the residual.
        """
        tuples = self.tuples()
        below = self.blocks[:layer]
        before = [vars(block).get("forward") for block in below]

        def put(given: Tensor) -> Tensor:
            return give(given).to(device=given.device, dtype=given.dtype)

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            given = first_tensor((*args, *kwargs.values()))
            x = put(given)
            swapped = [x if value is given else value for value in args]
            return tuple(swapped), {name: x if value is given else value for name, value in kwargs.items()}

        handle = self.blocks[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True) if layer == 0 else None
        try:
            for number, (block, length) in enumerate(zip(below, tuples, strict=False)):
                # Straight into the instance: TransformerBridge's components hand attributes on to what they wrap.
                vars(block)["forward"] = _handing_on(length, put if number == layer - 1 else None)
            yield
        finally:
            if handle is not None:
                handle.remove()
            for block, own in zip(below, before, strict=True):
                if own is None:
                    vars(block).pop("forward", None)
                else:
                    vars(block)["forward"] = own

    def tuples(self) -> list[int]:
        """How many things each block gives in a tuple, 0 where it gives the residual alone. Found out once, on one token."""
        if self._tuples is None:
            found: dict[int, int] = {}

            def note(number: int) -> Callable[..., None]:
                return lambda _m, _a, output: found.update({number: len(output) if isinstance(output, tuple) else 0})

            handles = [block.register_forward_hook(note(number)) for number, block in enumerate(self.blocks)]
            one = torch.ones(1, 1, dtype=torch.bool)
            try:
                with torch.no_grad(), eval_mode(self.module):
                    self.source.call(Batch(torch.zeros(1, 1, dtype=torch.int64), one, one, 0))
            finally:
                for handle in handles:
                    handle.remove()
            self._tuples = [found.get(number, 0) for number in range(len(self.blocks))]
        return self._tuples

    def _logits(self, batch: Batch, layer: int, x: Tensor | None) -> Tensor:
        batch = self.padded(batch)
        if x is None:
            return logits_of(self.source.call(batch))
        with self.entered(layer, lambda _: x):
            return logits_of(self.source.call(batch))

    def score(self, batch: Batch, targets: Tensor, layer: int = 0, x: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.cpu() for name, value in score_of(self._logits(batch, layer, x), targets).items()}

    def loss_and_gradient(self, batch: Batch, targets: Tensor, layer: int, x: Tensor) -> tuple[float, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss, slope = loss_and_slope(self._logits(batch, layer, x), targets, x)
        return float(loss), slope

    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        target = attended(batch, self.hidden(batch, layer))
        # Apple's GPUs have no float64.
        device = torch.device("cpu") if target.device.type == "mps" else target.device
        found = moments_of(attended(batch, h).to(device), target.to(device))
        return {name: value.cpu() for name, value in found.items()}


def _handing_on(length: int, put: Give | None) -> Callable[..., Any]:
    """A block's forward that gives what it is given, or what `put` makes of it, in a tuple of that length."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = first_tensor((*args, *kwargs.values()))
        hidden = hidden if put is None else put(hidden)
        return (hidden, *[None] * (length - 1)) if length else hidden

    return forward
