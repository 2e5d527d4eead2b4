"""Tokens, pairs of tokens and connections of a prompt, from the numbers that a user gives for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..core.errors import LayersimError
from ..core.wording import brief


def pair_of(position: Any, tokens: int) -> tuple[int, int]:
    """Convert a position ("last", a token or a pair of tokens) to t_in and t_out, counted from 0."""
    pair = (-1, -1) if position == "last" else (position, position) if isinstance(position, int) else position
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(token) is int for token in pair):
        raise LayersimError(
            f"`positions` contains {brief(position)}; it must be 'last', or hold numbers of tokens or pairs (t_in, t_out)."
        )
    return token_of(pair[0], tokens), token_of(pair[1], tokens)


def different(chosen: list[Any]) -> list[Any]:
    """Return the chosen positions; raises if there are none, or one is given twice."""
    twice = [one for one, times in Counter(chosen).items() if times > 1]
    if twice or not chosen:
        found = f"(t_in, t_out) = {twice[0][-2:]} twice" if twice else "no token"
        raise LayersimError(f"`positions` selects {found}; it must select one token or more, each once.")
    return chosen


def token_of(position: int, tokens: int) -> int:
    """The index of a token, counted from 0."""
    if not -tokens <= position < tokens:
        raise LayersimError(
            f"Token {position} does not exist: the prompt has tokens 0 to {tokens - 1}, or -1 to {-tokens} from the end."
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
            f"`positions` contains {wrong[0]}; it must be from {first} to {last - 1} for along={along!r}, as a token has "
            "no effect on earlier ones. block_jacobians takes any pair."
        )
    if along == "self":
        return [(block, t, t) for block in blocks for t in moving]
    return [(block, at, t) if along == "fixed-input" else (block, t, at) for block in blocks for t in moving]
