"""The difference of two results, field by field: its standard error, interval and p-value, paired by block or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .intervals import with_and_without_blocks
from .jackknife import (
    ROUNDING_ERROR,
    ConfidenceInterval,
    degrees_of_freedom,
    p_value_from_error,
    standard_error,
    t_interval,
    welch_degrees,
)


@dataclass(frozen=True)
class Estimate:
    """Two values of a statistic and their difference, with its standard error. All tensors have one shape.

    Attributes:
        first: the first value.
        second: the second value.
        error: standard error of second minus first.
        degrees: of freedom of the error.
    """

    first: Tensor
    second: Tensor
    error: Tensor
    degrees: Tensor

    def interval(self, level: float) -> ConfidenceInterval:
        """Student's t interval of the difference.

        Args:
            level: of confidence.
        """
        return t_interval(self.second - self.first, self.error, self.degrees, level)

    def p_value(self) -> Tensor:
        """Two-sided p-value of the test that the difference is 0."""
        return p_value_from_error(self.second - self.first, self.error, self.degrees)


def same_blocks(first: Any, second: Any) -> bool:
    """Whether two results were measured on the same data in the same blocks.

    Args:
        first: a result with blocks.
        second: another one.
    """
    same = first.provenance.data == second.provenance.data and first.block_tokens == second.block_tokens
    return same and len(first.replicates) == len(second.replicates)


def difference_estimate(
    first: Any,
    second: Any,
    function: Callable[[Any], Any],
    paired: bool,
    within: tuple[float, float] = (-math.inf, math.inf),
    out_of: str = "",
) -> Estimate:
    """A statistic of two results, with the standard error of the difference.

    Args:
        first: result with its replicates.
        second: the same of the other run.
        function: takes a result and returns a number or a tensor, of one shape for both.
        paired: whether block j of one run has the data of block j of the other.
        within: bounds of the statistic.
        out_of: for counts, the attribute whose sum they are counted out of.
    """
    (a, without_a), (b, without_b) = (with_and_without_blocks(result, function, out_of) for result in (first, second))
    if paired:
        error = standard_error(b - a, without_b - without_a)
        degrees = degrees_of_freedom(b - a, without_b - without_a)
    else:
        errors = (standard_error(a, without_a), standard_error(b, without_b))
        error = (errors[0].square() + errors[1].square()).sqrt()
        degrees = welch_degrees(errors, (degrees_of_freedom(a, without_a), degrees_of_freedom(b, without_b)))
    # Ones on the diagonal of a similarity differ by rounding, which is no finding.
    rounding = ROUNDING_ERROR * torch.maximum(a.abs(), b.abs())
    is_rounding = (error <= rounding) & ((b - a).abs() <= rounding)
    error, b = error.where(~is_rounding, 0.0), b.where(~is_rounding, a)
    return Estimate(a, b, error, degrees)
