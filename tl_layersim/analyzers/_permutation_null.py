"""Permutation nulls of similarities: p-values, thresholds and calibrated values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core import LayerMatrix, LayersimError, axes
from ..core.result_declarations import JOINT, NOT_MEASURED, result_class
from ..sources.model_description import ModelDescription

# Level of the test behind the threshold of a calibrated value.
ALPHA = 0.05
# Equal similarities differ by rounding: of Fourier transforms, which give the null, or of decompositions. Few samples and
# measures that count, such as shared neighbours, have many equal ones.
EQUAL_WITHIN = 1e-10


@result_class
class CalibratedMatrix(LayerMatrix):
    """Similarities of all pairs of layers, with the null distribution of randomly paired texts.

    Tokens of a text depend on each other, so the null exchanges whole texts, position with position, among the texts of a pool.
    Texts of unequal lengths are compared at positions that all texts which are exchanged have, in the same of their rows, so
    the null has an observed value of its own. Without permutations, `permutations` is 0 and the numbers of the null are NaN.

    Attributes:
        values: `row column`, the similarities of all samples, at most 1.
        permutations: number of random pairings of texts in the null; 0 without a null.
        observed: `row column`, similarities of the texts and positions that the null permutes, in their true pairing.
        calibrated: `row column`, max(0, (observed - threshold) / (1 - threshold)): 0 for a similarity that random pairings
            reach, 1 for equal layers.
        p_values: `row column`, (1 + number of null values >= the observed value) / (1 + permutations).
        null_mean: `row column`, mean of the null.
        null_threshold: `row column`, the 95 % quantile of the null values together with the observed value.
        max_value: the largest observed similarity over pairs of layers; within one model, over pairs of different layers.
        max_p_value: p-value of `max_value`, against the maximum over the same pairs in each permutation. It accounts for the
            search for the best pair, which the p-value of a single pair does not.
        max_calibrated: `max_value` calibrated as `calibrated`.
        split_half: reliability of `values`, for two models with intervals: the correlation over pairs of layers between the odd
            and the even blocks of the data, stepped up to all data by the Spearman-Brown formula.
        noise_ceiling: root of `split_half`: the correlation over pairs of layers that `values` can be expected to have with the
            true values, and so the largest correlation they can have with any quantity.

    Source:
        Algorithms 1 and 2 of the package calibrated-similarity; p-values of Phipson and Smyth 2010.

    Examples:
        >>> import tl_layersim as lsim
        >>> tokens = lsim.demo_text()[:4]
        >>> cka = lsim.analyze(lsim.demo_model(), tokens, [lsim.CKA(minibatch=64)])["cka"]
        >>> cka.permutations, bool(cka.calibrated.isnan().all())
        (0, True)
    """

    # The measure in a summary; and fields that are one another's transposed, if the models are compared in the other order.
    measure: ClassVar[str] = "similarity"
    partners: ClassVar[Mapping[str, str]] = {}
    values: Float64[Tensor, "row column"] = axes("row", "column", label="Similarity", title="Similarity between layers")
    permutations: int = 0
    observed: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Similarity of the rows that the null exchanges",
        default=NOT_MEASURED,
        within=(-math.inf, 1),
    )
    calibrated: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Calibrated similarity (0 to 1)",
        title="{values}, calibrated",
        caption="Similarity above the threshold that 5 % of random pairings of texts exceed, as a fraction of what is left up "
        "to 1. It is 0 where random pairings are as similar (Phipson and Smyth 2010; permutation test of Fisher 1935).",
        default=NOT_MEASURED,
        within=(-math.inf, 1),
    )
    p_values: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="p-value",
        title="{values}: p-values",
        caption="Fraction of random pairings of texts that are at least as similar, with the observed pairing counted once "
        "(Phipson and Smyth 2010). The smallest possible value is 1 / (permutations + 1).",
        default=NOT_MEASURED,
        within=None,
    )
    null_mean: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="Mean similarity of random pairings",
        title="{values} of randomly paired texts",
        caption="The similarity that width and number of samples alone produce: texts of a layer are paired with random texts "
        "of the other, position with position, mean over pairings (permutation test of Fisher 1935).",
        default=NOT_MEASURED,
        within=(-math.inf, 1),
    )
    null_threshold: Float64[Tensor, "row column"] = axes(
        "row",
        "column",
        label="95 % quantile of random pairings",
        title="{values}: threshold at 5 %",
        caption="The value that 5 % of random pairings of texts exceed (permutation test of Fisher 1935).",
        default=NOT_MEASURED,
        within=(-math.inf, 1),
    )
    max_value: Float64[Tensor, ""] = axes(default=NOT_MEASURED, within=None)
    max_p_value: Float64[Tensor, ""] = axes(default=NOT_MEASURED, within=None)
    max_calibrated: Float64[Tensor, ""] = axes(default=NOT_MEASURED, within=None)
    split_half: Float64[Tensor, ""] = axes(default=NOT_MEASURED, within=None)
    noise_ceiling: Float64[Tensor, ""] = axes(default=NOT_MEASURED, within=None)

    def __post_init__(self) -> None:
        for name in ("observed", "calibrated", "p_values", "null_mean", "null_threshold"):
            # A file may lack them.
            if self.permutations and getattr(self, name) is NOT_MEASURED:
                raise LayersimError(f"`{name}` is missing, but `permutations` is {self.permutations}; it must be given.")
        super().__post_init__()

    def with_halves(self, first: Any, second: Any) -> Any:
        halves = torch.stack([first.values.flatten(), second.values.flatten()])
        halves = halves[:, halves.isfinite().all(0)]
        if halves.shape[1] < 3:
            return self
        correlation = torch.corrcoef(halves)[0, 1]
        # Spearman and Brown: from the reliability of a half to that of all the data.
        reliability = 2 * correlation / (1 + correlation)
        return replace(self, split_half=reliability, noise_ceiling=reliability.clamp(min=0).sqrt())

    def transposed(self) -> Any:
        """The same comparison with the models exchanged: rows become columns in every field."""
        swapped_axis = {"row": "column", "column": "row"}
        sides = {"residual": "column", "column": "residual"}
        swapped: dict[str, Any] = {}
        for name, names in self.tensor_fields().items():
            if {"row", "column"} <= set(names):
                order = [names.index(swapped_axis.get(axis, axis)) for axis in names]
                swapped[name] = getattr(self, self.partners.get(name, name)).permute(order)
            elif len(names) == 1 and names[0] in sides:
                partner = name.removeprefix("column_") if names[0] == "column" else f"column_{name}"
                swapped[name] = getattr(self, partner)
        swapped["layers"] = self.column_layers
        swapped["column_layers"] = self.layers
        swapped["provenance"] = self.provenance.swapped()
        swapped["replicates"] = tuple(replicate.transposed() for replicate in self.replicates)
        return replace(self, **swapped)

    def headline(self) -> dict[str, float]:
        headline = self._similarity_headline()
        if self.permutations:
            headline["calibrated maximum over pairs of layers"] = float(self.max_calibrated)
            headline["p-value of the maximum over pairs of layers"] = float(self.max_p_value)
        return headline

    def _similarity_headline(self) -> dict[str, float]:
        to_last = self.values[:, -1]
        two_models = JOINT in self.provenance.model
        if len(to_last) == 1:
            return {f"{self.measure} of the two models": float(to_last[0])} if two_models else {}
        name = f"{self.measure}(first model's {{}}, second's last)" if two_models else f"{self.measure}({{}}, last)"
        headline: dict[str, float] = {}
        if not self.split_half.isnan():
            headline[f"split-half reliability of {self.measure}"] = float(self.split_half)
        if two_models and self.layers == self.coordinates("column"):
            headline[f"{self.measure} of the same layers, mean"] = float(self.values.diagonal().mean())
        if not self.in_depth_order:
            return headline | self.sites_headline(self.measure)
        return headline | {
            name.format(self.first_layer()): float(to_last[0]),
            name.format("middle layer"): float(to_last[len(to_last) // 2]),
            name.format("last but one"): float(to_last[-2]),
        }


def null_fields(values: Tensor, null: Tensor, *, one_model: bool, symmetric: bool = True) -> dict[str, Any]:
    """The fields of a `CalibratedMatrix` that describe the null.

    Args:
        values: `row column`, observed similarities, at most 1; NaN if not defined.
        null: `permutation row column`, the similarities of permuted rows. An empty null leaves the fields out.
        one_model: whether rows and columns are the layers of one model. A layer and itself are then no pair, and two layers
            have one null in either order, in which the rows of the later layer are permuted.
        symmetric: whether two layers of one model have one value in either order. If not, each order is a pair of its own.

    Returns:
        The fields by name; empty without permutations.
    """
    if not len(null):
        return {}
    undefined = values.isnan()
    pairs = ~undefined
    if one_model and not symmetric:
        pairs = pairs & ~torch.eye(*values.shape, dtype=torch.bool)
    elif one_model:
        null = null.triu() + null.triu(1).transpose(1, 2)
        pairs = pairs.triu(1)
    if bool(pairs.any()):
        largest = values[pairs].max()
        max_null = null[:, pairs].amax(1)
    else:
        largest = NOT_MEASURED.clone()
        max_null = null.new_full((len(null),), math.nan)
    thresholds = null_threshold(values, null).masked_fill(undefined, math.nan)
    return {
        "permutations": len(null),
        "observed": values,
        "calibrated": calibrated_values(values, thresholds),
        "p_values": p_values(values, null),
        "null_mean": null.mean(0).masked_fill(undefined, math.nan),
        "null_threshold": thresholds,
        "max_value": largest,
        "max_p_value": p_values(largest, max_null),
        "max_calibrated": calibrated_values(largest, null_threshold(largest, max_null)),
    }


def p_values(values: Tensor, null: Tensor) -> Tensor:
    """Right-tailed permutation p-values, (1 + #{null >= value}) / (1 + permutations); NaN if the value is NaN.

    Null values that are below the observed one by rounding alone count as equal.

    Args:
        values: observed values, of any shape.
        null: `permutation` before the axes of `values`.

    Source:
        Phipson and Smyth 2010.

    Examples:
        >>> p_values(torch.tensor(0.5), torch.tensor([0.1, 0.5, 0.7]))
        tensor(0.7500, dtype=torch.float64)
    """
    reached = null >= values - EQUAL_WITHIN * values.abs().clamp(min=1)
    return ((1 + reached.sum(0).double()) / (1 + len(null))).masked_fill(values.isnan(), math.nan)


def null_threshold(values: Tensor, null: Tensor) -> Tensor:
    """Significance threshold at `ALPHA`: the 95 % quantile of the null values pooled with the observed value.

    Args:
        values: observed values, of any shape.
        null: `permutation` before the axes of `values`.

    Examples:
        >>> null_threshold(torch.tensor(9.0), torch.arange(19.0))
        tensor(17.)
    """
    pooled = torch.cat([values[None], null]).sort(0).values
    return pooled[math.ceil((1 - ALPHA) * len(pooled)) - 1]


def calibrated_values(values: Tensor, threshold: Tensor) -> Tensor:
    """Similarities rescaled so that the threshold is 0, max(0, (value - threshold) / (1 - threshold)).

    Args:
        values: observed values, at most 1.
        threshold: thresholds, of the same shape.

    Examples:
        >>> calibrated_values(torch.tensor([0.2, 0.6, 1.0]), torch.tensor([0.4, 0.2, 0.4]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    above = values - threshold
    above = above.where((above > EQUAL_WITHIN) | above.isnan(), 0)
    # Where random pairings reach 1, no value can exceed them.
    return (above / (1 - threshold).clamp(min=EQUAL_WITHIN)).clamp(0, 1)


def is_one_model(models: Sequence[ModelDescription]) -> bool:
    """Whether all models of a run are the same model."""
    return len({id(model) for model in models}) < 2
