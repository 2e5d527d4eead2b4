"""Which blocks and tokens of a prompt a user means: numbers from the start or the end, pairs, and what is left to vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import LayersimError


def numbers_of(layers: Sequence[Any] | None, blocks: int) -> tuple[int, ...]:
    """Numbers of the chosen blocks, from 0."""
    if not layers or isinstance(layers[0], str):
        return tuple(range(blocks))
    wrong = [layer for layer in layers if not -blocks <= layer < blocks]
    if wrong or len({layer % blocks for layer in layers}) < len(layers):
        raise LayersimError(
            "There is no such block." if wrong else "A block stands twice.",
            given=f"layers={list(layers)}",
            expected=f"different numbers from 0 to {blocks - 1}, or negative ones from the end",
            do=f"layers=[0, {blocks - 1}]" if blocks > 1 else "layers=[0]",
        )
    return tuple(layer % blocks for layer in layers)


def pair_of(one: Any, tokens: int) -> tuple[int, int]:
    """t_in and t_out from 0."""
    both = (-1, -1) if one == "last" else (one, one) if isinstance(one, int) else one
    plain = isinstance(both, tuple | list) and len(both) == 2 and all(type(t) is int for t in both)
    if not plain or one is True or one is False:
        raise LayersimError(
            "This is no position.",
            given=f"{one!r} in positions=",
            expected="'last', a list of tokens, or of pairs (t_in, t_out)",
            do="positions=[(0, 5), -1]",
        )
    return token_of(both[0], tokens), token_of(both[1], tokens)


def different(asked: list[Any]) -> list[Any]:
    """The same, if there are any and none stands twice."""
    if not asked or len(set(asked)) < len(asked):
        raise LayersimError(
            "A connection stands twice." if asked else "There is nothing to relate.",
            given=f"{asked[:6]}" if asked else "positions=[]",
            expected="one or more different positions",
            do="leave out those that are the same token, counted from the other end",
        )
    return asked


def token_of(position: int, tokens: int) -> int:
    """A token's index from 0."""
    if not -tokens <= position < tokens:
        raise LayersimError(
            "There is no such token.",
            given=f"token {position} of a prompt of {tokens}",
            expected=f"a number from 0 to {tokens - 1}, or a negative one from the end",
            do="-1 for the last",
        )
    return position % tokens


def connections_of(
    along: str, blocks: tuple[int, ...], token: int | None, positions: list[int] | None, tokens: int
) -> list[tuple[int, int, int]]:
    """Block, t_in and t_out of each connection."""
    at = token_of((0 if along == "fixed-input" else -1) if token is None else token, tokens)
    if along == "depth":
        return [(block, at, at) for block in blocks]
    first, last = (at, tokens) if along == "fixed-input" else (0, at + 1) if along == "fixed-output" else (0, tokens)
    moving = list(range(first, last)) if positions is None else [token_of(p, tokens) for p in positions]
    wrong = [t for t in moving if not first <= t < last]
    if wrong:
        raise LayersimError(
            "In a causal model a token has no effect on earlier ones.",
            given=f"token {wrong[0]} and {'input' if along == 'fixed-input' else 'output'} {at}, along={along!r}",
            expected=f"positions from {first} to {last - 1}",
            do=f"positions={list(range(first, last))[:4]}; of any pair in any model: block_jacobians",
        )
    if along == "self":
        return [(block, t, t) for block in blocks for t in moving]
    return [(block, at, t) if along == "fixed-input" else (block, t, at) for block in blocks for t in moving]
