"""Models that stay on an NDIF server: a request takes batches there, and brings the sums of them back."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.addresses import shown
from ..core.errors import LayersimError, LayersimWarning, in_words
from ..core.pairwise_summation import BLOCK, next_size
from ..data.batches import Batch
from ..models.layout import call_options
from ..models.model_info import ServerOffer
from ..models.nnsight import NNsightSource, kept_of, travelling
from ..models.source import PartialSums
from ..models.view import Kernel, Reduced, View
from .client import LOG, NdifClient, quiet
from .failures import JobTooLong
from .shipping import ShippedSource
from .traces import BatchSums, lens_gap_of, partial_sums, probe, submit

# A request may take this long where the operator's limit is not known; a quarter of the limit where it is.
SECONDS_PER_REQUEST = 10.0
T = TypeVar("T")
# Bytes of one analyzer's sums that are not taken without a word.
LARGE_SUMS = 8e6


class RemoteSource(NNsightSource):
    """An nnsight model on an NDIF server.

    Args:
        model: the nnsight model, as `TransformersModel('org/name', ...)` makes it without weights.
        layers: see `NNsightSource`.
        unembed: see `NNsightSource`.
        remote: True for the server that nnsight is set to, or the address of one.
        tokens_per_request: how many positions one request may hold; None to find out by time.
    """

    is_remote = True

    def __init__(
        self,
        model: Any,
        layers: list[str] | None,
        unembed: list[str] | None,
        remote: bool | str,
        tokens_per_request: int | None,
    ) -> None:
        if tokens_per_request is not None and tokens_per_request < 1:
            raise LayersimError(
                "tokens_per_request is too small.", given=tokens_per_request, expected="1 or more", do="tokens_per_request=8192"
            )
        super().__init__(model, layers, unembed, remote)
        self.ndif = NdifClient(remote, _model_key(model, remote), model._remoteable_get_env())
        self.most_tokens, self._most = tokens_per_request, BLOCK
        self._seconds_per_batch: float | None = None
        self._warned: set[str] = set()
        self._frozen, self._halved = ShippedSource(), 0
        self._keeps = "logits_to_keep" in inspect.signature(type(self.module).forward).parameters
        self.offer = self._ask_offer()
        # Weights that are elsewhere have no hash; their revision, and an adapter that is asked for, stand in the record.
        which = json.loads(self.ndif.model_key.partition(":")[2]).get("revision")
        name = self._model.name + (f"@{which}" if which else "")
        asked = ", ".join(f"{key} {value}" for key, value in sorted(self.ndif.env.items()))
        source = f"{type(model).__name__} on an NDIF server" + (f" ({asked})" if asked else "")
        self._model = replace(
            self._model,
            name=name,
            dtype=self.offer.dtype,
            source=source,
            weights_hash="",
            calls="gradients" if self.offer.trusted else "values",
            # Modules that the layout does not know are looked at where they run here.
            stream="none" if self._model.stream == "unknown" else self._model.stream,
        )

    def _ask_offer(self) -> ServerOffer:
        """What the server has, by a request of one token."""
        status = self.ndif.status
        found = self.ndif.request(lambda backend: probe(self.envoy, self.blocks, backend), patient=False)
        return ServerOffer(
            server=self.ndif.name,
            trusted=not found["meta"],
            dtype=f"torch.{status.dtype}" if status.dtype else found["dtype"],
            devices=tuple(dict.fromkeys(found["devices"])),
            job_limit=status.job_limit,
            running=status.running,
            versions=dict(status.versions),
            differences=status.differences,
        )

    @property
    def sum_group(self) -> int:
        return BLOCK

    def record(self) -> dict[str, Any]:
        offer, ndif = self.offer, self.ndif
        return {
            "server": offer.server,
            "trusted": offer.trusted,
            "devices": list(offer.devices),
            "versions": dict(offer.versions),
            "requests": ndif.requests,
            "halved": self._halved,
            "bytes_sent": ndif.sent,
            "bytes_received": ndif.received,
        }

    def refuse_larger(self, rows: int, positions: int) -> None:
        """Refuse, before anything is sent, a forward pass that is larger than a request may be."""
        if self.most_tokens is not None and positions > self.most_tokens:
            width = positions // rows
            fits = self.most_tokens // width
            raise LayersimError(
                "A request holds whole forward passes, and this one is larger.",
                given=f"{rows} rows of {width} tokens with tokens_per_request={self.most_tokens}",
                expected=f"tokens_per_request of at least {positions}",
                do=f"batch_size={fits}, or a larger tokens_per_request=" if fits else "a larger tokens_per_request=",
            )

    def plan(self, passes: int, count: int, tokens: int, largest: int) -> str:
        width = self._model.d_model
        there = in_words(4 * len(self._model.layers) * largest * (width or 0))
        held = f", of which the largest holds {there} of residuals there" if width else ""
        limit = f"{self.offer.job_limit:g} s a job" if self.offer.job_limit else "no known limit of a job's time"
        fewest = -(-count * largest // self.most_tokens) if self.most_tokens else -(-count // BLOCK)
        return (
            f"{self.offer.server} ({'trusted' if self.offer.trusted else 'sandboxed'}, {self.offer.dtype}, {limit}): "
            f"{tokens:,} tokens in {count} forward passes{held}{', and all once more for a mean' if passes > 1 else ''}. "
            f"{passes * fewest} or more requests. Only sums come back."
        )

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        try:
            [part] = partial_sums(self._ask([batch], kernels))
        except JobTooLong as error:
            raise self._too_long(batch, error) from None
        return part.not_finite, {name: dict(one) for name, one in part.out.items()}

    def request(self, run: Callable[[dict[str, Any]], T]) -> T:
        return self.ndif.request(lambda backend: run({"backend": backend}))

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self._unembed is not None
        row, head = batch.first_row, self._unembed
        options = call_options(self.module, row)
        return self.ndif.request(lambda backend: lens_gap_of(self.envoy, self.blocks[-1], head, row.tokens, options, backend))

    def collect(self, batch: Batch) -> View:
        raise LayersimError(
            "Activations stay where the model is.",
            given=f"a model on {self.offer.server}",
            expected="a model that runs here",
            do="analyze() and compare(), which bring sums back; or load the model here",
        )

    def stream(
        self, batches: Iterator[Batch], kernels: Mapping[str, Kernel], start: int = 0, say: Callable[[str], None] = print
    ) -> Iterator[list[PartialSums]]:
        self.ndif.say = say
        try:
            for group in self.groups(batches, start, self.most_tokens, self._affordable):
                yield from self._in_time(group, kernels)
        finally:
            # The bar behind it is over.
            self.ndif.say = quiet

    def groups(
        self, batches: Iterator[Batch], start: int, most_tokens: int | None, affordable: Callable[[], int]
    ) -> Iterator[list[Batch]]:
        """Batches by the request: all that are left, or a power of two of them, never none.

        Args:
            batches: in order.
            start: how many went before.
            most_tokens: positions that a request may hold; None for any number.
            affordable: how many batches a request may take by time.
        """
        ahead: deque[Batch] = deque()
        index = start
        while True:
            size = next_size(index, affordable())
            while len(ahead) < size and (batch := next(batches, None)) is not None:
                self.refuse_larger(len(batch.tokens), batch.tokens.numel())
                ahead.append(batch)
            if not ahead:
                return
            taken, total = 0, 0
            for batch in list(ahead)[:size]:
                total += batch.tokens.numel()
                if taken and most_tokens is not None and total > most_tokens:
                    break
                taken += 1
            if taken < len(ahead):
                taken = 1 << (taken.bit_length() - 1)
            yield [ahead.popleft() for _ in range(taken)]
            index += taken

    def _affordable(self) -> int:
        if self.most_tokens is not None:
            return self._most
        if self._seconds_per_batch is None:
            return 1
        seconds = SECONDS_PER_REQUEST if self.offer.job_limit is None else min(SECONDS_PER_REQUEST, self.offer.job_limit / 4)
        return max(1, min(self._most, int(seconds / self._seconds_per_batch)))

    def _in_time(self, group: list[Batch], kernels: Mapping[str, Kernel]) -> Iterator[list[PartialSums]]:
        """The group in one request; in two halves where the server ends the job, or has ended shorter ones."""
        half = 1 << ((len(group) - 1).bit_length() - 1) if len(group) > 1 else 0
        found = None
        if len(group) <= self._most:
            try:
                found = self._ask(group, kernels)
            except JobTooLong as error:
                if not half:
                    raise self._too_long(group[0], error) from None
                self._most, self._halved = half, self._halved + 1
                if limit := re.search(r"timeout of ([\d.]+)s", str(error)):
                    # Some servers tell it only so.
                    self.offer = replace(self.offer, job_limit=float(limit[1]))
                LOG.warning("%s ended a job for its time: %d batches a request at most from now on", self.offer.server, half)
        if found is None:
            yield from self._in_time(group[:half], kernels)
            yield from self._in_time(group[half:], kernels)
            return
        self._seconds_per_batch = max(self.ndif.seconds, 1e-3) / len(group)
        parts = partial_sums(found)
        self._warn_of_much(parts)
        yield parts

    def send(self, group: list[Batch], kernels: Mapping[str, Kernel]) -> str:
        """Send a request off, and return the server's name for it."""
        work, shipped = self.pack(group), travelling(kernels)
        with self._frozen.in_place(shipped):
            return self.ndif.submit(lambda backend: self._submit(work, shipped, backend))

    def _submit(self, work: list[dict[str, Any]], kernels: dict[str, Kernel], backend: Any) -> list[tuple[int, BatchSums]]:
        return submit(self.envoy, self.blocks, work, self._unembed, kernels, self.calling, backend)

    def _warn_of_much(self, parts: list[PartialSums]) -> None:
        """Say once of an analyzer that it brings back more than sums over layers are."""
        for name, one in parts[0].out.items():
            size = sum(value.numel() * value.element_size() for value in one.values())
            if size > LARGE_SUMS and name not in self._warned:
                self._warned.add(name)
                key, value = max(one.items(), key=lambda item: item[1].numel())
                warnings.warn(
                    f"{name!r} brings back {size / 1e6:.0f} MB a request, most of it {key!r} of shape {tuple(value.shape)}.",
                    LayersimWarning,
                    stacklevel=2,
                )

    def _ask(self, group: list[Batch], kernels: Mapping[str, Kernel]) -> list[tuple[int, BatchSums]]:
        work, shipped = self.pack(group), travelling(kernels)
        with self._frozen.in_place(shipped):
            return self.ndif.request(lambda backend: self._submit(work, shipped, backend))

    def pack(self, group: list[Batch]) -> list[dict[str, Any]]:
        """What a request says of its batches."""
        work = []
        for batch in group:
            options = call_options(self.module, batch) | ({"logits_to_keep": 1} if self._keeps else {})
            keep, kept = kept_of(batch)
            # Labels are the user's own numbers; the others are ids and counts.
            small = {name: values if name == "labels" else values.to(torch.int32) for name, values in kept.items()}
            tokens = batch.tokens.to(torch.int32)
            work.append({"tokens": tokens, "keep": keep.to(torch.int32), "kept": small, "options": options})
        return work

    def _too_long(self, batch: Batch, error: Exception) -> LayersimError:
        rows = len(batch.tokens)
        return LayersimError(
            "One forward pass with these analyzers takes longer than a job may.",
            given=f"{rows} rows of {batch.tokens.shape[1]} tokens; {self.offer.server} says: {error}",
            expected="a job within the operator's limit",
            do=f"batch_size={max(1, rows // 2)}, a smaller seq_len=, or fewer analyzers at once",
        )


def _model_key(model: Any, remote: bool | str) -> str:
    """What a server knows the model by.

    Raises:
        LayersimError: it was loaded from a folder of this machine, which a server cannot read.
    """
    name = getattr(model, "repo_id", None)
    try:
        key: str = model.to_model_key()
    except Exception as error:
        if not isinstance(name, str) or not (os.path.isdir(name) or os.path.isabs(name)):
            raise
        raise LayersimError(
            "`model` was loaded from a folder of this machine, and a server loads models from the hub by their name.",
            given=f"TransformersModel({name!r}) with remote={shown(remote)}",
            expected="a name such as 'org/name'",
            do=f"nnsight.TransformersModel('org/{os.path.basename(name.rstrip('/')) or 'name'}', task='text-generation', "
            "tokenizer=tokenizer), or remote=False to run the folder here",
        ) from error
    return key
