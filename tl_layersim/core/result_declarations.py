"""Declarations of result classes: fields, figures, names in files, and provenance."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, TypeVar, dataclass_transform

import torch
from torch import Tensor

from .arguments import typed
from .errors import without_secrets

T = TypeVar("T")
Better = Literal["", "higher", "lower"]
Scale = Literal["", "log", "free"]
# Default of a tensor field that a run measures only if an option asks for it. The result then holds NaN in the field's shape.
NOT_MEASURED = torch.tensor(math.nan, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a tensor field, made by `axes`. `name` is the name in tables: `values_name` for the field `values`."""

    name: str
    axes: tuple[str, ...]
    label: str
    unit: str
    title: str
    caption: str
    better: Better
    scale: Scale
    within: tuple[float, float] | None
    by_chance: tuple[float, ...]
    certain: Callable[[Any], Tensor] | None
    units: Callable[[Any], Tensor] | None
    out_of: str
    summed: tuple[str, ...]
    drawn: str

    def total(self, result: Any) -> Tensor:
        """Total of which the field's counts are parts, in a shape that broadcasts to the field's.

        Args:
            result: the result, of all data or of a part.
        """
        parts = torch.as_tensor(getattr(result, self.out_of), dtype=torch.float64)
        if not self.summed:
            return parts.sum()
        return parts.sum([self.axes.index(axis) for axis in self.summed], keepdim=True)

    @property
    def words(self) -> str:
        """The label with its unit in brackets, as the title of a figure's axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def axes(
    *names: str,
    label: str = "",
    unit: str = "",
    title: str = "",
    caption: str = "",
    better: Better = "",
    scale: Scale = "",
    default: Any = MISSING,
    within: tuple[float, float] | None = (-math.inf, math.inf),
    by_chance: tuple[float, ...] = (),
    certain: Callable[[Any], Tensor] | None = None,
    units: Callable[[Any], Tensor] | None = None,
    out_of: str = "",
    summed: tuple[str, ...] = (),
    drawn: str = "",
) -> Any:
    """Declare a dataclass field that holds a float64 tensor over the named axes.

    The axes `row` and `column` are the residual layers of the first and the second model; `residual` are the residual layers of
    the first model. The axes `layer`, `row_block`, `column_block`, `skipped` and `affected` are blocks, one fewer than residual
    layers. Any other axis `x` takes its labels from the result's field `xs` (`batches` for `batch`). Without such a field its
    entries are numbered: `step`, `direction`, `left` and `right` from 1, others from 0.

    Args:
        *names: names of the axes, in order.
        label: the quantity in words; the default is the name of the field.
        unit: unit of the numbers, such as "nats", "radians" or "fraction".
        title: title of the figure; the default is the label. In title and caption, {values} stands for the label of `values`.
        caption: sentences that explain the figure and name its source. A report shows the fields that have one, and `values` of
            a result without any.
        better: whether "higher" or "lower" numbers are better; "" for neither.
        scale: scale of the value axis: "log" for a logarithmic axis if the values spread, "free" for an axis that need not
            start at a bound of the values.
        default: default value of the field; none by default. `NOT_MEASURED` becomes NaN in the shape of the axes.
        within: bounds of the values, such as (0, 1) for fractions; intervals stay inside them. None for a field without
            interval: what a first pass over the data determines, values of single prompts, and p-values.
        by_chance: bounds that a fraction may reach only because there are few samples, such as (0, 1) for an accuracy. At such
            a bound the interval still has a width.
        certain: for a field with `by_chance`, function of the result that returns a mask of the entries that are at a bound by
            definition, such as the last layer's agreement with itself. Their intervals have no width there.
        units: for a field with `by_chance`, function of the result that returns the number of independent units of each entry,
            if it is below the number of texts, such as the texts that are held out.
        out_of: for counts, which grow with the data, the attribute whose sum is the total of the counts, such as the field
            itself. The interval is the total times the interval of the fraction.
        summed: axes of that attribute over which a total is summed, such as "layer" if each threshold has a total of its own;
            all axes by default.
        drawn: kind of figure, if it is not the default (a heat map over two axes, lines over one): "bars"; "fractions", a heat
            map of each row divided by its sum; "lines" over the last of several axes; "tokens" and "paths" of one prompt; or
            the name of another field, over which the values are drawn.
    """
    declared = Declaration(
        name="",
        axes=names,
        label=label,
        unit=unit,
        title=title,
        caption=caption,
        better=better,
        scale=scale,
        within=within,
        by_chance=by_chance,
        certain=certain,
        units=units,
        out_of=out_of,
        summed=summed,
        drawn=drawn,
    )
    return field(default=default, metadata={"declared": declared})


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(axes, field))
def result_class(cls: type[T]) -> type[T]:
    """Decorator that makes a class a frozen dataclass, with keyword arguments whose types are checked."""
    return typed(dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls))


def declarations(result: Any) -> Mapping[str, Declaration]:
    """The declarations of a result's tensor fields, by field. Names in tables and default labels and titles are filled in.

    Args:
        result: a result or its class.
    """
    return _declarations_of_class(result if isinstance(result, type) else type(result))


@cache
def _declarations_of_class(cls: Any) -> Mapping[str, Declaration]:
    labelled: dict[str, Declaration] = {}
    for class_field in fields(cls):
        if "declared" not in class_field.metadata:
            continue
        declared = class_field.metadata["declared"]
        name = cls.values_name if class_field.name == "values" else class_field.name
        label = declared.label or name.replace("_", " ").capitalize()
        labelled[class_field.name] = replace(declared, name=name, label=label)
    values = labelled["values"].label if "values" in labelled else ""
    titled = {}
    for attribute, declared in labelled.items():
        title = (declared.title or declared.label).replace("{values}", values)
        titled[attribute] = replace(declared, title=title, caption=declared.caption.replace("{values}", values))
    return titled


class ValuesAlias:
    """Attribute that returns the field `values` under another name, as in `norm = ValuesAlias()`.

    The column in tables has this name too.
    """

    def __set_name__(self, owner: Any, name: str) -> None:
        owner.values_name = name

    def __get__(self, result: Any, owner: Any = None) -> Any:
        # Of a class, the alias itself.
        return self if result is None else result.values


def last_entry(result: Any) -> Tensor:
    """Mask of the last layer in a field over blocks, which agrees with itself by definition (`layer`)."""
    blocks = len(result.layers) - 1
    return torch.arange(blocks) == blocks - 1


def texts_of_part(result: Any, samples: Tensor, total: Tensor) -> Tensor:
    """Number of texts that a part of a result's samples stands for, if all texts have equally many; at most the samples.

    Args:
        result: the result.
        samples: number of samples in the part, such as those that are held out.
        total: number of samples in all parts.
    """
    return samples.minimum(result.provenance.texts * samples / total)


def without_nan(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Headline numbers as floats; NaN is left out."""
    return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


PACKAGE = __name__.partition(".")[0]
# Later packages whose modules define results.
DEFINE_RESULTS = ("many", "prompts", "vision", "stitching", "training")


def kind_of(cls: type[Any]) -> str:
    """Name of a result class in files, such as "exit_curve" for `ExitCurveResult`.

    It is `file_kind` if the class sets it. A class of another package has its module and name.
    """
    kind = vars(cls).get("file_kind")
    if kind:
        return str(kind)
    if not cls.__module__.startswith(f"{PACKAGE}."):
        return f"{cls.__module__}:{cls.__qualname__}"
    # Between the words of the class's name, such as LogitLens or CKAResult.
    word_ends = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(word_ends, "_", cls.__name__.removesuffix("Result")).lower()


def class_of(kind: str, base: type[Any]) -> type[Any] | None:
    """Result class whose name in files is `kind`; None if no imported module defines it.

    This package and installed analyzers are imported first, if needed. A file never says what is imported.

    Args:
        kind: name of the class in files, as `kind_of` returns it.
        base: the class `Result`.
    """
    cls = _imported_class(kind, base)
    if cls is None:
        _import_all()
        cls = _imported_class(kind, base)
    return cls


def _imported_class(kind: str, base: type[Any]) -> type[Any] | None:
    classes = [cls for cls in below(base) if kind_of(cls) == kind]
    of_this_package = [cls for cls in classes if cls.__module__.startswith(f"{PACKAGE}.")]
    if of_this_package:
        return of_this_package[0]
    # A cell of a notebook that ran twice defines a class twice; the last one counts.
    return classes[-1] if classes else None


def _import_all() -> None:
    """Import every module that may define a result, of this package and of installed analyzers."""
    importlib.import_module(f"{PACKAGE}.analyzers").find_analyzers()
    for name in DEFINE_RESULTS:
        package = importlib.import_module(f"{PACKAGE}.{name}")
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(info.name)


def below(cls: type[Any]) -> Iterator[type[Any]]:
    """All imported subclasses, direct and indirect."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from below(subclass)


# Fields that describe a model; those of several models are joined.
OF_MODELS = ("model", "config_hash", "weights_hash", "changes", "source", "basis", "dtype", "attention")
# Fields that are empty for some models.
OF_SOME = ("changes", "attention")
JOINT = " | "


@typed
@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The model, data, options and versions of a run. Several models are written as "first | second".

    Attributes:
        model: name or path of the model as it was loaded.
        config_hash: first 12 hex digits of the SHA-256 of the model's configuration.
        weights_hash: checksum of all bytes of the model's parameters and buffers, and of its modules' classes, settings and
            users' code, 12 hex digits; empty if the weights are in another process, or divided over processes.
        changes: hooks on the model's modules that this package did not register, replaced forward methods, and nnsight edits,
            each with its place, the function's name, and a digest of code and captured values; empty if there are none.
        source: class of the model, such as `HookedTransformer` or `TransformersModel (remote='local')`.
        basis: basis of the residual stream (raw weights, folded norms, ...). The final norm is never applied.
        dtype: dtype of the model's activations.
        attention: width of an attention head, and number of its dimensions with rotary embeddings, such as
            "d_head 80, rotary_dim 20"; empty if the model's configuration does not have them.
        data: SHA-256 of the tokens and their attention mask, row by row.
        tokens: number of counted positions.
        sequences: number of rows of tokens.
        texts: number of texts that these rows belong to; rows that are cut from one text, or have one group, are one text.
        batches: number of forward passes.
        seed: seed of random draws; None if there are none.
        options: options of the analyzer and of the data (`seq_len`, `pack`, `skip_first`, `batch_size`, ...).
        versions: versions of the packages that the numbers depend on.
        seconds: wall time of the whole run.
        warnings: warnings that were issued while the result was computed.
    """

    model: str
    config_hash: str
    weights_hash: str
    source: str
    basis: str
    dtype: str
    data: str
    tokens: int
    sequences: int
    batches: int
    seed: int | None
    options: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    warnings: tuple[str, ...] = ()
    changes: str = ""
    attention: str = ""
    texts: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", without_secrets(self.model))
        # Where texts are not counted, each row is one.
        object.__setattr__(self, "texts", self.texts or self.sequences)

    @property
    def rows_in_words(self) -> str:
        """Number of rows, and of the texts that they are cut from. Units of packed rows are no texts of the data."""
        if self.options.get("pack"):
            return f"{self.sequences:,} rows (packed)"
        if self.texts < self.sequences:
            return f"{self.sequences:,} rows of {self.texts:,} texts"
        return f"{self.sequences:,} rows"

    def swapped(self) -> Provenance:
        """The provenance with the two models swapped."""
        swapped: dict[str, Any] = {}
        for name in OF_MODELS:
            texts = getattr(self, name).split(JOINT)
            # A text without `JOINT` stays as it is.
            middle = len(texts) // 2
            swapped[name] = JOINT.join(texts[middle:] + texts[:middle])
        return replace(self, **swapped)
