"""Source: where a residual stream comes from; View: what a kernel sees of it; reduce: kernels run beside activations.

`View`, `place` and `reduce` travel to NDIF servers by value, as source: they may use torch and the standard library alone, and
no decorator that matters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .calls import BlockCall
from .errors import LayersimError
from .unembed import Head, Unembed

if TYPE_CHECKING:
    from .data import Batch

NO_LABEL = -100  # as in torch's cross-entropy and in Hugging Face data
Kernel = Callable[..., dict[str, Tensor]]
Reduced = tuple[list[Tensor], dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class View:
    """The counted tokens of one batch, without padding.

    Attributes:
        residual: `layer token d_model`, float32 (float64 if the model is); layer 0 is what enters block 0.
        tokens: `token`, token ids.
        sequence: `token`, which row of the batch each token stands in, ascending. Under `attach` every forward pass has
            rows of its own, so a cached generation step is a row of one token.
        position: `token`, where in that row, ascending within a row.
        next_token: `token`, the id that follows in the row, `NO_LABEL` where nothing attended does. None where a source leaves
            it to be read off the counted tokens.
        row: `token`, which row of the data it came from. None where a source does not know.
        column: `token`, which position of that row it was, padding and what was cut off before it included.
        labels: `token`, the data's own label at that position, `NO_LABEL` where it has none. None if the data has no labels.
        unembed: the model's own way from a residual to logits. None where there is none, or none that is known.
        calls: the blocks as the model called them, each of which can be called again. None where no analyzer asks for them.
        memo: what one kernel computed of this view and another may use.
    """

    residual: Tensor
    tokens: Tensor
    sequence: Tensor
    position: Tensor
    next_token: Tensor | None = None
    row: Tensor | None = None
    column: Tensor | None = None
    labels: Tensor | None = None
    unembed: Unembed | None = None
    calls: tuple[BlockCall, ...] | None = None
    memo: dict[str, Any] = field(default_factory=dict, compare=False)


def place(buffer: Tensor | None, layer: int, n_layers: int, hidden: Tensor, keep: Tensor) -> Tensor:
    """Copy the kept rows of one layer's activations into the buffer that becomes `View.residual`.

    Copied at once so that the model can free each layer's own activations: one batch of residuals is all that is held.

    Args:
        buffer: what the call for layer 0 returned; None for layer 0.
        layer: index of the residual layer, 0 to n_layers - 1.
        n_layers: how many residual layers there are.
        hidden: `batch pos d_model`, any dtype, any device.
        keep: indices into the flattened `batch pos`, on any device.
    """
    if buffer is None:
        # Sums are float64; Apple's GPUs have none, so the view of such a model lives on the CPU.
        device = torch.device("cpu") if hidden.device.type == "mps" else hidden.device
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # A layer that is never placed must not pass for numbers.
        buffer = torch.full((n_layers, keep.numel(), hidden.shape[-1]), torch.nan, dtype=dtype, device=device)
    if hidden.dim() != 3 or hidden.shape[-1] != buffer.shape[-1]:
        raise ValueError(
            f"residual layer {layer} has shape {tuple(hidden.shape)}; expected batch x pos x {buffer.shape[-1]}, as the first"
        )
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    buffer[layer] = rows.index_select(0, keep.to(rows.device))
    return buffer


def reduce(kernels: Mapping[str, Kernel], *views: View) -> Reduced:
    """Run each kernel on the views, outside autograd and autocast, with full float32 products; count what is not finite.

    Returns:
        For each view `layer`, how many of its activations are NaN or infinite; and by kernel name what it returned,
        nothing if any view holds such values.
    """
    before = _set_precision(None)
    try:
        device = views[0].residual.device.type
        # Not in inference mode either, in which a kernel could not differentiate a block.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type=device, enabled=False):
            not_finite = [_count_not_finite(view.residual) for view in views]
            if any(bool(count.any()) for count in not_finite):
                return not_finite, {}
            return not_finite, {name: kernel(*views) for name, kernel in kernels.items()}
    finally:
        _set_precision(before)


def _count_not_finite(residual: Tensor) -> Tensor:
    # A sum is finite only if all its terms are: one cheap pass; the count is made where it fails.
    if bool(torch.isfinite(residual.sum())):
        return torch.zeros(residual.shape[0], dtype=torch.int64)
    return (~torch.isfinite(residual)).sum((1, 2)).cpu()


def _set_precision(values: list[str] | None) -> list[str]:
    """Set how float32 products are made, None for in full float32, and return how they were.

    A user, or a server, may have allowed TF32 or bfloat16 for speed. No decorator here: what is shipped loses it.
    """
    backends: list[Any] = [getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    if all(hasattr(backend, "fp32_precision") for backend in backends):
        before = [backend.fp32_precision for backend in backends]
        for backend, value in zip(backends, values or ["ieee", "ieee"], strict=True):
            backend.fp32_precision = value
        return before
    # Older torch, where this one setting covers both.
    before = [torch.get_float32_matmul_precision()]
    torch.set_float32_matmul_precision(values[0] if values else "highest")
    return before


def tokens_alone(batch: Batch) -> View:
    """A view of a batch that no model has run on: without layers."""
    index = batch.counted.nonzero()
    at = (index[:, 0], index[:, 1])
    return View(
        residual=torch.empty(0, len(index), 0),
        tokens=batch.tokens[at],
        sequence=index[:, 0],
        position=index[:, 1],
        next_token=batch.next_tokens[at],
        row=batch.sources[0][at],
        column=batch.sources[1][at],
        labels=None if batch.labels is None else batch.labels[at],
    )


def row_ends(view: View) -> Tensor:
    """Index of the last counted token of each row."""
    lengths: Tensor = torch.unique_consecutive(view.sequence, return_counts=True)[1]
    return lengths.cumsum(0) - 1


@dataclass(frozen=True)
class Model:
    """What is known of a model before it runs.

    Attributes:
        name: as it was loaded.
        config_hash: see `Provenance`; "" if there is no configuration.
        weights_hash: see `Provenance`; "" if the weights are not here.
        source: class of the model, and how it is reached.
        basis: what its residual stream is written in.
        dtype: of its parameters.
        layers: names of the residual layers, `blocks.0.hook_resid_pre` first.
        d_model: width of the residual stream, None where the configuration does not say.
        vocabulary: how many token ids there are, None where unknown.
        context: the longest row it takes, None where unknown.
        tokenizer: the model's own, None where it has none.
        head: what stands between the last block and the logits; None where there is nothing, or nothing that is known.
        calls: what a kernel can do with `view.calls`: nothing, call blocks again for their values, or differentiate them too.
    """

    name: str
    config_hash: str
    weights_hash: str
    source: str
    basis: str
    dtype: str
    layers: tuple[str, ...]
    d_model: int | None
    vocabulary: int | None
    context: int | None
    tokenizer: Any
    head: Head | None = None
    calls: Literal["none", "values", "gradients"] = "none"


@dataclass(frozen=True)
class Offer:
    """What a server lets its users do with one model.

    Attributes:
        server: its address.
        trusted: whether requests run beside the weights; else in a sandbox, where weights are out of reach and nothing can be
            differentiated through the model.
        dtype: of the model there.
        devices: that its blocks are on, as a kernel sees them.
        job_limit: seconds a job may take, None where there is no limit that it tells.
        running: names of the models it has loaded.
        versions: of Python, nnsight, transformers and torch there.
        differences: where they are not those here, in words.
    """

    server: str
    trusted: bool
    dtype: str
    devices: tuple[str, ...]
    job_limit: float | None
    running: tuple[str, ...]
    versions: Mapping[str, str]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """The sums of some batches that follow one another.

    Attributes:
        count: how many, a power of two.
        not_finite: for each view `layer`, how many activations were NaN or infinite.
        out: by kernel name what it returned, summed.
    """

    count: int
    not_finite: list[Tensor]
    out: Mapping[str, Mapping[str, Tensor]]


class Source(ABC):
    """A model that runs token batches and hands the residual stream to kernels, wherever the activations are.

    A new source implements `model` and `run`; `collect` too if activations may leave the place where they are made.

    Attributes:
        calling: whether an analyzer calls blocks again, so that views must carry `calls`.
    """

    calling: bool = False

    @property
    @abstractmethod
    def model(self) -> Model:
        """What is known of the model."""

    @abstractmethod
    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """One forward pass over the batch, and `reduce(kernels, view)` where the activations are."""

    @abstractmethod
    def collect(self, batch: Batch) -> View:
        """One forward pass over the batch, and the view itself. Refused where activations must stay."""

    def unembed_gap(self, batch: Batch) -> Tensor:
        """Of the batch's first row, run through the whole model: `unembed_gap`, the lens at the last layer beside the logits.

        Only asked of a source whose `model.head` is known.
        """
        raise LayersimError(
            f"{type(self).__name__} names a head and does not compare it with the model's logits.",
            given=f"head={self.model.head}",
            expected="a source with unembed_gap(batch)",
            do="implement unembed_gap, or leave model.head as None",
        )

    @property
    def block(self) -> int:
        """How many batches are added in pairs, see `pairs.py`, before they join the total: 1 to add each at once."""
        return 1

    def stream(
        self, batches: Iterator[Batch], kernels: Mapping[str, Kernel], start: int = 0, say: Callable[[str], None] = print
    ) -> Iterator[list[Part]]:
        """Run batches in order, as many at a time as suits the place where the model is.

        Args:
            batches: each with at least one counted token.
            kernels: as in `run`.
            start: how many batches of the pass were run before, by an earlier process too.
            say: takes a few words on what is going on.

        Yields:
            The sums of the batches that follow, in parts whose counts are powers of two and meet as in `pairs.push`.
        """
        for batch in batches:
            yield [Part(1, *self.run(batch, kernels))]

    def plan(self, passes: int, count: int, tokens: int, largest: int) -> str:
        """What a run over so many batches, tokens, and tokens in the largest batch will ask of the place where the model is.

        "" where the model is here, and nothing needs to be said.
        """
        return ""

    def record(self) -> dict[str, Any]:
        """What a result says of the place where the model is: nothing where it is here."""
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the model runs without dropout and is left as it was found."""
        return _nothing()

    @contextmanager
    def with_calls(self) -> Iterator[None]:
        """A context in which `calling` is true. Only asked of a source whose `model.calls` is not "none"."""
        self.calling = True
        try:
            yield
        finally:
            self.calling = False


@contextmanager
def _nothing() -> Iterator[None]:
    yield


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


def layer_names(blocks: int) -> tuple[str, ...]:
    """TransformerLens names of the residual layers of a model with that many blocks.

    >>> layer_names(2)
    ('blocks.0.hook_resid_pre', 'blocks.0.hook_resid_post', 'blocks.1.hook_resid_post')
    """
    return ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(blocks)))
