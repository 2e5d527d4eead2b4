"""Warnings of runs whose numbers a few tokens or one dimension decide, because their activations are far larger than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..analyzers.base import Analyzer
from ..core.errors import warn
from ..core.findings import site_in_words
from ..core.sums import SIZES, Sums
from ..models.activation_sizes import FIRST_PLACES
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
    # By number of first positions that are left out, the sites at which few samples weigh most.
    few = [_few(sums, models, start) for start in range(FIRST_PLACES + 1)]
    if not few[0]:
        return ""
    least = min(few[0], key=lambda layer: few[0][layer])
    start = min(range(FIRST_PLACES + 1), key=lambda number: len(few[number]))
    unskipped = options.get("positions", "all") == "all"
    first = f"skip_first={start} leaves them out" if unskipped else f"leave the first {start} out of positions="
    left = f" at all but {len(few[start])} of these" if few[start] else ""
    return (
        f"few tokens decide these numbers at {_sites(few[0])}, most at {site_in_words(least)}, where {few[0][least]:.2g} of "
        "the tokens would carry as much if they were equally large: "
        + (f"{first}{left}." if start else "they are not the first ones of a row; inspect the rows.")
    )


def _few(sums: Sums, models: Sequence[Model], start: int) -> dict[str, float]:
    return {
        layer: float(value)
        for number, model in enumerate(models)
        for layer, value in zip(model.layers, effective_fraction(sums, number, start), strict=True)
        if value < LEAST_EFFECTIVE_FRACTION
    }


def _sites(named: Mapping[str, float]) -> str:
    return f"{len(named)} site{'s' * (len(named) > 1)}"


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
    of = "of a token's squared norm" if what == "power" else "of the variance"
    return (
        f"one dimension decides these numbers at {_sites(large)}: it has {100 * large[layer]:.0f} % {of} at "
        f"{site_in_words(layer)}. "
        "CCA and LinearPredictivity weight all dimensions equally."
    )
