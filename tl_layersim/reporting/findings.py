"""The main finding of a result in one sentence, from its own words, its matrix or its headline numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core.findings import site_in_words, with_margin
from ..core.intervals import headline_texts
from ..core.provenance import JOINT
from ..core.results import LayerMatrix, Result
from ..core.wording import number_text

# Headline numbers in a sentence of a result that has no words of its own.
MOST_HEADLINES = 2
# Quantities in a sentence about several models.
MOST_CHANGES = 3


def finding(result: Result) -> str:
    """One sentence with the main numbers of a result; empty for a result without numbers.

    Args:
        result: any; its own `finding` comes first.
    """
    own = result.finding()
    if own:
        return own
    if isinstance(result, LayerMatrix) and min(result.values.shape) > 1:
        found = _extremes(result)
        if found:
            return found
    models, lines = side_by_side(result)
    if models:
        changes = [f"{line[0]} {' → '.join(line[1 : len(models) + 1])}" for line in lines[:MOST_CHANGES]]
        return f"{' → '.join(models)}: {'; '.join(changes)}."
    numbers = [f"{name}: {text}" for name, text in list(headline_texts(result).items())[:MOST_HEADLINES]]
    return "; ".join(numbers)[:1].upper() + "; ".join(numbers)[1:] + "." if numbers else ""


def side_by_side(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headline numbers of a result of several models, a line for each quantity and a column for each model.

    Args:
        result: any.

    Returns:
        Names of the models; and lines of a quantity, its value for each model and, of two models, the change from the first to
        the second. Nothing for a result of one model.
    """
    models = tuple(map(str, getattr(result, "models", ())))
    texts = headline_texts(result)
    if len(models) < 2 or not texts or not all(any(name.startswith(f"{model}: ") for model in models) for name in texts):
        return (), []
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name.partition(": ")[2] for name in texts):
        keys = [f"{model}: {name}" for model in models]
        change = [_difference_text(result, keys[0], keys[1])] if len(models) == 2 and all(key in texts for key in keys) else []
        lines.append((name, *(texts.get(key, "") for key in keys), *change))
    return models, lines


def _difference_text(result: Result, before: str, after: str) -> str:
    """The second headline number minus the first, with its sign and its own margin: both were measured on the same data."""
    text = with_margin(result, lambda one: one.headline()[after] - one.headline()[before])
    return text if text.startswith("-") else f"+{text}"


def _extremes(result: LayerMatrix) -> str:
    """The highest and the lowest value between two sites, in words; empty where no value is defined."""
    values = result.values
    two_models = JOINT in result.provenance.model
    rows, columns = result.layers, result.column_layers
    compared = ~values.isnan()
    if not two_models and rows == columns:
        compared &= ~torch.eye(len(rows), dtype=torch.bool)
        if torch.allclose(values, values.T, rtol=1e-6, atol=1e-9, equal_nan=True):
            compared = compared.triu()
    if not bool(compared.any()):
        return ""
    high_text = _pair(result, values.where(compared, -math.inf).argmax(), two_models)
    low_text = _pair(result, values.where(compared, math.inf).argmin(), two_models)
    name = result.declared().words
    return f"{name} is highest between {high_text} and lowest between {low_text}."


def _pair(result: LayerMatrix, place: Tensor, two_models: bool) -> str:
    """A cell of a matrix in words: its sites and its value. A cell that the data choose has no interval."""
    row, column = divmod(int(place), result.values.shape[1])
    names: list[Any] = [site_in_words(result.layers[row]), site_in_words(result.column_layers[column])]
    if two_models:
        names = [f"{names[0]} of the first model", f"{names[1]} of the second"]
    return f"{' and '.join(names)} ({number_text(float(result.values[row, column]))})"
