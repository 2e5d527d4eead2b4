"""Parsers for option values such as `--shard 3/64` and `--at attn_out,z`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError


def names_of(texts: Sequence[str]) -> list[str]:
    """Split names that are separated by commas.

    Args:
        texts: texts with one or several names each.
    """
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def stitch_point(text: str) -> tuple[int | str, int | str]:
    """Parse a stitch point: two layers, each a number or a name.

    Args:
        text: the point, such as `4:6`.
    """
    first, colon, second = (part.strip() for part in text.partition(":"))
    if not (first and colon and second):
        raise LayersimError(f"`at` is {text!r}; it must be a layer of FRONT and one of BACK, such as 4:6.")
    return _layer(first), _layer(second)


def _layer(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sites(texts: Sequence[str]) -> list[int | str]:
    return [_layer(text) for text in names_of(texts)]


def shard_files(texts: Sequence[str], argument: str = "first") -> list[Path]:
    """Find the files of shards. Run files, which a pattern may match too, are left out.

    Args:
        texts: folders, patterns and files.
        argument: name of the argument, for messages.
    """
    from ..engine.shards import paths_of

    return [file for text in texts for file in paths_of(text, argument) if file.suffix != ".yaml"]


def _shard(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+/\d+", text):
        raise LayersimError(f"`shard` is {text!r}; it must be a number from 0, a slash and the number of shards, such as 3/64.")
    number, of = text.split("/")
    return int(number), int(of)


def _column(text: str) -> str | tuple[str, ...]:
    return tuple(names_of([text])) if "," in text else text


def _numbers(name: str) -> Callable[[Sequence[str]], Any]:
    def read(texts: Sequence[str]) -> tuple[float, ...]:
        try:
            return tuple(float(number) for number in names_of(texts))
        except ValueError:
            raise LayersimError(f"`{name}` is {','.join(texts)}; it must be numbers, separated by commas.") from None

    return read


def _weights(texts: Sequence[str]) -> Any:
    return texts[0] if texts in (["linear"], ["uniform"]) else _numbers("weights")(texts)


def _positions(text: str) -> Any:
    from ..data.positions import as_rule

    return as_rule(text)


# By option: its value in Python.
READERS: dict[str, Callable[[Any], Any]] = {
    "at": _sites,
    "layers": names_of,
    "unembed": names_of,
    "format": names_of,
    "first": shard_files,
    "shard": _shard,
    "column": _column,
    "positions": _positions,
    "thresholds": _numbers("thresholds"),
    "weights": _weights,
}
