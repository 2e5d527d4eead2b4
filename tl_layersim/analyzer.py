"""Analyzer: a kernel that turns a view into sums, and what the sums mean."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from .errors import LayersimError
from .results import Provenance, Result
from .source import Kernel, Model
from .sums import Sums


@dataclass(frozen=True)
class Run:
    """What `compute` may know of the run: the residual layers, and the record that goes into the result.

    Attributes:
        layers: residual layer names of the (first) model.
        column_layers: those of the second model, or the same again.
        provenance: to be stored in the result.
        first: the sums of the first pass, empty where there was none.
    """

    layers: tuple[str, ...]
    column_layers: tuple[str, ...]
    provenance: Provenance
    first: Sums


class Analyzer(ABC):
    """A measure of how layers relate. Subclasses are frozen dataclasses; their fields are the options.

    The data flow is one way: `kernel` returns a function of a `View` that gives a few small tensors; these are added up
    over batches; `compute` makes the result from the sums. A kernel is a module-level function (with
    `functools.partial` for options), uses torch and nothing else of this package but plain helpers of its own file, and
    keeps no state: it may run on a server that has never heard of tl_layersim.

    Class attributes:
        name: key in a report and on the command line.
        compares: whether its kernel also takes two views of the same tokens, from two models.
        one_pass: for an analyzer with a first pass, the call that asks for a variant without it.
    """

    name: ClassVar[str]
    compares: ClassVar[bool] = False
    one_pass: ClassVar[str] = ""

    @property
    def whole_rows(self) -> bool:
        """Whether samples are rows, which single steps of cached generation are not."""
        return False

    def first_kernel(self) -> Kernel | None:
        """The kernel of a first pass over the same data, where the main one needs its sums; None where one pass will do."""
        return None

    @abstractmethod
    def kernel(self, first: Sums) -> Kernel:
        """The kernel of the main pass. `first` holds the sums of the first pass, empty where there was none."""

    @abstractmethod
    def compute(self, sums: Sums, run: Run) -> Result:
        """The result that the sums of all batches give.

        Raises:
            LayersimError: there are too few tokens for the statistic, or it is not defined on them.
        """

    def check(self, *models: Model) -> None:  # noqa: B027 (most analyzers have nothing to refuse)
        """Refuse, before anything runs, what cannot be done on these models.

        Raises:
            LayersimError: with the setting to change.
        """

    def options(self) -> dict[str, Any]:
        """The options as plain data for the result's provenance; tensors become a digest.

        Raises:
            LayersimError: an option is of a kind that no file can keep.
        """
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses

    @classmethod
    def summary(cls) -> str:
        """The first line of the class's docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]
        return f"tensor {tuple(value.shape)} sha256 {digest}"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise LayersimError(
        "An option cannot be recorded in the result.",
        given=f"{value!r}, a {type(value).__name__}",
        expected="text, a number, a tensor, None, or a list or tuple of these",
        do="int(value) or float(value) for NumPy's numbers, sorted(value) for a set",
    )


def need_tokens(given: int, needed: int, analyzer: str, unit: str = "tokens") -> None:
    """Refuse a statistic that so few samples do not define."""
    if given < needed:
        raise LayersimError(
            f"{analyzer} is not defined on so few {unit}.",
            given=f"{given} {unit}",
            expected=f"at least {needed} {unit}",
            do="pass more data, a larger max_tokens=, or a smaller skip_first=",
        )


__all__ = ["Analyzer", "Kernel", "Run", "need_tokens"]
