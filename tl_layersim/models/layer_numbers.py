"""Resolution of blocks that an argument gives by number, negative from the end, or by the name of their output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.errors import LayersimError

_BLOCK = re.compile(r"(?:.*\.)?blocks\.(\d+)\.")


def block_number(layer: int | str, names: Sequence[str], argument: str) -> int:
    """Index of a block among the blocks that are read.

    Args:
        layer: number of the block, negative from the end, or the name of its output.
        names: names of the outputs of the blocks that are read.
        argument: name of the argument, for the message.

    Raises:
        LayersimError: there is no such block.

    Examples:
        >>> names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
        >>> block_number(-1, names, "at"), block_number("blocks.0.hook_resid_post", names, "at")
        (1, 0)
    """
    if isinstance(layer, str) and layer in names:
        return names.index(layer)
    # Blocks that `open_model(layers=...)` chose keep the numbers of their names.
    own = [int(found[1]) if (found := _BLOCK.match(name)) else place for place, name in enumerate(names)]
    if isinstance(layer, int) and not isinstance(layer, bool):
        if layer in own:
            return own.index(layer)
        if -len(names) <= layer < 0:
            return layer % len(names)
    raise LayersimError(
        f"`{argument}` names block {layer!r}; blocks are {own[0]} to {own[-1]}, negative from the end, or names such as "
        f"{names[0]}."
    )


def block_numbers(layers: int | str | Sequence[int | str], names: Sequence[str], argument: str) -> tuple[int, ...]:
    """Indices of one block or several, in the order given; arguments as in `block_number`.

    Raises:
        LayersimError: no block is given, one is given twice, or there is no such block.
    """
    given = [layers] if isinstance(layers, int | str) else list(layers)
    numbers = tuple(block_number(layer, names, argument) for layer in given)
    if not numbers or len(set(numbers)) < len(numbers):
        raise LayersimError(f"`{argument}` is {given}; it must name one block or more, each once.")
    return numbers
