"""Distance between two models of equal depth, from the similarities of their layers."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import LayersimError
from ..core.results import LayerMatrix


def arccos_distance(result: LayerMatrix) -> float:
    """Root of the summed squared angles arccos(similarity) of equal layers, over outputs of blocks, or other sites.

    Args:
        result: of two models, whose values are similarities; those outside [-1, 1] are clipped.

    Raises:
        LayersimError: the models have different numbers of sites.
    """
    # The input of the first block is not the output of one.
    rows, columns = (
        len(names) - names[0].endswith((".hook_resid_pre", ".input")) for names in (result.layers, result.column_layers)
    )
    if rows != columns or result.values.shape[0] != result.values.shape[1]:
        raise LayersimError(
            f"The arccos distance is defined for models of equal depth; these have {rows} and {columns} blocks, or other sites."
        )
    equal: Tensor = result.values.diagonal()[-rows:]
    return float(equal.clamp(-1, 1).arccos().square().sum().sqrt())
