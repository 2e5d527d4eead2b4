"""Blocks by number, from 0 or negative from the end, or by the name of their output: one numbering for every argument."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import LayersimError


def block_number(layer: int | str, names: Sequence[str], argument: str) -> int:
    """The number of a block, from 0.

    Args:
        layer: the number, negative from the end, or the name of the block's output.
        names: of the outputs of all blocks.
        argument: that holds the layer.

    Raises:
        LayersimError: there is no such block.

    Examples:
        >>> names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
        >>> block_number(-1, names, "at"), block_number("blocks.0.hook_resid_post", names, "at")
        (1, 0)
    """
    if layer in names:
        return names.index(str(layer))
    if isinstance(layer, int) and -len(names) <= layer < len(names):
        return layer % len(names)
    raise LayersimError(
        f"`{argument}` names block {layer!r}; blocks are 0 to {len(names) - 1}, negative from the end, or names such as "
        f"{names[0]}."
    )


def block_numbers(layers: Sequence[int | str], names: Sequence[str], argument: str) -> tuple[int, ...]:
    """The numbers of several blocks, in the order given; arguments as in `block_number`.

    Raises:
        LayersimError: there are none, or one is given twice.
    """
    numbers = tuple(block_number(layer, names, argument) for layer in layers)
    if not numbers or len(set(numbers)) < len(numbers):
        raise LayersimError(f"`{argument}` is {list(layers)}; it must name one block or more, each once.")
    return numbers
