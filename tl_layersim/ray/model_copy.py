"""A copy of the model in a worker process of Ray: it loads the model, follows the settings of the driver and sums batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from ..analysis.data_pass import sums_of
from ..core.errors import LayersimError
from ..core.pairwise_summation import push
from ..core.sums import Sums
from ..core.wording import brief, with_article
from ..data.batches import Batch
from ..models.hook_point import HookPoint
from ..models.model_info import Model
from ..models.open import OpenedModel
from ..models.pools import AnyKernel
from ..models.source import PartialSums, Source
from ..remote.open import open_source

# The fields of a description that are equal in all copies of one model.
EQUAL_FIELDS = ("name", "config_hash", "weights_hash", "changes", "source", "basis", "dtype", "layers")


@dataclass(frozen=True)
class Settings:
    """What a copy of the model reads. Every call carries it, because a worker that was lost begins again without any.

    Attributes:
        number: of the settings; it rises with each change.
        identity: of the model, see `EQUAL_FIELDS`; None before the first copy has described it.
        stack: the argument of `Source.in_stack`; None where it was not called.
        points: the hook points that are read; None for the residual layers.
        settled_on: the row with which the source was settled, None where it was not.
        calling: see `Source.calling`.
    """

    number: int = 0
    identity: tuple[Any, ...] | None = None
    stack: Any = None
    points: tuple[HookPoint, ...] | None = None
    settled_on: Batch | None = None
    calling: bool = False


@dataclass(frozen=True)
class Facts:
    """What the driver knows of the model under the current settings.

    Attributes:
        model: its description.
        sites: see `Source.sites`.
        widths: see `Source.widths`.
        is_settled: see `Source.is_settled`.
    """

    model: Model
    sites: tuple[str, ...]
    widths: tuple[int, ...]
    is_settled: bool


class SharedKernels(Protocol):
    """The kernels of a pass, kept once on each machine of the cluster."""

    key: str

    def get(self) -> Mapping[str, AnyKernel]:
        """Fetch them."""


@dataclass(frozen=True)
class GroupSums:
    """Sums of consecutive batches, and where and in which time they were computed.

    Attributes:
        parts: see `Source.stream`.
        seconds: that the group took.
        process: number of the process.
        batches: number of the batches.
    """

    parts: list[PartialSums]
    seconds: float
    process: int
    batches: int


class ModelCopy:
    """A copy of the model in a worker process.

    Args:
        load_model: returns the model, or an `OpenedModel`.
        at: the sites of the run.
    """

    def __init__(self, load_model: Callable[[], Any], at: Any) -> None:
        self._load_model, self._at = load_model, at
        self._opened: OpenedModel | None = None
        self._source: Source | None = None
        self._settings = Settings()
        self._contexts, self._calls = ExitStack(), ExitStack()
        self._kernels: tuple[str, Mapping[str, AnyKernel]] = ("", {})

    def open(self) -> int:
        """Load the model, if it is not loaded, and return the number of the process."""
        if self._source is None:
            self._opened = loaded(self._load_model)
            source = open_source(self._opened, either_stack=True, at=self._at)
            self._contexts.enter_context(source.evaluating())
            self._source = source
        return os.getpid()

    def opened(self) -> OpenedModel:
        """How the model was opened, without the model."""
        self.open()
        assert self._opened is not None
        return replace(self._opened, model=None)

    def ask(self, settings: Settings, name: str, *arguments: Any) -> Any:
        """The property of this name of the source, or what its method returns.

        Args:
            settings: of the driver.
            name: of the property or method.
            arguments: of the method.
        """
        value = getattr(self._set(settings), name)
        value = value(*arguments) if callable(value) else value
        # The driver may have no GPU.
        return value.cpu() if isinstance(value, Tensor) else value

    def facts(self, settings: Settings) -> Facts:
        """What the driver has to know of the model."""
        source = self._set(settings)
        return Facts(source.model, source.sites, source.widths, source.is_settled)

    def sums(self, settings: Settings, kernels: SharedKernels, batches: Sequence[Batch], start: int) -> GroupSums:
        """Run consecutive batches and add what the kernels return, in the order of `pairwise_summation`.

        Args:
            settings: of the driver.
            kernels: of the pass.
            batches: each with at least one counted token.
            start: number of rows of the data before these.
        """
        began, source = time.monotonic(), self._set(settings)
        if self._kernels[0] != kernels.key:
            self._kernels = (kernels.key, kernels.get())
        run = self._kernels[1]
        stack: list[tuple[int, PartialSums]] = []
        for batch in batches:
            for not_finite, out in source.sums(batch, run):
                # Nothing is returned for activations that are not finite, which the driver refuses with their sites.
                own = sums_of(tuple(run), out, {}) if out else {}
                here = {name: dict(sums.fields) for name, sums in own.items()}
                part = PartialSums(batch.leaf, [count.cpu() for count in not_finite], here)
                push(stack, batch.leaf, part, _add_parts, start, batch.block or None)
        return GroupSums([part for _, part in stack], time.monotonic() - began, os.getpid(), len(batches))

    def _set(self, settings: Settings) -> Source:
        """The source, set as the driver's settings say."""
        self.open()
        source, held = self._source, self._settings
        assert source is not None
        if settings.number == held.number:
            return source
        own = equal_fields_of(source.model)
        if held.number == 0 and settings.identity not in (None, own):
            both = zip(EQUAL_FIELDS, settings.identity or (), own, strict=True)
            raise LayersimError(
                "`load_model` gave another model on this worker than on the first one: "
                f"{', '.join(f'{name} {b} and not {a}' for name, a, b in both if a != b)}."
            )
        if settings.stack is not None:
            source.in_stack(settings.stack)
        if settings.points is not None:
            source.read_at(settings.points)
        elif held.points is not None:
            source.read_at(source.residual_points)
        if settings.settled_on is not None and not source.is_settled:
            source.settle(settings.settled_on)
        if settings.calling != held.calling:
            self._calls.close()
            if settings.calling:
                self._calls.enter_context(source.with_calls())
        self._settings = settings
        return source


def equal_fields_of(model: Model) -> tuple[Any, ...]:
    """What is equal in all copies of one model."""
    return tuple(getattr(model, name) for name in EQUAL_FIELDS)


def _add_parts(first: PartialSums, second: PartialSums) -> PartialSums:
    """The sums of both; of none where activations of either are not finite."""
    not_finite = [a + b for a, b in zip(first.not_finite, second.not_finite, strict=True)]
    out: dict[str, Mapping[str, Tensor]] = {}
    if first.out and second.out:
        before = {name: Sums(fields) for name, fields in first.out.items()}
        own = sums_of(tuple(before), second.out, before)
        out = {name: dict((sums + own[name]).fields) for name, sums in before.items()}
    return PartialSums(first.count + second.count, not_finite, out)


def loaded(load_model: Callable[[], Any]) -> OpenedModel:
    """The model of this process, as `load_model` opens it.

    Args:
        load_model: returns the model, or an `OpenedModel`.

    Raises:
        LayersimError: the model is opened on a server, or to be compared with another one.
    """
    opened = OpenedModel.of(load_model())
    for name in ("remote", "verify"):
        if value := getattr(opened, name):
            raise LayersimError(
                f"`load_model` returns a model opened with `{name}` set to {brief(value)}; workers take `layers` and `unembed` "
                "alone."
            )
    return opened


def refuse_model(load_model: Any) -> None:
    """Refuse a model where a function that loads it is needed.

    Args:
        load_model: as a user passes it.

    Raises:
        LayersimError: it is a model.
    """
    if hasattr(load_model, "parameters") or hasattr(load_model, "trace"):
        raise LayersimError(
            f"`load_model` is {with_article(type(load_model).__name__)}; it must be a function that loads the model, which "
            "each worker loads itself."
        )
