"""Errors that say what was given, what was expected and what to do; warnings; and how sizes are said in words."""

from __future__ import annotations

import re
import sys
import warnings

# A login at the head of an address, a value in an address that opens a door, and an access token of the Hugging Face hub.
_LOGIN = re.compile(r"(?<=://)[^/\s]*@|^[^/\s:@]+:[^/\s@]+@")
_VALUE = re.compile(r"([?&;][^=&;\s]*(?:token|key|secret|passw|signature|credential|auth)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE)
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")


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
        what, expected, do = without_secrets(what), without_secrets(expected), without_secrets(do)
        # A whole story or a table would hide the other lines.
        text = without_secrets(" ".join(str(given).split()))
        given = text if len(text) <= 400 else f"{text[:380]} ... ({len(text)} characters)"
        self.what, self.given, self.expected, self.do = what, given, expected, do
        # Not super(): a class that travelled to a server as source has lost what that looks up.
        ValueError.__init__(self, f"{what}\n  given:    {given}\n  expected: {expected}\n  do:       {do}")


def without_secrets(text: str) -> str:
    """A text without the logins, access tokens and signatures of the addresses in it: they must not reach a file or a log.

    >>> without_secrets("https://me:secret@host/model?token=abc")
    'https://host/model?token=***'
    """
    return _TOKEN.sub("hf_***", _VALUE.sub(r"\1***", _LOGIN.sub("", text)))


class LayersimTypeError(LayersimError, TypeError):
    """A call with an argument that does not exist, that is missing, in another's place, or of the wrong type."""


def warn(text: str) -> None:
    """A `LayersimWarning` that points to the line outside this package from which all of it was called."""
    depth, frame = 2, sys._getframe(1)
    ours = (__name__.split(".")[0], "jaxtyping", "beartype", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(without_secrets(text), LayersimWarning, stacklevel=depth)


def as_fraction(name: str, value: float) -> str:
    """The question whether a number from 1 to 100 was meant in per cent; nothing where it cannot be.

    >>> as_fraction("threshold", 95)
    'did you mean threshold=0.95? it is a fraction, not per cent'
    """
    return f"did you mean {name}={value / 100:g}? it is a fraction, not per cent" if 1 < value <= 100 else ""


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
