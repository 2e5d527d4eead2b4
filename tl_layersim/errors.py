"""One kind of error: what was given, what was expected, and the call to make; and how sizes are said in words."""

from __future__ import annotations

import sys
import warnings


class LayersimWarning(UserWarning):
    """A number that is right and probably not what was meant."""


class LayersimError(ValueError):
    """A request that tl_layersim refuses, or numbers that it will not report.

    The text always has three parts after the first sentence: what was given, what was expected, and what to do.

    >>> print(LayersimError("The mask does not fit.", given="2 x 3", expected="2 x 4", do="pass mask=tokens != pad"))
    The mask does not fit.
      given:    2 x 3
      expected: 2 x 4
      do:       pass mask=tokens != pad
    """

    def __init__(self, what: str, *, given: object, expected: str, do: str) -> None:
        self.what, self.given, self.expected, self.do = what, given, expected, do
        # Not super(): a class that travelled to a server as source has lost what that looks up.
        ValueError.__init__(self, f"{what}\n  given:    {given}\n  expected: {expected}\n  do:       {do}")


def warn(text: str) -> None:
    """A `LayersimWarning` that points to the line outside this package from which all of it was called."""
    depth, frame = 2, sys._getframe(1)
    ours = (__name__.split(".")[0], "jaxtyping", "beartype", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, LayersimWarning, stacklevel=depth)


def in_words(size: float) -> str:
    """A number of bytes.

    >>> in_words(1234567)
    '1.2 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
