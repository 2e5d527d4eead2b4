"""Declarations of the tensor fields of results: their axes, label, unit and bounds, and how reports show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

Better = Literal["", "higher", "lower"]
Scale = Literal["", "log", "free"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a tensor field; see `axes`. Its `name` is that in tables: `values_name` for `values`."""

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
    out_of: str
    drawn: str

    @property
    def words(self) -> str:
        """The label with its unit in brackets, for an axis of a figure."""
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
    out_of: str = "",
    drawn: str = "",
) -> Any:
    """Declare a dataclass field that holds a float64 tensor over the named axes.

    The axes `row` and `column` are the residual layers of the first and second model, `residual` those of the first model.
    The axes `layer`, `row_block`, `column_block`, `skipped` and `affected` are its blocks, one fewer than residual layers. Any
    other axis `x` takes its labels from the result's field `xs` (`batches` for `batch`).

    Args:
        *names: of the axes, in order.
        label: the quantity in words; by default the name of the field.
        unit: of the numbers, such as "nats", "radians" or "fraction".
        title: of the figure; by default the label. In it and in the caption, {values} stands for the label of `values`.
        caption: sentences that explain the figure and name its source. A report shows the fields that have one, and `values` of
            a result without any.
        better: whether "higher" or "lower" numbers are better; "" for neither.
        scale: of the axis of curves: "log" for a logarithmic axis if the values spread, "free" for an axis that need not begin
            at a bound of the values.
        default: of the field; none by default.
        within: the bounds that no value of the field can exceed, such as (0, 1) for fractions; intervals keep to them.
            None for a field without interval: what a first pass over the data determines, values of single prompts, draws of
            a null, and p-values.
        by_chance: the bounds at which a fraction may be because of few samples, not by definition, such as (0, 1) for an
            accuracy. Its interval there has a width.
        out_of: for counts, which grow with the data, the attribute whose sum they are counted out of, such as the field
            itself. The interval of a count is that of its fraction.
        drawn: how its figure differs from a heat map over two axes and lines over one: "bars"; "fractions", a heat map of each
            row divided by its sum; "lines" over the last of several axes; "tokens" and "paths" of one prompt; or the name of
            another field, over which the values are drawn.
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
        out_of=out_of,
        drawn=drawn,
    )
    return field(default=default, metadata={"declared": declared})


def declarations(result: Any) -> Mapping[str, Declaration]:
    """The declaration of each tensor field, with its name in tables and the defaults of its label and title.

    Args:
        result: a result or its class.
    """
    return _of_class(result if isinstance(result, type) else type(result))


@cache
def _of_class(cls: Any) -> Mapping[str, Declaration]:
    found: dict[str, Declaration] = {}
    for one in fields(cls):
        if "declared" in one.metadata:
            own, name = one.metadata["declared"], cls.values_name if one.name == "values" else one.name
            found[one.name] = replace(own, name=name, label=own.label or name.replace("_", " ").capitalize())
    values = found["values"].label if "values" in found else ""
    return {
        name: replace(
            own, title=(own.title or own.label).replace("{values}", values), caption=own.caption.replace("{values}", values)
        )
        for name, own in found.items()
    }
