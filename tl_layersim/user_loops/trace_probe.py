"""`TraceProbe`: analyzers inside a user's own nnsight trace, in this process or on a server."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..analyzers.analyzer import Analyzer
from ..architectures.blocks import encoder_and_decoder
from ..core.errors import LayersimError, warn
from ..core.sums import DataBlock, SumTree
from ..data.batches import Batch
from ..data.inputs import TOKEN_IDS
from ..data.positions import Positions
from ..engine.memory_checks import refuse_large_blocks
from ..engine.plan import SitePlan
from ..engine.run import sums_of, sums_so_far
from ..remote.trace_reader import PROBES, PassReader, ShippedProbe
from ..remote.traces import partial_sums
from ..sources.checks import check_lens, check_stream_sums, refuse_not_finite
from ..sources.model import Model
from ..sources.nnsight import NNsightSource, shippable
from ..sources.source import OnServer
from .probe import Probe


def refuse_untraceable(source: NNsightSource) -> None:
    """Raise an error for a model whose traces do not tell the positions of its rows.

    Args:
        source: the model.

    Raises:
        LayersimError: the model takes other inputs than token ids, or has an encoder and a decoder.
    """
    if source.model.main_input != TOKEN_IDS or encoder_and_decoder(source.module):
        takes = "has an encoder and a decoder" if encoder_and_decoder(source.module) else f"takes `{source.model.main_input}`"
        raise LayersimError(
            f"`model` is {source.model.name}, which {takes}; `probe.read()` needs a model with token ids and one stack. Use "
            "lsim.analyze(model.edit(...), data, analyzers)."
        )


def settle(source: NNsightSource, analyzers: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Find the order and the widths of the sites by a short row of made-up tokens, and check the sites and the lens.

    Args:
        source: the model.
        analyzers: the analyzers, by name.
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
        # Tickets of requests whose results have not arrived.
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
            read: output of `PassReader.read`.

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
