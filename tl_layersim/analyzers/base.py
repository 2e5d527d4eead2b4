"""Analyzer: a kernel that turns a view into sums, and a result computed from the sums."""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any, ClassVar

from torch import Tensor

from ..core.code_digest import called_by, codes_in, plain_constants
from ..core.errors import LayersimError, LayersimWarning
from ..core.provenance import Provenance
from ..core.results import Result
from ..core.sums import Sums
from ..core.typed import named
from ..data.batches import Batch
from ..models.layout import classes_with_head
from ..models.model_info import Model
from ..models.unembed import Head
from ..models.validation import need_stream
from ..models.view import Kernel


@named
@dataclass(frozen=True)
class Run:
    """What `compute` may know of the run: the residual layers, and the record that goes into the result.

    Attributes:
        layers: residual layer names of the (first) model.
        column_layers: those of the second model, or the same again.
        provenance: to be stored in the result.
        first: the sums of the first pass, empty where there was none.
        head: what stands between the last block and the logits, None where that is not known.
        stream: of the (first) model, see `Model`.
    """

    layers: tuple[str, ...]
    column_layers: tuple[str, ...]
    provenance: Provenance
    first: Sums
    head: Head | None = None
    stream: str = "whole"


@named
@dataclass(frozen=True)
class Exchange:
    """How two models that are in different places are related: each gives something small, and the two are joined here.

    Attributes:
        kernel: takes the view of one model and gives what crosses, which may depend on the batch.
        join: takes what both gave on one batch and gives what the analyzer's kernel gives on both views.
        size: bytes that cross from one model: of a batch of so many counted tokens, in so many rows, and of so many layers.
    """

    kernel: Kernel
    join: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
    size: Callable[[int, int, int], int]


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
        first_without_model: whether that first pass reads tokens and labels only, so that the model need not run.
        needs_unembed: whether its kernel calls `view.unembed`; the lens is then checked against the model's logits first.
        needs_stream: whether its layers must be the residual stream, and not what other modules give.
        needs_every_block: whether no block may be left out between these layers.
        needs_calls: whether its kernel calls blocks again, through `view.calls`.
        prompts: whether each row has to be a text of its own, so that packed rows are refused.
    """

    name: ClassVar[str]
    compares: ClassVar[bool] = False
    one_pass: ClassVar[str] = ""
    first_without_model: ClassVar[bool] = False
    needs_unembed: ClassVar[bool] = False
    needs_stream: ClassVar[bool] = False
    needs_every_block: ClassVar[bool] = False
    needs_calls: ClassVar[bool] = False
    prompts: ClassVar[bool] = False

    @property
    def whole_rows(self) -> bool:
        """Whether samples are rows, which single steps of cached generation are not."""
        return False

    @property
    def label_source(self) -> str:
        """Where it has labels from: "" for nowhere, "data" for a column of the data, "rows" for a table by row of the data."""
        return ""

    def first_kernel(self) -> Kernel | None:
        """The kernel of a first pass over the same data, where the main one needs its sums; None where one pass will do."""
        return None

    @abstractmethod
    def kernel(self, first: Sums) -> Kernel:
        """The kernel of the main pass. `first` holds the sums of the first pass, empty where there was none."""

    def exchange(self) -> Exchange | None:
        """For an analyzer that compares: how, where the two models are in different places; None where it cannot."""
        return None

    @abstractmethod
    def compute(self, sums: Sums, run: Run) -> Result:
        """The result that the sums of all batches give.

        Raises:
            LayersimError: there are too few tokens for the statistic, or it is not defined on them.
        """

    def check_sites(self, *models: Model) -> None:
        """Refuse models whose layers are other sites than it needs.

        Raises:
            LayersimError: with the modules that are no blocks.
        """
        for model in models:
            if self.needs_stream or self.needs_every_block:
                need_stream(model, type(self).__name__, parts=not self.needs_every_block)

    def check(self, *models: Model) -> None:  # noqa: B027 (most analyzers have nothing to refuse)
        """Refuse, before anything runs, what cannot be done on these models.

        Raises:
            LayersimError: with the setting to change.
        """

    def cost(self, model: Model) -> str:
        """A sentence on what it asks beyond forward passes, said before a run; "" where that is nothing to speak of."""
        return ""

    def check_batch(self, batch: Batch, model: Model) -> None:  # noqa: B027 (most analyzers have nothing to refuse)
        """Refuse, before the model runs on it, a batch that lacks what the analyzer needs.

        Raises:
            LayersimError: with what the data should have.
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


def code_digest(analyzer: Analyzer) -> str:
    """12 hex digits of the code of an analyzer that is not of this package, and of what it calls in its own module.

    Sums of two kernels must not meet; for the analyzers of this package its version says which they are.
    """
    cls = type(analyzer)
    if cls.__module__.split(".")[0] == __name__.split(".")[0]:
        return ""
    starts = [item for item in vars(cls).values() if isinstance(item, FunctionType)]
    seen = {code.co_qualname: code for function in called_by(starts) for code in codes_in(function.__code__)}
    digest = hashlib.sha256()
    for name, code in sorted(seen.items()):
        digest.update(repr((name, code.co_code, code.co_names, plain_constants(code))).encode())
    return digest.hexdigest()[:12]


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


@named
def need_tokens(given: int, needed: int, analyzer: str, unit: str = "tokens") -> None:
    """Refuse a statistic that so few samples do not define."""
    if given < needed:
        raise LayersimError(
            f"{analyzer} is not defined on so few {unit}.",
            given=f"{given} {unit}",
            expected=f"at least {needed} {unit}",
            do="pass more data, a larger max_tokens=, or a smaller skip_first=",
        )


@named
def need_head(model: Model, analyzer: str, *, targets: bool = False, own_labels: bool = False) -> None:
    """Refuse a model that has nothing to read logits with, or one whose logits are no answer to the labels.

    Args:
        model: what is known of it.
        analyzer: its name, for the message.
        targets: whether what the layers say is compared with what they should say.
        own_labels: whether that is labels, and not the next token.
    """
    if model.head is None:
        raise LayersimError(
            f"{analyzer} needs an unembedding, and this model has none that is known.",
            given=f"{model.name} ({model.source})",
            expected="a model with a final norm and a head that gives logits",
            do=f"load it by {classes_with_head(model.source)}; or unembed=['path.of.final_norm', 'path.of.head']",
        )
    if targets and not own_labels and "MaskedLM" in model.source:
        warnings.warn(
            f"{model.name} was trained to say the token at a masked position, not the next one, and it has seen the next one. "
            f"{analyzer}(labels=...) takes what it should say.",
            LayersimWarning,
            stacklevel=2,
        )
    if targets and not own_labels and model.head.reads != "every":
        raise LayersimError(
            f"The head of {model.name} classifies whole rows, so it has no next token to say.",
            given="labels='next_token'",
            expected="a class for each row",
            do=f"{analyzer}(labels='data'), with a column `label` beside the texts; or {analyzer}(labels=tensor)",
        )


def check_memory(lens_memory_mb: float) -> None:
    """Refuse a budget that is none."""
    if not 0 < lens_memory_mb < float("inf"):
        raise LayersimError(
            "Logits need some memory.",
            given=f"lens_memory_mb={lens_memory_mb}",
            expected="megabytes, above 0",
            do="lens_memory_mb=128",
        )


__all__ = ["Analyzer", "Exchange", "Kernel", "Run", "need_head", "need_tokens"]
