"""Warnings of runs whose numbers a few tokens or one dimension decide, because their activations are far larger than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..analyzers.base import Analyzer
from ..core.errors import warn
from ..core.findings import site_in_words
from ..core.sums import SIZES, Sums
from ..models.activation_sizes import FIRST
from ..models.model_info import Model

# docs/traps.md has the measurements behind both.
LEAST_EFFECTIVE_FRACTION = 0.2
LARGEST_DIMENSION = 0.5
# Fewer tokens scatter by themselves.
LEAST_TOKENS = 200


def warn_of_sizes(
    analyzers: Mapping[str, Analyzer],
    models_of: Mapping[str, Sequence[Model]],
    sums: Mapping[str, Sums],
    options: Mapping[str, Any],
) -> dict[str, list[str]]:
    """Warn once of tokens and of dimensions that are much larger than all others; return the warnings by analyzer.

    Args:
        analyzers: by name.
        models_of: by analyzer, the models with the sites that it read.
        sums: of the main pass.
        options: how the data was read.
    """
    said: dict[str, list[str]] = {name: [] for name in analyzers}
    found: dict[str, list[str]] = {}
    for name, analyzer in analyzers.items():
        own = sums.get(SIZES + name, Sums())
        for what in analyzer.weighs if own else ():
            if what == "samples" and analyzer.whole_rows:
                continue
            text = _samples(own, models_of[name], options) if what == "samples" else _dimension(own, models_of[name], what)
            if text:
                found.setdefault(text, []).append(name)
    for text, names in found.items():
        warning = f"{', '.join(names)}: {text}"
        warn(warning)
        for name in names:
            said[name].append(warning)
    return said


def effective_fraction(sums: Sums, number: int, start: int) -> Tensor:
    """Samples of equal size that would carry as much, as a fraction of all from a position on, `site`; NaN without samples.

    (sum |x|^2)^2 / (n sum |x|^4).

    Args:
        sums: of `activation_sizes`.
        number: of the model.
        start: the first position that is counted.
    """
    second, fourth = (sums[f"{number} norm^{power}"][:, start:].sum(1) for power in (2, 4))
    return second.square() / (fourth * sums[f"{number} tokens"][start:].sum())


def _samples(sums: Sums, models: Sequence[Model], options: Mapping[str, Any]) -> str:
    """What is said of large samples; "" for nothing."""
    if int(sums["0 tokens"].sum()) < LEAST_TOKENS:
        return ""
    start, fractions = 0, {}
    while start <= FIRST:
        each = [effective_fraction(sums, number, start) for number in range(len(models))]
        few = {
            layer: float(value)
            for model, own in zip(models, each, strict=True)
            for layer, value in zip(model.layers, own, strict=True)
            if value < LEAST_EFFECTIVE_FRACTION
        }
        if start == 0:
            fractions = few
        if not few:
            break
        start += 1
    if not fractions:
        return ""
    layer = min(fractions, key=lambda one: fractions[one])
    what = f"skip_first={start} leaves them out" if start <= FIRST else "they are not the first ones of a row: inspect the rows"
    if start <= FIRST and options.get("positions", "all") != "all":
        what = f"they are the first {start} of a row: leave these out of positions="
    return (
        f"few tokens decide these numbers at {len(fractions)} sites, most at {site_in_words(layer)}, where the sizes of "
        f"activations are those of {fractions[layer]:.2g} of all tokens: {what}."
    )


def _dimension(sums: Sums, models: Sequence[Model], what: str) -> str:
    """What is said of one large dimension; "" for nothing."""
    large = {
        layer: float(share)
        for number, model in enumerate(models)
        for layer, share in zip(model.layers, sums[f"{number} largest {what}"] / sums[f"{number} all {what}"], strict=True)
        if share > LARGEST_DIMENSION
    }
    if not large:
        return ""
    layer = max(large, key=lambda one: large[one])
    of = "of the squared norm" if what == "power" else "of the variance"
    return (
        f"one dimension has {large[layer]:.0%} {of} at {site_in_words(layer)}, and more than {LARGEST_DIMENSION:.0%} at "
        f"{len(large)} sites in all: these numbers are about it. CCA and LinearPredictivity are not, as they weight "
        "dimensions equally."
    )
