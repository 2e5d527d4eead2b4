"""`TraceProbe`: analyzers inside a user's own nnsight trace, in this process or on a server.

`PassReader` and `ShippedProbe` are shipped to servers by value. What they call uses torch and the standard library alone.
"""

from __future__ import annotations

import operator
import pkgutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..activations.block_call import first_tensor
from ..activations.pools import AnyKernel, mixed, plan_batch
from ..activations.site_buffer import SiteBuffer
from ..activations.view import View, reduce
from ..analyzers.analyzer import Analyzer
from ..architectures.blocks import encoder_and_decoder
from ..architectures.unembed import Unembed
from ..core.errors import LayersimError, warn
from ..core.sums import DataBlock, SumTree, fold
from ..data.batches import FIRST_ROWS, Batch, next_tokens
from ..data.inputs import TOKEN_IDS
from ..data.labels import NO_LABEL
from ..data.positions import Positions
from ..engine.memory import refuse_large_blocks
from ..engine.plan import SitePlan
from ..engine.run import sums_of, sums_so_far
from ..remote.traces import add_batch_sums, add_leaves, partial_sums, remote_lens
from ..sources.checks import check_lens, check_stream_sums, refuse_not_finite
from ..sources.model import Model
from ..sources.nnsight import NNsightSource, TraceStep, read_step, shippable
from ..sources.source import OnServer
from .probe import Probe

# Rows whose sums are added within one call of a kernel, as in `analyze`.
LEAF = 16


@dataclass
class PassReader:
    """Reads one forward pass inside a trace, and returns sums over it.

    Attributes:
        model: the nnsight model.
        names: of the sites.
        steps: the modules that are read, in the order of the forward pass.
        unembed: the lens; None if the model has none.
        kernels: by name.
        rule: selects the counted positions.
        mask_name: the argument of the model's forward that holds the attention mask.
        whole_rows: whether an analyzer takes rows as samples.
        pads: padding ids that are no other special tokens.
        first: number of rows that were read before this trace.
    """

    model: Any
    names: tuple[str, ...]
    steps: list[TraceStep]
    unembed: Unembed | None
    kernels: dict[str, AnyKernel]
    rule: Positions
    mask_name: str
    whole_rows: bool
    pads: tuple[int, ...]
    first: int

    def read(self, on_server: bool) -> dict[str, Any]:
        """The sums over the forward pass that runs.

        Args:
            on_server: whether the dtype and the device of the lens are those of the activations.

        Returns:
            The numbers of rows, of positions and of rows with attended padding; a hash of the tokens; and if any position
            counts, its sums.
        """
        with torch.no_grad():
            args, kwargs = self.model.inputs
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
            buffer = SiteBuffer(self.names, keep, (len(tokens), width), self.rule.pooled)
            following = torch.full_like(tokens, NO_LABEL) if self.rule.pooled else next_tokens(tokens, attended)
            row = buffer.samples // width + self.first
            ids, labels = (values.reshape(-1)[buffer.samples] for values in (tokens, following))
            lens, last = self.unembed, None
            for step in self.steps:
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

    def _refuse(self, tokens: Tensor, continued: bool) -> None:
        """Refuse a step of cached generation where whole rows are needed."""
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
        args: of the model's forward.
        kwargs: of the model's forward.
        mask_name: see `PassReader`.

    Returns:
        `batch pos` of each, and whether rows continue from a cache.

    Raises:
        LayersimError: the model was called without token ids, or with a mask of another shape.
    """
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 2]
    whole = [value for value in given if not value.is_floating_point()]
    tokens = kwargs.get("input_ids", whole[0] if whole else None)
    if tokens is None:
        raise LayersimError("The trace runs the model without token ids, so that `probe.read()` knows no positions.")
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
    """Stands for `receive` in the result of a request. A server does not have the function, and its name suffices."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, ("tl_layersim.user_loops.trace_probe:receive",)


class ShippedProbe:
    """Stands for a `TraceProbe` on a server. Saved as a result, it becomes that probe in the user's process, with the sums.

    Args:
        key: of the probe.
        ticket: of the request.
        reader: reads forward passes.
    """

    def __init__(self, key: str, ticket: str, reader: PassReader) -> None:
        self.key, self.ticket, self.reader = key, ticket, reader
        self.passes: list[dict[str, Any]] = []

    def read(self) -> ShippedProbe:
        """Read the forward pass that runs, see `TraceProbe.read`."""
        import nnsight

        self.passes.append(self.reader.read(True))
        # Steps of generation and further invokes read again.
        self.reader.first += self.passes[-1]["rows"]
        saved: ShippedProbe = nnsight.save(self)
        return saved

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.call, (ReceivingFunction(), self.key, self.ticket, self.passes)


PROBES: WeakValueDictionary[str, TraceProbe] = WeakValueDictionary()


def receive(key: str, ticket: str, passes: list[dict[str, Any]]) -> Any:
    """Add the sums of a request to their probe, and return the probe. nnsight calls it when it loads a result.

    Args:
        key: of the probe.
        ticket: of the request; a result that is loaded twice counts once.
        passes: what `PassReader.read` returned.
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


def refuse_untraceable(source: NNsightSource) -> None:
    """Refuse a model whose traces do not tell the positions of its rows.

    Args:
        source: the model.

    Raises:
        LayersimError: it takes other inputs than token ids, or has an encoder and a decoder.
    """
    if source.model.main_input != TOKEN_IDS or encoder_and_decoder(source.module):
        takes = "has an encoder and a decoder" if encoder_and_decoder(source.module) else f"takes `{source.model.main_input}`"
        raise LayersimError(
            f"`model` is {source.model.name}, which {takes}; a probe in a trace reads models of token ids with one stack. Use "
            "lsim.analyze(model.edit(...), data, analyzers)."
        )


def settle(source: NNsightSource, analyzers: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Find the order and the widths of the sites by a short row of made-up tokens, and check the sites and the lens.

    Args:
        source: the model.
        analyzers: by name.
        plan: the sites that each analyzer reads.

    Raises:
        LayersimError: an analyzer does not take the sites, or the lens differs from the model's logits.
    """
    known = source.model
    special = {*known.pads, *known.starts, *known.ends}
    ids = [number for number in range(known.vocabulary or 32) if number not in special][:4]
    tokens = torch.tensor([ids])
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    row = Batch(tokens, everywhere, everywhere, 0)
    if not source.is_settled:
        source.settle(row)
        check_stream_sums(source, row)
    plan.check_sites(dict(analyzers), [source])
    if known.head is not None and any(analyzer.needs_unembed for analyzer in analyzers.values()):
        check_lens(source, row)


class TraceProbe(Probe):
    """Adds up sums of forward passes in the user's own nnsight traces, each of which calls `probe.read()` in an empty invoke.

    `results()` is the report of all traces so far; `reset()` begins anew.
    """

    def __init__(
        self, source: NNsightSource, analyzers: dict[str, Analyzer], plan: SitePlan, positions: Positions, intervals: bool
    ) -> None:
        # Of requests whose results have not arrived.
        self.sent: set[str] = set()
        self._key = uuid.uuid4().hex
        PROBES[self._key] = self
        self._source: NNsightSource = source
        self._kernels = shippable(plan.kernels(analyzers, {}))
        super().__init__(analyzers, plan, positions, intervals)

    def _begin(self) -> None:
        super()._begin()
        self._padded = 0

    def read(self) -> TraceProbe:
        self.add(self._reader().read(False))
        return self

    def _reader(self) -> PassReader:
        source, known = self._source, self._source.model
        edges = {*known.starts, *known.ends}
        return PassReader(
            source.envoy,
            source.sites,
            source.steps(),
            source.lens,
            self._kernels,
            self._rule,
            known.mask_input,
            any(analyzer.whole_rows for analyzer in self._analyzers.values()),
            tuple(pad for pad in known.pads if pad not in edges),
            self._sequences,
        )

    @property
    def mask(self) -> Tensor | None:
        """None: the mask of a trace is that with which nnsight calls the model."""
        return None

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        raise LayersimError(
            "`probe.mask` cannot be set for an nnsight model. Pass {'input_ids': tokens, 'attention_mask': mask} to the invoke."
        )

    def _sums(self) -> SumTree:
        if self._tokens:
            return self._tree
        if self.sent:
            raise LayersimError(
                f"The probe was sent with {len(self.sent)} traces, and none of their results has arrived. The probe must have "
                "a name of its own in the function that opens the trace: an argument, or `probe = self.probe`."
            )
        raise LayersimError("The probe measured nothing: no trace called probe.read(), or none at counted positions.")

    def _described(self) -> tuple[Mapping[str, list[Model]], dict[str, Any]]:
        source = self._source
        places = {"remote": [source.record()]} if isinstance(source, OnServer) else {}
        models = self._plan.models_by_analyzer([source.model.as_it_is_now()], [source])
        return models, {"in_traces": True, "rows_with_attended_padding": self._padded} | places

    def __reduce__(self) -> tuple[Any, ...]:
        """A `ShippedProbe`: nnsight pickles a probe to ship it with a trace."""
        ticket = uuid.uuid4().hex
        self.sent.add(ticket)
        return ShippedProbe, (self._key, ticket, self._reader())

    def add(self, read: Mapping[str, Any]) -> None:
        """Add the sums of one forward pass.

        Args:
            read: what `PassReader.read` returned.

        Raises:
            LayersimError: activations are not finite.
        """
        self._forwards += 1
        if read["padded"] and not self._padded:
            warn(
                f"{read['padded']} rows of a trace start or end with a padding id that its attention mask does not exclude, "
                "and are measured as they are. Pass {'input_ids': tokens, 'attention_mask': mask} to the invoke."
            )
        self._padded += read["padded"]
        if not read["tokens"]:
            return
        [part] = partial_sums([(1, read["sums"])])
        refuse_not_finite(part.not_finite, [self._source.sites], f"forward pass {self._forwards}")
        own = sums_of(tuple(self._kernels), part.out, sums_so_far(self._tree))
        if self._intervals:
            refuse_large_blocks(own)
        self._sequences += read["rows"]
        self._tokens += read["tokens"]
        self._digest.update(read["hash"].numpy().tobytes())
        self._tree = self._tree.add(DataBlock(1, read["tokens"], own))
