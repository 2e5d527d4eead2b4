"""`RemoteSource`: runs a model on an NDIF server; only sums over activations are returned."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel
from ..activations.view import Kernel, Reduced, kept_of
from ..architectures.anatomy import Anatomy
from ..architectures.hook_points import HookPoint
from ..architectures.site_selection import site_map
from ..core.errors import LOG, LayersimError, excerpt, shown
from ..data.batches import Batch
from ..sources.forward_arguments import call_on, device_of, fewest_logits, forward_arguments, smallest_arguments
from ..sources.identity import edits_of
from ..sources.nnsight import NNsightSource, shippable
from ..sources.source import OnServer, PartialSums, Source, firing_order
from ..sources.watched_forward import watch
from ..sources.without_weights import without_values
from .backend import SMALL_RESULT, PreparedRequest
from .client import NdifClient, SentJob, quiet
from .failures import JobTooLong, UnsafeAnswer, server_text
from .requests import RequestSchedule, ShippedSource, largest_sums
from .server_status import ServerStatus
from .traces import FormOfSums, dtype_and_devices, form_of_facts, partial_sums, submit

T = TypeVar("T")
# Order of hook points as indices, and the width of each; no widths if no forward pass could run.
Order = tuple[tuple[int, ...], tuple[int, ...]]
# Positional and keyword arguments of a forward pass.
Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]
# Errors of forward passes on the meta device that depend on values.
FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class RemoteSource(NNsightSource, OnServer):
    """Runs forward passes of an nnsight model on an NDIF server.

    Args:
        model: an nnsight model without weights, such as `TransformersModel('org/name', ...)`.
        layers: see `NNsightSource`.
        unembed: see `NNsightSource`.
        remote: True for nnsight's default server, or the address of a server.
        tokens_per_request: maximum number of positions in a request; None to choose it by time.
        anatomy: see `NNsightSource`.

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
        anatomy: Anatomy | None = None,
    ) -> None:
        self.schedule = RequestSchedule(tokens_per_request)
        # Models that run together, see `beside`.
        self._together: tuple[RemoteSource, ...] = ()
        super().__init__(model, layers, unembed, remote, anatomy)
        self.ndif = NdifClient(remote, _model_key(model, remote), model._remoteable_get_env())
        self._frozen = ShippedSource()
        self.offer = self._ask_offer()
        # Weights on a server have no hash. Instead, the record holds their revision and the names of requested adapters.
        revision = json.loads(self.ndif.model_key.partition(":")[2]).get("revision")
        name = self._model.name
        if revision:
            name += f"@{revision}"
        source = f"{type(model).__name__} on an NDIF server"
        env = ", ".join(f"{key} {value}" for key, value in sorted(self.ndif.env.items()))
        if env:
            source += f" ({env})"
        self._model = replace(
            self._model,
            name=name,
            dtype=self.offer.dtype,
            source=source,
            weights="",
            # Hooks stay in this process.
            changes=edits_of(model),
            calls="gradients" if self.offer.trusted else "values",
            # Modules of unknown layouts are tested in this process only.
            stream="none" if self._model.stream == "unknown" else self._model.stream,
        )

    def _ask_offer(self) -> ServerStatus:
        """Ask the server for its limits, and find dtype and devices by a forward pass of one row."""
        status = self.ndif.status
        arguments = smallest_arguments(self.module, self._model, self.anatomy.kind == "encoder-decoder")

        def run(backend: Any) -> dict[str, Any]:
            return dtype_and_devices(self.envoy, self.blocks, arguments, backend.expecting(form_of_facts, SMALL_RESULT))

        facts = self.ndif.request(run, patient=False)
        dtype = f"torch.{status.dtype}" if status.dtype else facts["dtype"]
        devices = tuple(dict.fromkeys(facts["devices"]))
        return replace(status, dtype=dtype, server=self.ndif.name, trusted=not facts["meta"], devices=devices)

    def beside(self, others: Sequence[Source]) -> RemoteSource | None:
        models = []
        for source in (self, *others):
            # The same model on the same server, apart from edits.
            if isinstance(source, RemoteSource) and source._deployment == self._deployment:
                models.append(source)
        if len(models) <= len(others):
            return None
        joined = copy(self)
        joined._together = tuple(models)
        return joined

    @property
    def _deployment(self) -> tuple[str, str, dict[str, Any]]:
        """The server, and the model on it without its edits."""
        return self.ndif.name, self.ndif.model_key, self.ndif.env

    def record(self) -> dict[str, Any]:
        return {
            "server": self.offer.server,
            "trusted": self.offer.trusted,
            "devices": list(self.offer.devices),
            "versions": dict(self.offer.versions),
            "requests": self.ndif.requests,
            "halved": self.schedule.lowered,
            "bytes_sent": self.ndif.bytes_sent,
            "bytes_received": self.ndif.bytes_received,
        }

    def refuse_larger(self, rows: int, positions: int) -> None:
        self.schedule.refuse_larger(rows, positions)

    def plan(self, passes: int, count: int, tokens: int) -> str:
        offer = self.offer
        limit = f"{offer.job_limit:g} s a job" if offer.job_limit else "no known limit of a job's time"
        return (
            f"{offer.server} ({'trusted' if offer.trusted else 'sandboxed'}, {offer.dtype}, {limit}): {tokens:,} tokens in "
            f"{count} forward passes{', and all once more for a mean' if passes > 1 else ''}. Only sums come back."
        )

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        # All texts are one leaf.
        [reduced] = self.sums(replace(batch, leaf=batch.text_count, rows_at_once=0), kernels)
        return reduced

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        try:
            request = self._request_for(self.ndif.prepare, [batch], kernels, False)
            with self.ndif.sent(request) as result:
                parts = partial_sums(result()["found"])
        except JobTooLong as error:
            raise self._too_long(batch, error) from None
        reduced = []
        for part in parts:
            out = {name: dict(sums) for name, sums in part.out.items()}
            reduced.append((part.not_finite, out))
        return reduced

    def request(self, run: Callable[[dict[str, Any]], T], fits: Callable[[Any], bool], size: int = 0) -> T:
        def form(value: Any) -> None:
            if not fits(value):
                raise UnsafeAnswer("has another form than the request returns")

        return self.ndif.request(lambda backend: run({"backend": backend.expecting(form, SMALL_RESULT + 2 * size)}))

    def _watch(self, row: Batch) -> None:
        arguments = forward_arguments(self.module, row, self._model)
        points = self.residual.points
        modules = {point.module: self._module_at(point.module) for point in points}

        def run() -> Any:
            with without_values():
                return call_on(device_of(self.module), self.module, *arguments)

        # A model whose forward pass depends on values cannot be watched here.
        with suppress(*FAILURES), torch.no_grad(), self.evaluating():
            watch(points, modules, (), run, row.token_positions, self.aside).check(self._model.name)

    def _find_order(self, events: tuple[HookPoint, ...], row: Batch) -> Order:
        arguments = forward_arguments(self.module, row, self._model)
        return order_without_weights(self.module, self.anatomy, events, arguments)

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int,
        say: Callable[[str], None],
        first_block: int | None,
    ) -> Iterator[list[PartialSums]]:
        schedule = self.schedule
        # Batches of a job that was too long, which `groups` groups again.
        returned: deque[Batch] = deque()
        groups = schedule.groups(
            batches, start, schedule.most_tokens, lambda: schedule.affordable(self.offer.job_limit), first_block, returned
        )
        # Raised when the sums of all earlier requests have arrived.
        failure: Exception | None = None

        def next_request() -> tuple[list[Batch], PreparedRequest] | None:
            """Serialise the next request; None if no batches are left or an error was stored in `failure`."""
            nonlocal failure
            if failure:
                return None
            try:
                group = next(groups)
                if not group:
                    return None
                return group, self._request_for(self.ndif.prepare, group, kernels, True)
            except Exception as error:
                failure = error
                return None

        self.ndif.say = say
        try:
            request = next_request()
            while request is not None:
                group, prepared = request
                # While a request runs, the next one is serialised.
                with self.ndif.sent(prepared) as result:
                    request = next_request()
                    try:
                        answer = result()
                    except JobTooLong as error:
                        self._lower(group, error)
                        returned.extend(group if request is None else group + request[0])
                        request = next_request()
                        continue
                schedule.measure(self.ndif.seconds, len(group))
                yield partial_sums(answer["found"])
            if failure is not None:
                raise failure
        finally:
            # The progress bar of the run has ended.
            self.ndif.say = quiet

    def _lower(self, group: list[Batch], error: JobTooLong) -> None:
        """Limit later requests to fewer batches, after a job exceeded the server's time limit.

        The new maximum is a power of two.

        Raises:
            LayersimError: the job held one batch.
        """
        if len(group) == 1:
            raise self._too_long(group[0], error) from None
        # The largest power of two below the number of batches.
        most_batches = 1 << ((len(group) - 1).bit_length() - 1)
        self.schedule.lower(most_batches)
        # Some servers report their limit only in this message.
        limit = re.search(r"timeout of (\d{1,9}(?:\.\d+)?)s", str(error))
        if limit:
            self.offer = replace(self.offer, job_limit=float(limit[1]))
        LOG.warning("%s ended a job at its time limit; requests now hold at most %d batches", self.offer.server, most_batches)

    def send(self, group: list[Batch], kernels: Mapping[str, AnyKernel]) -> SentJob:
        """Send a non-blocking request and return its job."""
        return self._request_for(self.ndif.submit, group, kernels, True)

    def _request_for(
        self, take: Callable[[Callable[[Any], None]], T], group: list[Batch], kernels: Mapping[str, AnyKernel], joined: bool
    ) -> T:
        """Call `take`, a method of `NdifClient`, with a request for the batches in `group`."""
        shipped = shippable(kernels)
        readers = [source.reader() for source in self._together or (self,)]
        work = self.pack(group)
        texts = sum(batch.leaf_texts for batch in group)
        sites = tuple(len(reader.names) for reader in readers)
        form = FormOfSums(texts, sites, tuple(shipped), joined)
        width = max(self.widths or (self.model.d_model or 0,))
        classes = self.model.vocabulary or 0
        largest = largest_sums(group, len(shipped), max(sites), width, classes, joined, SMALL_RESULT)

        def run(backend: Any) -> None:
            submit(readers, work, shipped, self.calling, joined, backend.expecting(form, largest))

        with self._frozen.in_place(shipped):
            return take(run)

    def pack(self, group: list[Batch]) -> list[dict[str, Any]]:
        """Convert each batch to a dict of its settings and forward passes."""
        packed = []
        for batch in group:
            packed.append(
                {
                    "starts": batch.starts,
                    "leaf": batch.leaf,
                    "block": batch.block or None,
                    "density": batch.density,
                    "texts": batch.units,
                    "neighbours": batch.neighbours,
                    "passes": self._passes(batch),
                }
            )
        return packed

    def _passes(self, whole: Batch) -> list[dict[str, Any]]:
        """A dict of arguments and counted positions for each forward pass. Passes without counted positions are left out."""
        passes = []
        for number, batch in enumerate(whole.passes()):
            if not bool(batch.counted.any()):
                continue
            args, options = forward_arguments(self.module, batch, self._model)
            keep, kept = kept_of(batch)
            passes.append(
                {
                    "args": args,
                    "options": {**options, **fewest_logits(self.module)},
                    "shape": tuple(batch.counted.shape),
                    "number": number,
                    "pooled": batch.pooled,
                    "has_tokens": batch.has_positions,
                    "kept": kept,
                    "keep": keep,
                }
            )
        return passes

    def _too_long(self, batch: Batch, error: Exception) -> LayersimError:
        rows = len(batch.tokens)
        return LayersimError(
            f"The smallest request, {rows} rows of {batch.tokens.shape[1]} tokens, exceeds the server's time limit for a job. "
            f"{self.offer.server} says: '{server_text(error)}'. Use a smaller seq_len= or batch_size=, or fewer "
            "analyzers at once."
        )


def _model_key(model: Any, remote: bool | str) -> str:
    """Key of the model on servers.

    Raises:
        LayersimError: the model was loaded from a local folder.
    """
    name = getattr(model, "repo_id", None)
    try:
        key: str = model.to_model_key()
    except Exception as error:
        if not isinstance(name, str) or not (os.path.isdir(name) or os.path.isabs(name)):
            raise
        raise LayersimError(
            f"`model` was loaded from the folder {name!r}; with remote={shown(remote)}, it must be loaded by its hub name, "
            f"such as 'org/{os.path.basename(os.path.normpath(name))}'."
        ) from error
    return key


def order_without_weights(
    module: torch.nn.Module, anatomy: Anatomy, points: Sequence[HookPoint], arguments: Arguments
) -> Order:
    """Find the order and widths of hook points by a forward pass on the meta device.

    If no such pass can run, the order is the order of `lsim.sites`, and the widths are empty.

    Args:
        module: the model.
        anatomy: what lies where in it.
        points: the hook points.
        arguments: arguments of a forward pass. On the meta device they have no values.

    Raises:
        LayersimError: a module does not run exactly once in a forward pass; or no forward pass can run here, and a point is not
            a listed site.
    """
    modules = {point.module: module.get_submodule(point.module) for point in points}

    def run() -> Any:
        with without_values():
            return call_on(device_of(module), module, *arguments)

    try:
        return firing_order(points, modules, run)
    except LayersimError:
        raise
    except FAILURES as error:
        return _listed_order(module, anatomy, points, error), ()


def _listed_order(
    module: torch.nn.Module, anatomy: Anatomy, points: Sequence[HookPoint], failure: Exception
) -> tuple[int, ...]:
    """Indices of hook points, sorted by their position in `lsim.sites`.

    Raises:
        LayersimError: a point is not a listed site, so its place in the order is unknown.
    """
    # Position in the list of each input or output of a module.
    position: dict[tuple[str, bool], int] = {}
    for site in site_map(module, anatomy).sites:
        position.setdefault((site.point.module, site.point.incoming), len(position))
    unlisted = [point for point in points if (point.module, point.incoming) not in position]
    if unlisted:
        raise LayersimError(
            f"`at` names {unlisted[0].name}, whose place in the forward pass cannot be found without the model's weights "
            f"({type(failure).__name__}: {excerpt(str(failure), 160)}). Use a site that lsim.sites(model) lists."
        )
    return tuple(sorted(range(len(points)), key=lambda number: position[points[number].module, points[number].incoming]))
