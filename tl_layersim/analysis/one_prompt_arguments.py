"""Blocks, tokens and pairs of tokens of a prompt, from the numbers that a user gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import LayersimError
from ..core.wording import brief


def numbers_of(layers: Sequence[Any] | None, blocks: int) -> tuple[int, ...]:
    """Numbers of the chosen blocks, counted from 0; all blocks where `layers` is None or holds paths."""
    if layers is None or (layers and isinstance(layers[0], str)):
        return tuple(range(blocks))
    if not layers:
        raise LayersimError("`layers` is empty.", given="layers=[]", expected="at least one block", do="layers=None")
    wrong = [layer for layer in layers if not -blocks <= layer < blocks]
    if wrong or len({layer % blocks for layer in layers}) < len(layers):
        raise LayersimError(
            "`layers` names a block that does not exist." if wrong else "`layers` names a block twice.",
            given=f"layers={list(layers)}",
            expected=f"different numbers from 0 to {blocks - 1}, or negative ones from the end",
            do=f"layers=[0, {blocks - 1}]" if blocks > 1 else "layers=[0]",
        )
    return tuple(layer % blocks for layer in layers)


def pair_of(position: Any, tokens: int) -> tuple[int, int]:
    """Convert a position ("last", a token or a pair of tokens) to t_in and t_out, counted from 0."""
    pair = (-1, -1) if position == "last" else (position, position) if isinstance(position, int) else position
    plain = isinstance(pair, tuple | list) and len(pair) == 2 and all(type(token) is int for token in pair)
    if not plain or position is True or position is False:
        raise LayersimError(
            "`positions` must contain token indices, or pairs of token indices.",
            given=f"{brief(position)} in positions=",
            expected="'last', a list of tokens, or of pairs (t_in, t_out)",
            do="positions=[(0, 5), -1]",
        )
    return token_of(pair[0], tokens), token_of(pair[1], tokens)


def different(chosen: list[Any]) -> list[Any]:
    """Return the chosen positions; refuse an empty list and repeated positions."""
    if not chosen or len(set(chosen)) < len(chosen):
        raise LayersimError(
            "`positions` contains the same token, or the same pair of tokens, twice." if chosen else "`positions` is empty.",
            given=f"{chosen[:6]}" if chosen else "positions=[]",
            expected="one or more different positions",
            do="leave out those that are the same token, counted from the other end",
        )
    return chosen


def token_of(position: int, tokens: int) -> int:
    """The index of a token, counted from 0."""
    if not -tokens <= position < tokens:
        raise LayersimError(
            "The token index lies outside the prompt.",
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
            "`positions` must lie between input and output: in a causal model a token has no effect on earlier ones.",
            given=f"token {wrong[0]} and {'input' if along == 'fixed-input' else 'output'} {at}, along={along!r}",
            expected=f"positions from {first} to {last - 1}",
            do=f"positions={list(range(first, last))[:4]}; of any pair in any model: block_jacobians",
        )
    if along == "self":
        return [(block, t, t) for block in blocks for t in moving]
    return [(block, at, t) if along == "fixed-input" else (block, t, at) for block in blocks for t in moving]
