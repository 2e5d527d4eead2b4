"""`RemoteSource`: source of a model on an NDIF server. A request holds batches and returns sums over them."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel
from ..activations.view import Kernel, Reduced
from ..architectures.blocks import encoder_and_decoder
from ..architectures.points import HookPoint
from ..core.errors import LOG, LayersimError, LayersimWarning, in_words, shown, warn
from ..data.batches import Batch
from ..sources.identity import edits_of
from ..sources.inputs import fewest_logits, forward_arguments, smallest_arguments
from ..sources.nnsight import NNsightSource, kept_of, shippable
from ..sources.source import OnServer, PartialSums
from .client import NdifClient, PreparedRequest, quiet
from .failures import JobTooLong
from .order_without_weights import Order, order_without_weights, widths_without_weights
from .request_schedule import MOST_BATCHES, RequestPipeline, RequestSchedule
from .server_status import ServerOffer
from .shipped_source import ShippedSource
from .traces import lens_gap_of, narrowed, partial_sums, probe, submit

T = TypeVar("T")
# Bytes of one analyzer's sums above which a warning is given.
LARGE_SUMS = 8e6
# Bytes of the further inputs of one forward pass above which a warning is given.
LARGE_INPUTS = 32e6


class RemoteSource(NNsightSource, OnServer):
    """Source of an nnsight model on an NDIF server.

    Args:
        model: an nnsight model without weights, such as `TransformersModel('org/name', ...)`.
        layers: see `NNsightSource`.
        unembed: see `NNsightSource`.
        remote: True for nnsight's default server, or the address of a server.
        tokens_per_request: maximum number of positions in a request; None to choose it by time.

    Attributes:
        ndif: the client of the server.
        offer: limits and properties that the server reports.
        schedule: chooses the number of batches in a request.
    """

    def __init__(
        self,
        model: Any,
        layers: list[str] | None,
        unembed: list[str] | None,
        remote: bool | str,
        tokens_per_request: int | None,
    ) -> None:
        self.schedule = RequestSchedule(tokens_per_request)
        super().__init__(model, layers, unembed, remote)
        self.ndif = NdifClient(remote, _model_key(model, remote), model._remoteable_get_env())
        self._warned: set[str] = set()
        self._frozen = ShippedSource()
        self.offer = self._ask_offer()
        # Weights on a server have no hash. Instead, the record holds their revision and the names of requested adapters.
        revision = json.loads(self.ndif.model_key.partition(":")[2]).get("revision")
        name = self._model.name + (f"@{revision}" if revision else "")
        env = ", ".join(f"{key} {value}" for key, value in sorted(self.ndif.env.items()))
        source = f"{type(model).__name__} on an NDIF server" + (f" ({env})" if env else "")
        self._model = replace(
            self._model,
            name=name,
            dtype=self.offer.dtype,
            source=source,
            weights="",
            # Hooks stay in this process.
            changes=edits_of(model),
            calls="gradients" if self.offer.trusted else "values",
            # Modules of unknown layouts are tested only for models in this process.
            stream="none" if self._model.stream == "unknown" else self._model.stream,
        )

    def _ask_offer(self) -> ServerOffer:
        """Limits and properties of the server for this model, from its status and from a request with one row."""
        status = self.ndif.status
        arguments = smallest_arguments(self.module, self._model, bool(encoder_and_decoder(self.module)))
        facts = self.ndif.request(lambda backend: probe(self.envoy, self.blocks, arguments, backend), patient=False)
        found = vars(status) | {"dtype": f"torch.{status.dtype}" if status.dtype else facts["dtype"]}
        devices = tuple(dict.fromkeys(facts["devices"]))
        return ServerOffer(**found, server=self.ndif.name, trusted=not facts["meta"], devices=devices)

    def _shares_model(self, other: NNsightSource) -> bool:
        place = (self.ndif.name, self.ndif.model_key, self.ndif.env)
        return isinstance(other, RemoteSource) and (other.ndif.name, other.ndif.model_key, other.ndif.env) == place

    def record(self) -> dict[str, Any]:
        offer, ndif = self.offer, self.ndif
        return {
            "server": offer.server,
            "trusted": offer.trusted,
            "devices": list(offer.devices),
            "versions": dict(offer.versions),
            "requests": ndif.requests,
            "halved": self.schedule.lowered,
            "bytes_sent": ndif.sent,
            "bytes_received": ndif.received,
        }

    def refuse_larger(self, rows: int, positions: int) -> None:
        self.schedule.refuse_larger(rows, positions)

    def plan(self, passes: int, count: int, tokens: int, positions: int, samples: int) -> str:
        width = self._model.d_model if self.reads_residual else max(self.widths, default=0)
        memory = in_words(4 * len(self.sites) * samples * (width or 0))
        held = f", of which the largest holds {memory} of activations on the server" if width else ""
        limit = f"{self.offer.job_limit:g} s a job" if self.offer.job_limit else "no known limit of a job's time"
        most_tokens = self.schedule.most_tokens
        fewest = -(-count * positions // most_tokens) if most_tokens else -(-count // MOST_BATCHES)
        return (
            f"{self.offer.server} ({'trusted' if self.offer.trusted else 'sandboxed'}, {self.offer.dtype}, {limit}): "
            f"{tokens:,} tokens in {count} forward passes{held}{', and all once more for a mean' if passes > 1 else ''}. "
            f"{passes * fewest} or more requests. Only sums come back."
        )

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        # All rows are one leaf.
        [own] = self.sums(replace(batch, leaf=len(batch.tokens), rows_at_once=0), kernels)
        return own

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        try:
            parts = partial_sums(self.ndif.finish(self._prepare([batch], kernels, joined=False))["found"])
        except JobTooLong as error:
            raise self._too_long(batch, error) from None
        return [(part.not_finite, {name: dict(one) for name, one in part.out.items()}) for part in parts]

    def request(self, run: Callable[[dict[str, Any]], T]) -> T:
        return self.ndif.request(lambda backend: run({"backend": backend}))

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self.lens is not None
        row, head = batch.first_row, self.lens
        arguments, attended = forward_arguments(self.module, row, self._model), row.attention[0]
        return self.ndif.request(lambda backend: lens_gap_of(self.envoy, self.blocks[-1], head, arguments, attended, backend))

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        super().read_at(points)
        if self._reading.order is None:
            self._reading = replace(self._reading, widths=widths_without_weights(self.module, points))

    def _find_order(self, events: tuple[HookPoint, ...], row: Batch) -> Order:
        arguments = forward_arguments(self.module, row, self._model)
        return order_without_weights(self.module, self.paths, events, arguments)

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int,
        say: Callable[[str], None],
        first_block: int | None,
    ) -> Iterator[list[PartialSums]]:
        self.ndif.say = say
        schedule = self.schedule
        groups = schedule.groups(
            batches, start, schedule.most_tokens, lambda: schedule.affordable(self.offer.job_limit), first_block
        )
        pipeline = RequestPipeline(self.ndif, schedule, lambda group: self._prepare(group, kernels), self._halved)
        try:
            with closing(pipeline.results(groups)) as results:
                for group, result in results:
                    schedule.measure(self.ndif.seconds, len(group))
                    parts = partial_sums(result["found"])
                    self._warn_of_large_sums(parts)
                    yield parts
        finally:
            # The progress bar that it wrote to has ended.
            self.ndif.say = quiet

    def _halved(self, group: list[Batch], error: JobTooLong | None) -> tuple[list[Batch], list[Batch]]:
        """Split a group of batches for two requests. The first part has 2^k batches.

        Args:
            group: batches of a job that took too long, or more batches than a request may hold.
            error: error of the job; None if no job was sent.

        Raises:
            LayersimError: the job held one batch.
        """
        first = 1 << ((len(group) - 1).bit_length() - 1) if len(group) > 1 else 0
        if error is not None:
            if not first:
                raise self._too_long(group[0], error) from None
            self.schedule.lower(first)
            if limit := re.search(r"timeout of ([\d.]+)s", str(error)):
                # Some servers report their limit only in this message.
                self.offer = replace(self.offer, job_limit=float(limit[1]))
            LOG.warning("%s ended a job at its time limit; requests now hold at most %d batches", self.offer.server, first)
        return group[:first], group[first:]

    def send(self, group: list[Batch], kernels: Mapping[str, AnyKernel]) -> str:
        """Send a non-blocking request and return the id of its job."""
        return self._request_for(self.ndif.submit, group, kernels, joined=True)

    def _warn_of_large_sums(self, parts: list[PartialSums]) -> None:
        """Warn once for each analyzer if it returns large sums."""
        for name, one in parts[0].out.items():
            size = sum(value.numel() * value.element_size() for value in one.values())
            if size > LARGE_SUMS and name not in self._warned:
                self._warned.add(name)
                key, value = max(one.items(), key=lambda item: item[1].numel())
                warnings.warn(
                    f"{name!r} returns {size / 1e6:.0f} MB per request, most of it {key!r} of shape {tuple(value.shape)}.",
                    LayersimWarning,
                    stacklevel=2,
                )

    def _warn_of_large_inputs(self, batch: Batch) -> None:
        """Warn once if the further inputs of a batch are large."""
        sizes = {name: value.numel() * value.element_size() for name, value in batch.inputs.items()}
        if sum(sizes.values()) > LARGE_INPUTS and "inputs of requests" not in self._warned:
            self._warned.add("inputs of requests")
            name = max(sizes, key=lambda name: sizes[name])
            warn(
                f"The inputs of each forward pass take {in_words(sum(sizes.values()))} of a request, most of it {name!r} of "
                f"shape {tuple(batch.inputs[name].shape)}."
            )

    def _prepare(self, group: list[Batch], kernels: Mapping[str, AnyKernel], joined: bool = True) -> PreparedRequest:
        """Prepare a request for the sums over batches, without sending it."""
        return self._request_for(self.ndif.prepare, group, kernels, joined)

    def _request_for(
        self, take: Callable[[Callable[[Any], None]], T], group: list[Batch], kernels: Mapping[str, AnyKernel], joined: bool
    ) -> T:
        """Pass the traces of a request to a method of the client."""
        shipped = shippable(kernels)
        about = (self.readers(), self.pack(group), shipped, self.calling, joined)
        with self._frozen.in_place(shipped):
            return take(lambda backend: submit(*about, backend))

    def pack(self, group: list[Batch]) -> list[dict[str, Any]]:
        """The content of a request: the forward passes of each batch, and the leaves and pools of its rows."""
        return [
            {
                "starts": batch.starts,
                "leaf": batch.leaf,
                "block": batch.block or None,
                "density": batch.density,
                "passes": self._passes(batch),
            }
            for batch in group
        ]

    def _passes(self, whole: Batch) -> list[dict[str, Any]]:
        """Index, arguments and position fields of each forward pass that has a counted position."""
        work = []
        for number, batch in enumerate(whole.passes()):
            if not bool(batch.counted.any()):
                continue
            args, options = forward_arguments(self.module, batch, self._model)
            self._warn_of_large_inputs(batch)
            keep, kept = kept_of(batch)
            # Labels are the user's own numbers and may be large; the others are ids and counts, which fit int32.
            small = {name: values if name == "labels" else values.to(torch.int32) for name, values in kept.items()}
            inputs = {name: narrowed(value) for name, value in options.items()} | fewest_logits(self.module)
            call = {"args": tuple(map(narrowed, args)), "options": inputs, "shape": tuple(batch.counted.shape)}
            more = {"number": number, "pooled": batch.pooled, "has_tokens": batch.has_positions, "kept": small}
            work.append(call | more | {"keep": keep.to(torch.int32)})
        return work

    def _too_long(self, batch: Batch, error: Exception) -> LayersimError:
        rows = len(batch.tokens)
        return LayersimError(
            f"The smallest request of these analyzers, {rows} rows of {batch.tokens.shape[1]} tokens, exceeds the server's "
            f"time limit for a job ({self.offer.server} reports: {error}). Use a smaller seq_len= or batch_size=, or fewer "
            "analyzers at once."
        )


def _model_key(model: Any, remote: bool | str) -> str:
    """The name of the model on servers.

    Raises:
        LayersimError: the model was loaded from a local folder, which a server cannot read.
    """
    name = getattr(model, "repo_id", None)
    try:
        key: str = model.to_model_key()
    except Exception as error:
        if not isinstance(name, str) or not (os.path.isdir(name) or os.path.isabs(name)):
            raise
        raise LayersimError(
            f"`model` was loaded from the folder {name!r}; remote={shown(remote)} needs a model loaded by its hub name, such "
            f"as 'org/{os.path.basename(name.rstrip('/')) or 'name'}'."
        ) from error
    return key
