"""Traces on an NDIF server that return sums, and the reading of a probe in a user's own trace.

nnsight ships the bodies of traces, the functions that these call, `PassReader` and `ShippedProbe`. They refer to local names
and to functions that need torch and the standard library alone.
"""

from __future__ import annotations

import operator
import pkgutil
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..activations.block_call import first_tensor, gradients
from ..activations.row_pools import AnyKernel, mixed, plan_batch
from ..activations.view import SiteBuffer, View, reduce
from ..architectures.unembed import Unembed, tensor_of, unembed_gap
from ..core.errors import LayersimError
from ..core.sums import fold, push
from ..data.batches import FIRST_ROWS, next_tokens
from ..data.labels import NO_LABEL
from ..data.positions import Positions
from ..sources.nnsight import TraceReader, read_step
from ..sources.source import PartialSums


def submit(
    readers: list[TraceReader],
    work: list[dict[str, Any]],
    kernels: dict[str, AnyKernel],
    calling: bool,
    joined: bool,
    backend: Any,
) -> None:
    """Submit one request: a session with a trace for each forward pass and model, and pairwise sums of the kernels' results.

    Forward passes run to the end of the model, not to the last block, because a sandbox fails if a trace follows a stopped one.
    The backend does not wait for the result, the local variable `found`: row counts, each with the sums over these rows in the
    form of `Reduced`.

    Args:
        readers: the model; or several edits of one model, whose views the kernels take together.
        work: the batches, packed by `RemoteSource.pack`.
        kernels: kernels of views, and kernels of pools of rows.
        calling: whether views carry block calls.
        joined: whether the sums of leaves are added; if False, they are returned separately.
        backend: backend that sends the request.
    """
    import nnsight

    differentiated = any(step.differentiated for reader in readers for step in reader.steps)
    with torch.no_grad(), readers[0].model.session(backend=backend):
        stack: list[Any] = []
        for unit in work:
            plan = plan_batch(known_view(unit), unit["starts"], unit["leaf"], unit["density"], kernels)
            outputs: list[Any] = []
            for item in unit["passes"]:
                args = [widened(value) for value in item["args"]]
                options = {name: widened(value) for name, value in item["options"].items()}
                views: list[Any] = []
                for reader in readers:
                    with reader.model.trace(*args, **options):  # noqa: SIM117 (what follows a trace is shipped)
                        with gradients(differentiated):
                            keep = item["keep"].long()
                            buffer = SiteBuffer(reader.names, keep, item["shape"], item["pooled"], item["has_tokens"])
                            noted: list[Any] = []
                            given: dict[str, Any] = {}
                            hidden: Any = None
                            for step in reader.steps:
                                read_step(step, buffer, given, noted if calling else None)
                                hidden = step.envoy.output if step.is_block and not step.incoming else hidden
                            device = buffer.activations.device
                            here: dict[str, Any] = {name: ids.long().to(device) for name, ids in item["kept"].items()}
                            unembed = reader.unembed
                            lens = None if unembed is None or hidden is None else remote_lens(unembed, first_tensor(hidden))
                            views.append(View(**buffer.fields(), **here, unembed=lens, calls=tuple(noted) if calling else None))
                            if len(views) == len(readers):
                                with torch.no_grad():
                                    outputs.append(reduce(plan.kernels_of(item["number"]), *views))
                                if len(outputs) == len(unit["passes"]):
                                    add_leaves(stack, unit["leaf"], unit["block"], plan.finish(outputs), joined)
        found = nnsight.save(stack)  # noqa: F841 (a result is taken by this name)


def known_view(unit: dict[str, Any]) -> View:
    """The view of a batch before its forward passes, without activations.

    Args:
        unit: the batch, packed by `RemoteSource.pack`.
    """
    sequence = []
    for item in unit["passes"]:
        buffer = SiteBuffer((), item["keep"].long(), item["shape"], item["pooled"], item["has_tokens"])
        sequence.append(buffer.samples // item["shape"][1] + unit["starts"][item["number"]])
    tokens, row = (torch.cat([item["kept"][name].long() for item in unit["passes"]]) for name in ("tokens", "row"))
    rows = torch.cat(sequence)
    return View(torch.empty(0, len(rows), 0), tokens, rows, rows, row=row)


def add_leaves(stack: list[Any], leaf: int, block: int | None, leaves: list[Any], joined: bool) -> None:
    """Add a batch's sums, leaf by leaf, to the stack of a request.

    Args:
        stack: changed in place.
        leaf: number of rows in a leaf.
        block: number of rows in a block of the data; sums are not added across blocks. None for no blocks.
        leaves: outputs of `reduce` for each leaf.
        joined: whether sums of neighbouring leaves are added.
    """
    for own in leaves:
        if joined:
            push(stack, leaf, on_cpu(own), add_batch_sums, 0, block)
        else:
            stack.append((leaf, on_cpu(own)))


def lens_gap_of(
    model: Any,
    block: Any,
    unembed: Unembed,
    arguments: tuple[tuple[Tensor, ...], dict[str, Any]],
    attended: Tensor,
    backend: Any,
) -> Tensor:
    """Run `unembed_gap` on one row in one request; `attended` is the mask of its positions."""
    import nnsight

    args, options = arguments
    with torch.no_grad(), model.trace(*args, backend=backend, **options):
        with torch.no_grad():
            hidden = first_tensor(block.output)
            lens = remote_lens(unembed, hidden)
            logits = tensor_of(model.output)[0]
            # Outside autocast, as kernels run: a server may have switched it on.
            with torch.autocast(device_type=hidden.device.type, enabled=False):
                norms = unembed_gap(lens, hidden[0], logits, attended)
        gap: Tensor = nnsight.save(norms)
    return gap


def narrowed(value: Any) -> Any:
    """Integers as int32 if they fit, for a smaller request; anything else is unchanged."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        return value
    small = value.to(torch.int32)
    return small if torch.equal(small.long(), value) else value


def widened(value: Any) -> Any:
    """The inverse of `narrowed`."""
    return value.long() if isinstance(value, Tensor) and value.dtype == torch.int32 else value


def probe(model: Any, blocks: list[Any], arguments: tuple[tuple[Tensor, ...], dict[str, Any]], backend: Any) -> dict[str, Any]:
    """Run one row in one request: dtype and devices of activations, and whether the weights are on the meta device."""
    import nnsight

    args, options = arguments
    with torch.no_grad(), model.trace(*args, backend=backend, **options):
        outputs = [first_tensor(block.output) for block in blocks]
        weight = next(iter(blocks[0]._module.parameters()))
        saved = nnsight.save(
            {
                "dtype": str(outputs[0].dtype),
                "devices": [str(output.device) for output in outputs],
                "meta": weight.device.type == "meta",
            }
        )
    facts: dict[str, Any] = saved
    return facts


def remote_lens(unembed: Unembed, hidden: Tensor) -> Unembed:
    """The lens with the dtype and the device of the model on the server.

    A model without weights has the dtype of its configuration; the server may use another one.

    Args:
        unembed: the lens as it was made without weights.
        hidden: the output of the model's last block.
    """
    return replace(unembed, dtype=hidden.dtype, norm_dtype=hidden.dtype, device=hidden.device)


def on_cpu(reduced: Any) -> Any:
    """Move the result of `reduce` to the CPU."""
    counts, out = reduced
    return counts, {name: {key: value.detach().cpu() for key, value in one.items()} for name, one in out.items()}


def add_batch_sums(a: Any, b: Any) -> Any:
    """Add the sums of two groups of batches: integers as int64, floats as float64.

    If tensors cannot be added, a message replaces the sums. If activations are not finite, only the counts are kept.
    """
    counts = [x + y for x, y in zip(a[0], b[0], strict=True)]
    if any(bool(count.any()) for count in counts):
        return counts, {}
    for out in (a[1], b[1]):
        if isinstance(out, str):
            return counts, out
    total: dict[str, dict[str, Tensor]] = {}
    for name, one in a[1].items():
        other = b[1][name]
        # A leaf without samples, or in which no pool ends, has no sums.
        total[name] = {**one, **other}
        for key in one.keys() & other.keys():
            x, y = one[key], other[key]
            if x.shape != y.shape:
                return counts, f"{name}: sum {key!r} has shape {tuple(x.shape)} and {tuple(y.shape)}"
            wide = torch.float64 if x.is_floating_point() else torch.int64
            total[name][key] = x.to(wide) + y.to(wide)
    return counts, total


def partial_sums(result: list[tuple[int, Any]]) -> list[PartialSums]:
    """The partial sums in the result of a request.

    Raises:
        LayersimError: the sums of a kernel for two batches cannot be added.
    """
    for _, (_, out) in result:
        if isinstance(out, str):
            name, _, what = out.partition(": ")
            raise LayersimError(
                f"The kernel of {name!r} returned sums that cannot be added across batches: {what}. Sum over the token axis "
                "inside the kernel."
            )
    return [PartialSums(count, not_finite, out) for count, (not_finite, out) in result]


# Rows whose sums are added within one call of a kernel, as in `analyze`.
LEAF = 16


@dataclass
class PassReader:
    """Reads one forward pass inside a trace, and returns sums over it.

    Attributes:
        reader: the sites, the modules that are read and the lens.
        kernels: kernels by name.
        rule: the rule that selects the counted positions.
        mask_name: name of the attention mask among the arguments of the model's forward.
        whole_rows: whether an analyzer takes rows as samples.
        pads: padding ids that are no other special tokens.
        first: number of rows that were read before this trace.
    """

    reader: TraceReader
    kernels: dict[str, AnyKernel]
    rule: Positions
    mask_name: str
    whole_rows: bool
    pads: tuple[int, ...]
    first: int

    def read(self, on_server: bool) -> dict[str, Any]:
        """The sums over the current forward pass.

        Args:
            on_server: whether the model is on a server, where the lens takes its dtype and device from the activations.

        Returns:
            The numbers of rows, of positions and of rows with attended padding; a hash of the tokens; and if any position
            counts, its sums.
        """
        # Without torch.no_grad: it would hold for the model, which goes on while a module's output is awaited.
        args, kwargs = self.reader.model.inputs
        if on_server and any(hasattr(value, "get_seq_length") for value in kwargs.values()):
            self._refuse_sandbox()
        tokens, attended, continued = tokens_and_mask(args, kwargs, self.mask_name)
        self._refuse(tokens, continued)
        counted = attended
        if self.rule.rule != "all":
            rows = zip(tokens, attended, strict=True)
            counted = torch.stack([self.rule.select(row, own) for row, own in rows])
        keep, width = counted.reshape(-1).nonzero()[:, 0], tokens.shape[1]
        ends = tokens[:, [0, -1]]
        padding = torch.isin(ends, torch.tensor(self.pads, dtype=ends.dtype)) & attended[:, [0, -1]]
        known: dict[str, Any] = {
            "rows": 0 if continued else int(counted.any(1).sum()),
            "tokens": len(keep),
            "padded": int(padding.any(1).sum()) if width > 1 else 0,
            "hash": mixed(tokens[counted] * 8191 + torch.arange(len(keep))).sum(),
        }
        if not len(keep):
            return known
        buffer = SiteBuffer(self.reader.names, keep, (len(tokens), width), self.rule.pooled)
        following = torch.full_like(tokens, NO_LABEL) if self.rule.pooled else next_tokens(tokens, attended)
        row = buffer.samples // width + self.first
        ids, labels = (values.reshape(-1)[buffer.samples] for values in (tokens, following))
        lens, last = self.reader.unembed, None
        for step in self.reader.steps:
            read_step(step, buffer, {}, None)
            last = step.envoy.output if step.is_block and not step.incoming else last
        if on_server and lens is not None:
            lens = None if last is None else remote_lens(lens, first_tensor(last))
        device = buffer.activations.device
        here: dict[str, Any] = {"tokens": ids.to(device), "next_token": labels.to(device), "row": row.to(device)}
        view = View(**buffer.fields(), **here, unembed=lens)
        number = buffer.samples // width
        few = counted[:FIRST_ROWS]
        density = float(few.sum()) / len(few)
        drawn = View(torch.empty(0, len(number), 0), ids, number, number, row=row)
        plan = plan_batch(drawn, (0, len(tokens)), LEAF, density, self.kernels)
        stack: list[Any] = []
        add_leaves(stack, LEAF, None, plan.finish([reduce(plan.kernels_of(0), view)]), True)
        return known | {"sums": fold(stack, add_batch_sums), "dtype": str(buffer.activations.dtype)}

    def _refuse_sandbox(self) -> None:
        """Raise an error if a sandbox would read a cache: the model in the other process would continue with a copy."""
        if next(iter(self.reader.model._module.parameters())).device.type == "meta":
            raise LayersimError(
                "`probe.read()` cannot read a generation on a sandboxed server, whose later steps it would change. Trace the "
                "finished rows, or pass use_cache=False."
            )

    def _refuse(self, tokens: Tensor, continued: bool) -> None:
        """Raise an error for a step of cached generation if whole rows are needed."""
        if continued and self.rule.rule not in ("all", "last"):
            raise LayersimError(
                f"`positions={self.rule.record()}` refers to whole rows, but this forward pass continues rows from a cache. "
                "Use positions='all' or 'last'."
            )
        if self.whole_rows and (continued or tokens.shape[1] == 1):
            raise LayersimError(
                "The attached analyzer needs whole rows, but this forward pass has a single position, as in cached "
                'generation. Trace the finished rows, or use CKA(level="token").'
            )


def tokens_and_mask(args: Any, kwargs: Any, mask_name: str) -> tuple[Tensor, Tensor, bool]:
    """The tokens and the attended positions of a forward pass, on the CPU.

    Args:
        args: positional arguments of the model's forward.
        kwargs: keyword arguments of the model's forward.
        mask_name: see `PassReader`.

    Returns:
        The tokens and the mask, `batch pos`; and whether rows continue from a cache.

    Raises:
        LayersimError: the model was called without token ids, or with a mask of another shape.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 2]
    whole = [value for value in given if not value.is_floating_point()]
    tokens = kwargs.get("input_ids", whole[0] if whole else None)
    if tokens is None:
        raise LayersimError("The trace runs the model without token ids, so `probe.read()` cannot tell its positions.")
    mask, pos = kwargs.get(mask_name), tokens.shape[1]
    caches = [value for value in kwargs.values() if hasattr(value, "get_seq_length")]
    continued = any(int(cache.get_seq_length()) > 0 for cache in caches)
    if mask is None:
        return tokens.cpu().long(), torch.ones(tokens.shape, dtype=torch.bool), continued
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != tokens.shape[0] or mask.shape[1] < pos:
        shape = tuple(getattr(mask, "shape", ()))
        raise LayersimError(f"`{mask_name}` has shape {shape}; `probe.read()` needs one of shape {tuple(tokens.shape)}.")
    return tokens.cpu().long(), mask[:, -pos:].bool().cpu(), continued or mask.shape[1] > pos


class ReceivingFunction:
    """Placeholder for `receive` in the result of a request. It holds the name of the function, which the server lacks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, ("tl_layersim.remote.traces:receive",)


class ShippedProbe:
    """Placeholder for a probe on a server. Saved as a result, it becomes that probe in the user's process, with the sums.

    Args:
        key: key of the probe.
        ticket: ticket of the request.
        reader: the reader of forward passes.
    """

    def __init__(self, key: str, ticket: str, reader: PassReader) -> None:
        self.key, self.ticket, self.reader = key, ticket, reader
        self.passes: list[dict[str, Any]] = []

    def read(self) -> ShippedProbe:
        """Read the current forward pass, see `PassReader.read`."""
        import nnsight

        self.passes.append(self.reader.read(True))
        # Steps of generation and further invokes read again.
        self.reader.first += self.passes[-1]["rows"]
        saved: ShippedProbe = nnsight.save(self)
        return saved

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.call, (ReceivingFunction(), self.key, self.ticket, self.passes)


# Probes by key. `sent` of a probe holds the tickets of the requests whose results have not arrived; `add` takes the output of
# `PassReader.read`.
PROBES: WeakValueDictionary[str, Any] = WeakValueDictionary()


def receive(key: str, ticket: str, passes: list[dict[str, Any]]) -> Any:
    """Add the sums of a request to their probe, and return the probe. nnsight calls it when it loads a result.

    Args:
        key: key of the probe.
        ticket: ticket of the request; a result that is loaded twice counts once.
        passes: outputs of `PassReader.read`.
    """
    probe = PROBES.get(key)
    if probe is None:
        # The process that sent the request has ended, or the probe was deleted.
        return passes
    if ticket in probe.sent:
        probe.sent.discard(ticket)
        for one in passes:
            probe.add(one)
    return probe
