"""Models that stay on an NDIF server: a request takes batches there, and brings the sums of them back."""

from __future__ import annotations

import inspect
import json
import logging
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
from ..core.pairwise_summation import BLOCK, next_size, push
from ..data.batches import Batch
from ..models.block_call import first_tensor, record_call
from ..models.layout import call_options
from ..models.model_info import ServerOffer
from ..models.nnsight import NNsightSource, kept_of, travelling
from ..models.source import PartialSums
from ..models.unembed import Unembed, tensor_of, unembed_gap
from ..models.view import Kernel, Reduced, View, place, reduce
from .client import JobTooLong, NdifClient, quiet
from .shipping import ShippedSource

# A request may take this long where the operator's limit is not known; a quarter of the limit where it is.
SECONDS_PER_REQUEST = 10.0
T = TypeVar("T")
LOG = logging.getLogger("tl_layersim")
# Bytes of one analyzer's sums that are not taken without a word.
MUCH = 8e6
Found = tuple[list[Tensor], dict[str, dict[str, Tensor]]]


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
        standing = self.ndif.standing
        found = self.ndif.request(lambda backend: _probe(self.envoy, self.blocks, backend), patient=False)
        return ServerOffer(
            server=self.ndif.name,
            trusted=not found["meta"],
            dtype=f"torch.{standing.dtype}" if standing.dtype else found["dtype"],
            devices=tuple(dict.fromkeys(found["devices"])),
            job_limit=standing.job_limit,
            running=standing.running,
            versions=dict(standing.versions),
            differences=standing.differences,
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
            [part] = parts_of(self._ask([batch], kernels))
        except JobTooLong as error:
            raise self._too_long(batch, error) from None
        return part.not_finite, {name: dict(one) for name, one in part.out.items()}

    def request(self, run: Callable[[dict[str, Any]], T]) -> T:
        return self.ndif.request(lambda backend: run({"backend": backend}))

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self._unembed is not None
        row, head = batch.first_row, self._unembed
        options = call_options(self.module, row)
        return self.ndif.request(lambda backend: _gap(self.envoy, self.blocks[-1], head, row.tokens, options, backend))

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
        parts = parts_of(found)
        self._warn_of_much(parts)
        yield parts

    def send(self, group: list[Batch], kernels: Mapping[str, Kernel]) -> str:
        """Send a request off, and return the server's name for it."""
        work, shipped = self.pack(group), travelling(kernels)
        with self._frozen.in_place(shipped):
            return self.ndif.send_off(lambda backend: self._submit(work, shipped, backend))

    def _submit(self, work: list[dict[str, Any]], kernels: dict[str, Kernel], backend: Any) -> list[tuple[int, Found]]:
        return submit(self.envoy, self.blocks, work, self._unembed, kernels, self.calling, backend)

    def _warn_of_much(self, parts: list[PartialSums]) -> None:
        """Say once of an analyzer that it brings back more than sums over layers are."""
        for name, one in parts[0].out.items():
            size = sum(value.numel() * value.element_size() for value in one.values())
            if size > MUCH and name not in self._warned:
                self._warned.add(name)
                key, value = max(one.items(), key=lambda item: item[1].numel())
                warnings.warn(
                    f"{name!r} brings back {size / 1e6:.0f} MB a request, most of it {key!r} of shape {tuple(value.shape)}.",
                    LayersimWarning,
                    stacklevel=2,
                )

    def _ask(self, group: list[Batch], kernels: Mapping[str, Kernel]) -> list[tuple[int, Found]]:
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


def submit(
    model: Any,
    blocks: list[Any],
    work: list[dict[str, Any]],
    unembed: Unembed | None,
    kernels: dict[str, Kernel],
    calling: bool,
    backend: Any,
) -> list[tuple[int, Found]]:
    """One request: a session of one trace for each batch. Its body is shipped, see `nnsight._trace`.

    Forward passes end where models end, not after the last block: a sandbox loses step where a trace is stopped and another
    follows.
    """
    import nnsight

    found: Any = None
    total = len(blocks) + 1
    with torch.no_grad(), model.session(backend=backend):
        stack: list[Any] = []
        for item in work:
            with model.trace(item["tokens"].long(), **item["options"]):  # noqa: SIM117 (what follows a trace is shipped)
                with torch.no_grad():
                    keep = item["keep"].long()
                    buffer = place(None, 0, total, blocks[0].input, keep)
                    noted: list[Any] = []
                    for index, block in enumerate(blocks):
                        args, kwargs = block.inputs if calling else ((), {})
                        hidden = first_tensor(block.output)
                        buffer = place(buffer, index + 1, total, hidden, keep)
                        if calling:
                            noted.append(record_call(block, args, kwargs, hidden))
                    here: dict[str, Any] = {name: ids.long().to(buffer.device) for name, ids in item["kept"].items()}
                    rows = keep.to(buffer.device)
                    width = item["tokens"].shape[1]
                    lens = None if unembed is None else there(unembed, hidden)
                    calls = tuple(noted) if calling else None
                    at = {"sequence": rows // width, "position": rows % width}
                    view = View(residual=buffer, unembed=lens, calls=calls, **at, **here)
                    push(stack, 1, fetched(reduce(kernels, view)), add_found)
        found = nnsight.save(stack)
    # None for a job that was sent off and not waited for.
    answer: list[tuple[int, Found]] = found
    return answer


def _gap(model: Any, block: Any, unembed: Unembed, tokens: Tensor, options: dict[str, Any], backend: Any) -> Tensor:
    """One trace of the whole model, as in `nnsight._trace_gap`."""
    import nnsight

    last = tokens.shape[1] - 1
    with torch.no_grad(), model.trace(tokens, backend=backend, **options):
        with torch.no_grad():
            hidden = first_tensor(block.output)
            lens = there(unembed, hidden)
            logits = tensor_of(model.output)[0]
            # As where kernels run: a server may have opened autocast.
            with torch.autocast(device_type=hidden.device.type, enabled=False):
                found = unembed_gap(lens, hidden[0], logits, last)
        gap: Tensor = nnsight.save(found)
    return gap


def _probe(model: Any, blocks: list[Any], backend: Any) -> dict[str, Any]:
    """One trace of one token: whether weights are at hand, and what activations are like."""
    import nnsight

    tokens = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad(), model.trace(tokens, backend=backend):
        outputs = [first_tensor(block.output) for block in blocks]
        weight = next(iter(blocks[0]._module.parameters()))
        found = nnsight.save(
            {
                "dtype": str(outputs[0].dtype),
                "devices": [str(output.device) for output in outputs],
                "meta": weight.device.type == "meta",
            }
        )
    answer: dict[str, Any] = found
    return answer


def there(unembed: Unembed, hidden: Tensor) -> Unembed:
    """The lens in the dtype and on the device that the model really has, which what leaves its last block shows.

    What was known here is the dtype of weights that were never loaded.
    """
    return replace(unembed, dtype=hidden.dtype, norm_dtype=hidden.dtype, device=hidden.device)


def fetched(found: Any) -> Any:
    """What `reduce` gave, on the CPU."""
    counts, out = found
    return counts, {name: {key: value.detach().cpu() for key, value in one.items()} for name, one in out.items()}


def add_found(a: Any, b: Any) -> Any:
    """The sums of two batches: whole numbers as int64, the rest as float64. In place of them, in words, what cannot be added.

    Where a batch had activations that are not finite, the counts of these are all that is left.
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
        total[name] = {}
        for key in {**one, **other}:
            x, y = one.get(key), other.get(key)
            if x is None or y is None or x.shape != y.shape:
                shapes = [None if value is None else tuple(value.shape) for value in (x, y)]
                return counts, f"{name}: sum {key!r} has shape {shapes[0]} and {shapes[1]}"
            wide = torch.float64 if x.is_floating_point() else torch.int64
            total[name][key] = x.to(wide) + y.to(wide)
    return counts, total


def parts_of(found: list[tuple[int, Any]]) -> list[PartialSums]:
    """What a request brought, in parts.

    Raises:
        LayersimError: a kernel gave something that is no sum.
    """
    for _, (_, out) in found:
        if isinstance(out, str):
            name, _, what = out.partition(": ")
            raise LayersimError(
                f"What the kernel of {name!r} returned cannot be added up.",
                given=what,
                expected="a dict of tensors whose names and shapes do not depend on the batch",
                do="sum over the token axis inside the kernel",
            )
    return [PartialSums(count, not_finite, out) for count, (not_finite, out) in found]
