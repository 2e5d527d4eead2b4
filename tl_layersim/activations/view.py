"""`View`: activations and tokens of one batch, the input of kernels. Functions that run kernels on views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..architectures.hook_points import Part, at_point
from ..architectures.unembed import Unembed
from ..data.labels import NO_LABEL
from .block_call import BlockCall

if TYPE_CHECKING:
    from ..data.batches import Batch

T = TypeVar("T")
Kernel = Callable[..., dict[str, Tensor]]
Reduced = tuple[list[Tensor], dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class View:
    """Activations and tokens of one batch at its counted positions, without padding.

    A sample is one position; with positions="mean", the mean of a row.

    Attributes:
        activations: `site sample width`, float32 (float64 if the model is). By default the sites are the residual layers,
            starting with the input of block 0. Narrower sites are zero-padded to the widest.
        tokens: `token`, token ids.
        sequence: `token`, index of the row in the batch, ascending. Under `attach` every forward pass has its own rows, so a
            cached generation step is a row of one token.
        position: `token`, position in this row, ascending within a row.
        next_token: `token`, the next id in the row, `NO_LABEL` if no attended token follows. None if it follows from the
            counted tokens.
        row: `token`, index of the row in the data. None if the source does not know it.
        text: `token`, identity of the text, the index of its first row in the data; -1 if the row joins several texts. None if
            it is `row` everywhere.
        unit: `token`, index of the text among those of the batch, ascending. None if each row is a text.
        column: `token`, position in the data's row, including padding and tokens before a cut.
        labels: `token`, the label from the data, `NO_LABEL` if it is missing. None if the data has no labels.
        unembed: the logit lens of the model. None if the model has no known head.
        calls: the block calls, which can be replayed; empty if no analyzer needs them.
        sites: names of the sites, in the order of `activations`.
        widths: width of each site.
        memo: results that one kernel computes and others use.
    """

    activations: Tensor
    tokens: Tensor
    sequence: Tensor
    position: Tensor
    next_token: Tensor | None = None
    row: Tensor | None = None
    text: Tensor | None = None
    unit: Tensor | None = None
    column: Tensor | None = None
    labels: Tensor | None = None
    unembed: Unembed | None = None
    calls: tuple[BlockCall, ...] = ()
    sites: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    def token_fields(self) -> dict[str, Tensor]:
        """The fields with one value per token, by name. They do not depend on the model. Fields that are None are left out."""
        names = ("tokens", "sequence", "position", "next_token", "row", "text", "unit", "column", "labels")
        fields = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        return fields


def reduce(kernels: Mapping[str, Kernel], *views: View) -> Reduced:
    """Run kernels on views, and count activations that are not finite.

    Kernels run without autograd and autocast, with full-precision float32 matmuls.

    Returns:
        For each view `layer`, the number of activations that are NaN or infinite; and the kernels' outputs by name, empty if
        there are such values.
    """

    def run() -> Reduced:
        not_finite = [_count_not_finite(view.activations) for view in views]
        if any(bool(count.any()) for count in not_finite):
            return not_finite, {}
        return not_finite, {name: kernel(*views) for name, kernel in kernels.items()}

    return in_full_precision(views[0].activations.device, run)


def in_full_precision(device: torch.device, call: Callable[[], T]) -> T:
    """Call a function without autograd and autocast, with full-precision float32 matmuls.

    Args:
        device: device of the tensors.
        call: the function.
    """
    previous_precision = _set_precision(None)
    try:
        # Inference mode is off too, because a kernel could not differentiate a block in it.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type=device.type, enabled=False):
            return call()
    finally:
        _set_precision(previous_precision)


def _count_not_finite(activations: Tensor) -> Tensor:
    # A sum is finite only if all its terms are. Terms are counted only if the sum is not finite.
    if bool(torch.isfinite(activations.sum())):
        return torch.zeros(activations.shape[0], dtype=torch.int64)
    return (~torch.isfinite(activations)).sum((1, 2)).cpu()


def _set_precision(values: list[str] | None) -> list[str]:
    """Set the precision of float32 matmuls, and return the previous one. None is full float32.

    A user or a server may have allowed TF32 or bfloat16 for speed. This is not a decorator, because shipped source loses
    decorators.
    """
    backends: list[Any] = [getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn)]
    if all(hasattr(backend, "fp32_precision") for backend in backends):
        previous = [backend.fp32_precision for backend in backends]
        for backend, value in zip(backends, values or ["ieee", "ieee"], strict=True):
            backend.fp32_precision = value
        return previous
    # Older torch has one setting for both.
    previous = [torch.get_float32_matmul_precision()]
    torch.set_float32_matmul_precision(values[0] if values else "highest")
    return previous


def tokens_alone(batch: Batch) -> View:
    """A view of a batch that holds its tokens, but no activations."""
    index = batch.counted.nonzero()
    next_tokens = batch.next_tokens
    if batch.pooled:
        pos = batch.counted.shape[1]
        index = index[last_of_rows(index[:, 0] * pos + index[:, 1], pos)[0]]
        next_tokens = torch.full_like(next_tokens, NO_LABEL)
    at = (index[:, 0], index[:, 1])
    data_rows, places = batch.sources
    return View(
        activations=torch.empty(0, len(index), 0),
        tokens=batch.tokens[at],
        sequence=index[:, 0],
        position=index[:, 1],
        next_token=next_tokens[at],
        row=data_rows[at],
        text=torch.tensor(batch.groups)[at[0]] if batch.groups != batch.source_rows else None,
        unit=torch.tensor(batch.units)[at[0]] if batch.text_count < len(batch.tokens) else None,
        column=places[at],
        labels=None if batch.labels is None else batch.labels[at],
    )


def kept_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The flat indices of a batch's counted positions, and the fields by token that a `SiteBuffer` does not know."""
    token_fields = tokens_alone(batch).token_fields()
    # The buffer knows rows and positions.
    del token_fields["sequence"]
    del token_fields["position"]
    counted_positions = batch.counted.reshape(-1).nonzero()[:, 0]
    return counted_positions, token_fields


def at_sites(*views: View, kernel: Kernel, sites: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Run a kernel on only those sites of each view that it reads.

    Args:
        *views: views of one model, or of two.
        kernel: kernel of an analyzer that reads only some of the sites.
        sites: for each view, indices of the sites that the kernel reads.
    """
    return kernel(*(select_sites(view, sites_of_view) for view, sites_of_view in zip(views, sites, strict=True)))


def select_sites(view: View, sites: tuple[int, ...]) -> View:
    """A view that holds only some sites of another view. Kernels that read the same sites share the new view and its memo.

    Args:
        view: the view of all sites.
        sites: indices of the sites, in the order of the new view.
    """
    if sites == tuple(range(len(view.activations))):
        return view
    key = f"sites {sites}"
    if key not in view.memo:
        start = sites[0]
        stop = sites[-1] + 1
        # Neighbouring sites need no copy.
        are_neighbours = sites == tuple(range(start, stop))
        widths = tuple(view.widths[site] for site in sites)
        activations = view.activations[start:stop] if are_neighbours else view.activations[list(sites)]
        view.memo[key] = replace(
            view,
            activations=activations[..., : max(widths)],
            sites=tuple(view.sites[site] for site in sites),
            widths=widths,
            memo={},
        )
    view_of_sites: View = view.memo[key]
    return view_of_sites


def row_ends(view: View) -> Tensor:
    """Index of the last counted token of each row."""
    lengths: Tensor = torch.unique_consecutive(view.sequence, return_counts=True)[1]
    return lengths.cumsum(0) - 1


def padded_rows(view: View, x: Tensor) -> tuple[Tensor, Tensor]:
    """Arrange vectors of the view's tokens in padded rows.

    Args:
        view: the view of one batch.
        x: `token width`.

    Returns:
        `row pos width`, zero at positions without a counted token; and `row pos`, bool, whether there is one.
    """
    counts: Tensor = torch.unique_consecutive(view.sequence, return_counts=True)[1]
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts).to(x.device)
    position = view.position.to(x.device)
    shape = (len(counts), int(position.max()) + 1 if len(position) else 0)
    rows = x.new_zeros(*shape, x.shape[-1])
    rows[row, position] = x
    counted = torch.zeros(shape, dtype=torch.bool, device=x.device)
    counted[row, position] = True
    return rows, counted


def targets(view: View, labels: str | Tensor, index: Tensor | None = None) -> Tensor:
    """The target of each token, or of the tokens in `index`. It is NO_LABEL if a token has no target.

    This function is shipped with the kernels that call it.
    """
    if index is not None:
        return targets(view, labels)[index]
    if isinstance(labels, Tensor):
        assert view.row is not None
        assert view.column is not None
        labels = labels.long().to(view.row.device)
        return labels[view.row] if labels.dim() == 1 else labels[view.row, view.column]
    if labels == "data":
        assert view.labels is not None
        return view.labels
    if labels == "none":
        return torch.full_like(view.tokens, NO_LABEL)
    if view.next_token is not None:
        return view.next_token
    # Without next tokens, the target is the next counted token, if it is at the next position of the row.
    following = torch.full_like(view.tokens, NO_LABEL)
    same_row = view.sequence[1:] == view.sequence[:-1]
    next_position = view.position[1:] == view.position[:-1] + 1
    following[:-1] = torch.where(same_row & next_position, view.tokens[1:], NO_LABEL)
    return following


class SiteBuffer:
    """Buffer of activations (`site sample width`) that is filled site by site.

    Each site is copied as soon as it is read, so that the model can free its activations.

    Args:
        names: names of the sites.
        keep: indices of the counted positions in the flattened `batch pos`, ascending.
        shape: `batch pos` of the forward pass.
        pooled: whether a sample is the mean over a row's counted positions.
        has_tokens: whether positions are tokens. If False, each site may have its own number of positions, over which the mean
            is taken.

    Attributes:
        sites: names of the sites.
        samples: for each sample, the index of its position in the flattened `batch pos`; for a mean, of its row's last counted
            position.

    Examples:
        >>> import torch
        >>> buffer = SiteBuffer(("wide", "narrow"), torch.tensor([0, 1, 3]), (2, 2), pooled=False)
        >>> buffer.put(0, torch.ones(2, 2, 3))
        >>> buffer.put(1, torch.ones(2, 2, 1))
        >>> buffer.activations.shape, buffer.widths
        (torch.Size([2, 3, 3]), (3, 1))
    """

    def __init__(
        self, names: tuple[str, ...], keep: Tensor, shape: tuple[int, int], pooled: bool, has_tokens: bool = True
    ) -> None:
        self.sites = names
        self.keep = keep
        self.shape = shape
        self.samples = keep
        self.row_of = keep
        self.lengths = keep
        self.pooled = pooled
        # A site with positions of its own has its mean over all of them.
        self.own_positions = pooled and not has_tokens and keep.numel() == shape[0] * shape[1]
        self.token_positions = shape[1] if has_tokens else None
        self._buffer: Tensor | None = None
        self._widths = [0] * len(names)
        if pooled:
            ends, self.row_of, self.lengths = last_of_rows(keep, shape[1])
            self.samples = keep[ends.to(keep.device)]

    def put(self, site: int, hidden: Tensor, part: Part | None = None) -> None:
        """Copy the activations of one site to the buffer.

        Args:
            site: index of the site.
            hidden: `batch pos ...`, any dtype, any device.
            part: part of the last axis that belongs to the site; None for all of it.
        """
        has_own_positions = False
        if self.own_positions and hidden.shape[0] == self.shape[0]:
            has_own_positions = hidden.dim() < 3 or hidden.shape[1] != self.shape[1]
        remedy = ""
        if not self.token_positions:
            remedy = " If the site has its own number of positions for an image, pass positions='mean'."
        hidden = at_point(hidden, part, None if has_own_positions else self.shape, self.sites[site], remedy)
        width = hidden.shape[-1]
        rows = hidden.detach() if has_own_positions else hidden.detach().reshape(-1, width)
        # Positions are ascending, so equal numbers mean that all positions are kept.
        if not has_own_positions and len(rows) != self.keep.numel():
            # The indices are moved once: a copy to a GPU at every site would wait for the blocks before it.
            self.keep = self.keep.to(rows.device)
            rows = rows.index_select(0, self.keep)
        buffer = self._buffer
        if buffer is None:
            # Sums are float64; Apple's GPUs have none, so the view of such a model lives on the CPU.
            device = torch.device("cpu") if hidden.device.type == "mps" else hidden.device
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            # The buffer starts as NaN, so that a site that is never read is noticed.
            buffer = torch.full((len(self.sites), self.samples.numel(), width), torch.nan, dtype=dtype, device=device)
        if width > buffer.shape[-1]:
            buffer = torch.nn.functional.pad(buffer, (0, width - buffer.shape[-1]))
        if has_own_positions:
            rows = rows.double().mean(1)
        elif self.pooled:
            lengths = self.lengths.to(rows.device)
            total = torch.zeros(lengths.numel(), width, dtype=torch.float64, device=rows.device)
            rows = total.index_add_(0, self.row_of.to(rows.device), rows.double()) / lengths[:, None]
        buffer[site, :, :width] = rows
        buffer[site, :, width:] = 0
        self._buffer = buffer
        self._widths[site] = width

    @property
    def activations(self) -> Tensor:
        """The activations (`site sample width`). Narrower sites are zero-padded to the widest."""
        assert self._buffer is not None
        return self._buffer

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each site."""
        return tuple(self._widths)

    @property
    def device_of_tokens(self) -> torch.device:
        """The device of data by token: that of the activations.

        Beside activations without values, tokens keep theirs: minibatches and targets depend on them.
        """
        return torch.device("cpu") if self.activations.is_meta else self.activations.device

    def view(self, token_fields: Mapping[str, Tensor], unembed: Unembed | None = None, calls: Sequence[BlockCall] = ()) -> View:
        """The filled buffer as a `View`.

        Args:
            token_fields: further fields of the view, `sample`, on any device.
            unembed: see `View`.
            calls: see `View`.
        """
        fields: dict[str, Any] = {}
        for name, values in token_fields.items():
            fields[name] = values.to(self.device_of_tokens)
        return View(**self.fields(), **fields, unembed=unembed, calls=tuple(calls))

    def fields(self) -> dict[str, Any]:
        """Arguments for `View`: activations, names and widths of sites, and row and position of each sample."""
        samples = self.samples.to(self.device_of_tokens)
        return {
            "activations": self.activations,
            "sites": self.sites,
            "widths": self.widths,
            "sequence": samples // self.shape[1],
            "position": samples % self.shape[1],
        }


def last_of_rows(keep: Tensor, pos: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last counted position of each row, and the row of each counted position.

    Args:
        keep: indices of the counted positions in the flattened `batch pos`, ascending.
        pos: number of positions of a row.

    Returns:
        `row`, the index in `keep` of each row's last counted position; `token`, the index of each position's row; and `row`,
        the number of counted positions per row. Rows without a counted position are left out.
    """
    lengths: Tensor = torch.unique_consecutive(keep.cpu() // pos, return_counts=True)[1]
    ends = lengths.cumsum(0) - 1
    row_of_position = torch.arange(lengths.numel()).repeat_interleave(lengths)
    return ends, row_of_position, lengths
