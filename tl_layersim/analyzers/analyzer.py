"""`Analyzer`: base class of all measures. A kernel turns a view into sums, and `compute` turns the sums into a result."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from importlib.metadata import entry_points
from itertools import combinations_with_replacement, product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel, PoolKernel
from ..activations.view import Kernel
from ..architectures.layouts import NO_HEAD
from ..architectures.output_heads import CLASSES_WITH_HEAD
from ..architectures.unembed import Head
from ..core import LayersimError, Provenance, Result, Sums, typed, warn
from ..core.code_digests import ObjectTexts, ValueNames, named_function
from ..core.registry import Registry
from ..core.sums import need_memory
from ..core.tensor_digests import digest_of_tensor
from ..core.wording import brief
from ..data.batches import Batch
from ..data.labels import as_labels, label_source
from ..data.positions import PositionRule
from ..lens.exit_heads import ExitHeads
from ..lens.targets import check_batch_labels
from ..sources.activation_checks import need_equal_width, need_stream
from ..sources.model_description import ModelDescription
from ._samples import samples
from .needs import Needs

JIANG = "(Jiang, Zhou and Zhu 2024, {})."
AUBRY = "(Aubry et al. 2025, {})."
CSORDAS = "(Csordás, Manning and Potts 2025, {})."


@dataclass(frozen=True)
class Run:
    """Models and provenance of a finished run, for `Analyzer.compute`.

    Attributes:
        models: the model, or all models that are compared, each with the sites that were read.
        provenance: provenance of the result.
        first: sums of the first pass, empty without one.
    """

    models: tuple[ModelDescription, ...]
    provenance: Provenance
    first: Sums = Sums()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the sites of the first model."""
        return self.models[0].layers

    @property
    def column_layers(self) -> tuple[str, ...]:
        """Names of the sites of the second model; with one model, `layers` again."""
        return self.models[-1].layers

    @property
    def head(self) -> Head | None:
        """Final norm and unembedding of the first model; None if the model has none, or they are not known."""
        return self.models[0].head


@dataclass(frozen=True)
class Exchange:
    """Functions that compute small statistics of each model, and compare two models by them instead of by activations.

    Models on different machines are compared in this way, and many models of which each runs once a batch.

    Attributes:
        kernel: kernel that returns the statistics of one model on a pool; these are transferred.
        join: function that takes the prepared statistics of two models on one pool, and returns the output of the analyzer's
            kernel on both models.
        size: function that gives the bytes of one model's statistics from the rows of a batch, the mean number of counted
            positions of a row, and the number of layers.
        prepare: function that prepares the statistics of one model for `join`. It is called once for each model and pool, not
            for each comparison.
    """

    kernel: PoolKernel
    join: Callable[..., dict[str, Tensor]]
    size: Callable[[int, float, int], int]
    prepare: Callable[[Mapping[str, Tensor]], Any]


class Analyzer(ABC):
    """Base class of all measures of how layers relate. Subclasses are frozen dataclasses; their fields are the options.

    Data flows one way. `kernel` returns a function of a `View` that returns a few small tensors; these are added over
    batches; `compute` returns the result of the sums. A kernel is a module-level function, with `functools.partial` for
    options. It uses torch and plain helper functions and has no state, because it may run on a server without tl_layersim.

    Class attributes:
        - `name`: key in a report and on the command line.
        - `needs`: what the analyzer reads, and what it asks of models and data, see `Needs`. A property if options decide.
    """

    name: ClassVar[str]

    @property
    def needs(self) -> Needs:
        """What the analyzer reads, and what it asks of models and data."""
        return Needs()

    def settled(self, model: ModelDescription, positions: PositionRule | None) -> Analyzer:
        """Return this analyzer with its model-dependent options filled in.

        Args:
            model: the model, with the sites of this analyzer.
            positions: the option `positions`, as the user gave it.
        """
        return self

    def first_kernel(self) -> Kernel | None:
        """Kernel of a first pass over the data, whose sums the main kernel needs; None if one pass is enough."""
        return None

    @abstractmethod
    def kernel(self, first: Sums) -> AnyKernel:
        """Kernel of the main pass: a function from the activations of a batch to tensors that are summed.

        A measure over pairs of samples returns a `PoolKernel` instead.

        Args:
            first: sums of the first pass, empty without one.
        """

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        """Second kernel of the main pass, such as that of a permutation null; None if not needed. The sums of both are joined.

        Args:
            first: sums of the first pass, empty without one.
        """
        return None

    def pool_need(self, density: float) -> int:
        """Number of rows to collect, from which a `PoolKernel` draws its samples; 0 without a `PoolKernel`.

        Args:
            density: mean number of counted positions of a row.
        """
        return 0

    def exchange(self) -> Exchange | None:
        """Functions that compare two models by small statistics of each; None if activations of both are needed."""
        return None

    @abstractmethod
    def compute(self, sums: Sums, run: Run) -> Result:
        """Compute the result from the sums.

        Args:
            sums: sums over all batches.
            run: the finished run.

        Raises:
            LayersimError: the statistic is not defined on the data, for example because there are too few tokens.
        """

    def check_sites(self, *models: ModelDescription) -> None:
        """Raise an error if this analyzer cannot read the sites of a model.

        Args:
            *models: one model; two models to compare; or more, to compare all pairs of.

        Raises:
            LayersimError: names the modules that are not blocks.
        """
        if self.needs.models == "two" and len(models) == 1:
            raise LayersimError(
                f"{type(self).__name__} compares two models, but only {models[0].name} is given. Use compare(model_a, model_b, "
                f"data, {type(self).__name__}())."
            )
        for model in models:
            if self.needs.residual_stream:
                need_stream(model, type(self).__name__, parts=self.needs.sites == "stream")
            if self.needs.sites == "equal_width":
                need_equal_width(model, type(self).__name__)
        # The sums of the batch, the running sums, and the new sums while the two are added.
        gigabytes = 3 * 8 * self.sum_numbers(*models) / 1e9
        if gigabytes:
            remedy = "Fewer sites (at=) take less."
            if getattr(self, "permutations", 0):
                remedy = "Fewer sites (at=) or permutations take less."
            need_memory(f"The sums of {type(self).__name__}", gigabytes, getattr(self, "max_memory_gb", math.inf), remedy)

    def sum_numbers(self, *models: ModelDescription) -> float:
        """Number of float64 values in the sums, for `max_memory_gb`; 0 if few or not known.

        Args:
            *models: one model; two models to compare; or more, to compare all pairs of.
        """
        return 0

    def check(self, *models: ModelDescription) -> None:  # noqa: B027 (most analyzers have nothing to refuse)
        """Raise an error before the run if the options do not fit the models.

        Args:
            *models: one model; two models to compare; or more, to compare all pairs of.

        Raises:
            LayersimError: names the setting to change.
        """

    def compute_seconds(self, model: ModelDescription) -> float:
        """Seconds that `compute` takes on one core; 0 if few.

        With intervals, `compute` is called for each block of rows.

        Args:
            model: the model to be analyzed.
        """
        return 0.0

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:  # noqa: B027 (most analyzers have nothing to refuse)
        """Raise an error before the model runs if a batch lacks inputs that this analyzer needs.

        Args:
            batch: a batch of the data.
            model: the model to be analyzed.

        Raises:
            LayersimError: names the missing input.
        """

    def options(self) -> dict[str, Any]:
        """The options as plain data, for the result's provenance. Tensors, heads and functions are replaced by a digest.

        Raises:
            LayersimError: an option has a type that cannot be written to a file.
        """
        options = {}
        for option in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            # A field that is no argument holds data of a run.
            if option.init:
                options[option.name] = _plain(option.name, getattr(self, option.name))
        return options

    @classmethod
    def summary(cls) -> str:
        """First line of the class's docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]


class LabelledAnalyzer(Analyzer):
    """Base class of analyzers with the option `labels`: targets of predictions, or classes of samples."""

    optional_labels: ClassVar[bool] = False

    labels: Any = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.read_labels())

    def read_labels(self) -> str | Tensor:
        """Check the user's labels and return them."""
        return as_labels(self.labels, optional=self.optional_labels)

    @property
    def needs(self) -> Needs:
        return Needs(labels=label_source(self.labels))

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        check_batch_labels(self.labels, batch, model if self.needs.unembeds else None)


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class SampleAnalyzer(Analyzer):
    """Base class of analyzers with the options `level` and `pool`: a sample is the vector of a token, or of a row of tokens.

    Args:
        level: "token" takes each token as a sample; "sequence" takes each row of tokens as one.
        pool: for level="sequence", the "mean" of the row's counted tokens, its "last" or its "first" token, such as [CLS].
    """

    level: Literal["token", "sequence"] = "token"
    pool: Literal["mean", "last", "first"] = "mean"

    @property
    def needs(self) -> Needs:
        return Needs(whole_rows=self.level == "sequence")

    @property
    def sample_word(self) -> str:
        """The word for samples in messages: "tokens" or "sequences"."""
        return "tokens" if self.level == "token" else "sequences"

    @property
    def read(self) -> partial[Tensor]:
        """Function that returns the samples (`site sample width`) from the activations of a batch (a `View`)."""
        return partial(samples, level=self.level, pool=self.pool)


def compared(models: Sequence[ModelDescription], symmetric: bool = True) -> list[tuple[ModelDescription, ModelDescription]]:
    """The pairs of models to compare. One model is paired with itself; more than two models give all pairs.

    Args:
        models: one model; two models to compare; or more, to compare all pairs of.
        symmetric: whether each pair is compared in one order only.
    """
    if len(models) > 2:
        return [*combinations_with_replacement(models, 2)] if symmetric else [*product(models, models)]
    return [(models[0], models[-1])]


def listed(names: Iterable[str]) -> str:
    """The first four names as text, with "and others" if there are more.

    Args:
        names: all names.

    Examples:
        >>> listed("abcde")
        'a, b, c, d and others'
    """
    names = list(names)
    return ", ".join(names[:4]) + (" and others" if len(names) > 4 else "")


def sites_where(sites: Sequence[str], chosen: Tensor) -> str:
    """Names of the first four sites at which `chosen` is True, as text; "" if there are none.

    Args:
        sites: all sites.
        chosen: `site`.
    """
    return listed(name for name, is_chosen in zip(sites, chosen, strict=True) if is_chosen)


def omitted_at(sites: Sequence[str], omitted: Tensor, total: int | Tensor) -> str:
    """Text with the number of omitted samples at each site, such as "blocks.0: 3 of 90"; "" if none are omitted.

    It names the first four sites with omitted samples.

    Args:
        sites: all sites.
        omitted: `site`, number of omitted samples.
        total: `site`, number of all samples; or a single number for all sites.
    """
    totals = torch.as_tensor(total).expand(len(sites))
    return listed(
        f"{name}: {int(count)} of {int(site_total)}"
        for name, count, site_total in zip(sites, omitted, totals, strict=True)
        if count
    )


def refuse_undefined(measure: str, sides: Iterable[tuple[tuple[str, ...], Tensor]], reason: str) -> None:
    """Warn of sites at which a measure is not defined; raise an error if no row site or no column site is left.

    Args:
        measure: name of the measure.
        sides: for the rows and the columns: names of the sites, and whether the measure is defined at each.
        reason: the reason, which holds at all these sites.

    Raises:
        LayersimError: no site of a side is defined.
    """
    sides = list(sides)
    # A site of one model is a row and a column, but named once. A dict keeps the order.
    undefined_sites: dict[str, None] = {}
    for names, defined in sides:
        for name, is_defined in zip(names, defined, strict=True):
            if not is_defined:
                undefined_sites[name] = None
    if not all(bool(defined.any()) for _, defined in sides):
        raise LayersimError(f"{measure} is not defined at any site ({listed(undefined_sites)}): {reason}.")
    if undefined_sites:
        warn(f"{measure} is not defined at {listed(undefined_sites)}, and NaN there: {reason}.")


def code_digest(analyzer: Analyzer) -> str:
    """Digest of the code of an analyzer's class and of the functions that it calls, with the values that the code reads.

    Sums of different kernels must not be added. Analyzers of this package are identified by its version instead.

    Args:
        analyzer: an analyzer of this package or a user's own.

    Returns:
        The digest, 12 hex digits; "" for an analyzer of this package.
    """
    cls = type(analyzer)
    if cls.__module__.split(".")[0] == __name__.split(".")[0]:
        return ""
    text = f"{ObjectTexts(ValueNames()).class_text(cls)} {analyzer.needs}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(option: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)} sha256 {digest_of_tensor(value).hex()[:12]}"
    if isinstance(value, ExitHeads):
        return str(value)
    if callable(value):
        return named_function(value)
    if isinstance(value, list | tuple):
        return [_plain(option, item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise LayersimError(
        f"`{option}` is {brief(value)}; it must be text, a number, a tensor, a function, None, or a list or tuple of these."
    )


def need_tokens(given: int, needed: int, analyzer: str, unit: str = "tokens") -> None:
    """Raise an error if there are too few samples for a statistic.

    Args:
        given: number of samples.
        needed: smallest number of samples that the statistic needs.
        analyzer: name of the analyzer, for the message.
        unit: the word for samples, for the message.

    Raises:
        LayersimError: there are too few samples.
    """
    if given < needed:
        raise LayersimError(f"{analyzer} needs {needed} or more {unit}; the data has {given}.")


@typed
def find_analyzers() -> dict[str, type[Analyzer]]:
    """Analyzers that a name selects, from this package and from entry points of installed packages.

    Their options have defaults. `Similarity`, whose function has none, is not among them.

    Examples:
        >>> sorted(find_analyzers())[:2]
        ['block_coupling', 'cca']
    """
    package = __name__.rpartition(".")[0]
    analyzers = {}
    for name, cls in Registry(package, Analyzer, "analyzers").all().items():
        if not any(_is_required(option) for option in fields(cls)):  # type: ignore[arg-type]  # subclasses are dataclasses
            analyzers[name] = cls
    for entry in entry_points(group=package):
        try:
            cls = entry.load()
        except Exception as error:  # an error in another package must not break this one
            warn(f"The analyzer {entry.name!r} of {entry.value!r} could not be loaded: {error}")
            continue
        analyzers.setdefault(cls.name, cls)
    return analyzers


def _is_required(option: Field[Any]) -> bool:
    return option.default is MISSING and option.default_factory is MISSING


def need_head(model: ModelDescription, analyzer: str, *, targets: bool = False, own_labels: bool = False) -> None:
    """Raise an error if a model has no known unembedding, or if its head cannot predict the targets.

    Args:
        model: the model to be analyzed.
        analyzer: name of the analyzer, for the message.
        targets: whether predictions are compared with targets.
        own_labels: whether the targets are labels instead of next tokens.

    Raises:
        LayersimError: the unembedding is not known, or the head classifies rows and the targets are next tokens.
    """
    if model.head is None:
        reason = NO_HEAD.get(model.source)
        raise LayersimError(
            f"{analyzer} needs an unembedding, but none is known for {model.name} ({model.source}): "
            f"{reason or f'load it by {CLASSES_WITH_HEAD}, or name its norm and head in unembed= of open_model'}."
        )
    if targets and not own_labels and "MaskedLM" in model.source:
        warn(
            f"The targets of {analyzer} are next tokens, but {model.name} is a masked language model, whose input contains "
            "them. Pass other targets (labels=)."
        )
    if targets and not own_labels and model.head.reads != "every":
        raise LayersimError(
            f"The head of {model.name} classifies whole rows, so it does not predict a next token. {analyzer}(labels='data') "
            "reads classes from a column `label` beside the texts."
        )
