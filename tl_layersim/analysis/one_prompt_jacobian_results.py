"""Results of `block_jacobians` and `coupling_matrices`: Jacobians of blocks on one prompt, and their coupling."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.results import Result, axes
from ..core.wording import brief

# The positions at the end of a label, in digits that `int` reads.
POSITIONS = r"([0-9]{1,9}) > ([0-9]{1,9})"


def refuse_pair_labels(field: str, labels: tuple[str, ...], form: str, start: str, tokens: tuple[str, ...]) -> None:
    """Refuse labels of Jacobians that figures cannot read, such as those of a malformed file.

    Args:
        field: name of the attribute that holds the labels.
        labels: of the Jacobians.
        form: of each label, in words.
        start: regular expression of what is before the positions.
        tokens: of the prompt, which the positions count.

    Raises:
        LayersimError: a label has another form, or a position that the prompt does not have.
    """
    for label in labels:
        found = re.fullmatch(start + POSITIONS, label)
        if found is None or max(map(int, found.groups())) >= len(tokens):
            raise LayersimError(
                f"`{field}` contains {brief(label)}; a label must be {form}, with positions below {len(tokens)}."
            )


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockJacobians(Result):
    """Jacobians of blocks without their skip connection, between tokens of one prompt. Tensors are float64.

    Attributes:
        values: `block pair output input`: d (block(X) - X)_{t_out} / d x_{t_in}; in a causal model 0 where t_in > t_out.
        singular_values: `block pair direction`, all singular values in descending order.
        step_error: `block`, of finite differences: relative change of a product with twice the step; 0 with gradients.
        blocks: names of the chosen layers.
        pairs: "t_in > t_out" of each pair, positions in the prompt.
        tokens: the prompt's tokens as text.
    """

    file_kind: ClassVar[str] = "block_jacobians"
    values_name = "jacobian"
    values: Float64[Tensor, "block pair output input"] = axes("block", "pair", "output", "input")
    singular_values: Float64[Tensor, "block pair direction"] = axes(
        "block",
        "pair",
        "direction",
        label="Singular value",
        title="Singular values of the Jacobians",
        caption="Of each block and pair of tokens, in descending order.",
        within=(0, math.inf),
        drawn="lines",
    )
    step_error: Float64[Tensor, " block"] = axes(
        "block", label="Error of a replayed block", unit="relative", title="Error of replayed blocks", within=(0, math.inf)
    )
    blocks: tuple[str, ...]
    pairs: tuple[str, ...]
    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pair_labels("pairs", self.pairs, '"t_in > t_out"', "", self.tokens)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Labels of the `output` axis: numbers of the residual's dimensions."""
        return tuple(range(self.values.shape[2]))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Labels of the `input` axis: numbers of the residual's dimensions."""
        return tuple(range(self.values.shape[3]))

    @property
    def directions(self) -> tuple[int, ...]:
        """Labels of the `direction` axis: numbers of the singular values, from 1."""
        return tuple(range(1, self.singular_values.shape[2] + 1))

    def headline(self) -> dict[str, float]:
        return {"largest singular value": float(self.singular_values.max())}


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CouplingMatrices(Result):
    """Coupling of the Jacobians of one prompt's connections. A connection is a block, a varied token and a read token.

    Tensors are float64. Entry (a, b) expresses the Jacobian of connection a in the singular basis of connection b.

    Attributes:
        values: `connection other`, mis-coupling m~ of each matrix; NaN where b has fewer than k singular values above rounding.
        coupling: `connection other`, 1 - values.
        null: `connection other`, as `values` with random orthonormal vectors in place of the singular vectors of b.
        matrices: `connection other left right`, the matrices A = U' J V.
        singular_values: `connection left`.
        residual: `connection`, error of krylov's singular vectors, |J'u - s v| / s_1; 0 for the other methods.
        step_error: `connection`, of finite differences, see `BlockJacobians`.
        connections: "block: t_in > t_out" of each connection.
        method: "dense", "krylov" or "finite-difference".
        tokens: the prompt's tokens as text.
    """

    file_kind: ClassVar[str] = "coupling_matrices"
    values_name = "miscoupling"
    values: Float64[Tensor, "connection other"] = axes(
        "connection", "other", label="Mis-coupling", title="Mis-coupling of blocks", within=(0, 1)
    )
    coupling: Float64[Tensor, "connection other"] = axes(
        "connection",
        "other",
        label="Coupling",
        title="Coupling of Jacobians on one prompt",
        caption="1 where the Jacobian of a connection is diagonal between the singular vectors of another one "
        "(Aubry et al. 2025, figures 2 to 4).",
        within=(0, 1),
    )
    null: Float64[Tensor, "connection other"] = axes(
        "connection", "other", label="Mis-coupling of random vectors", within=(0, 1)
    )
    matrices: Float64[Tensor, "connection other left right"] = axes("connection", "other", "left", "right")
    singular_values: Float64[Tensor, "connection left"] = axes(
        "connection", "left", label="Singular value", title="Singular values of the Jacobians", within=(0, math.inf)
    )
    residual: Float64[Tensor, " connection"] = axes(
        "connection",
        label="Error of the singular vectors",
        unit="relative",
        title="Error of the singular vectors of each block",
        within=(0, math.inf),
    )
    step_error: Float64[Tensor, " connection"] = axes(
        "connection", label="Error of a replayed block", unit="relative", title="Error of replayed blocks", within=(0, math.inf)
    )
    connections: tuple[str, ...]
    method: str
    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_pair_labels("connections", self.connections, '"block: t_in > t_out"', "[0-9]{1,9}: ", self.tokens)

    @property
    def others(self) -> tuple[str, ...]:
        """Labels of the `other` axis."""
        return self.connections

    @property
    def lefts(self) -> tuple[int, ...]:
        """Labels of the `left` axis: numbers of the singular vectors, from 1."""
        return tuple(range(1, self.matrices.shape[2] + 1))

    @property
    def rights(self) -> tuple[int, ...]:
        """Labels of the `right` axis: numbers of the singular vectors, from 1."""
        return self.lefts

    def headline(self) -> dict[str, float]:
        other = ~torch.eye(len(self.values), dtype=torch.bool)
        if not other.any():
            return {"largest singular value": float(self.singular_values.max())}
        return {
            "coupling, mean over different connections": float(self.coupling[other].nanmean()),
            "coupling of random vectors": 1.0 - float(self.null[other].nanmean()),
        }
