"""Errors, warnings and log of this package. Logins and tokens are removed from their texts."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit, urlunsplit


def is_address(text: str) -> bool:
    """Whether a text is an HTTP address without secrets after the host. User name and password before the host are allowed."""
    try:
        parts = urlsplit(text)
        # A query, or an @ in the path, may be part of a secret.
        suspicious = parts.query or parts.fragment or "@" in parts.path or parts.port == 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not suspicious


def shown(remote: bool | str) -> str:
    """The argument `remote` as text for error messages, without secrets.

    An address loses its login; a text that is no address is hidden.

    Args:
        remote: the argument as the user passed it.

    Examples:
        >>> shown("https://me:secret@ndif.example:8001"), shown("secret"), shown(True)
        ("'https://ndif.example:8001'", 'a text that is not an address', 'True')
    """
    if isinstance(remote, bool) or remote == "local":
        return repr(remote)
    return repr(without_login(remote)) if is_address(remote) else "a text that is not an address"


def without_login(host: str) -> str:
    """An address without user name and password.

    Examples:
        >>> without_login("https://me:secret@ndif.example:8001")
        'https://ndif.example:8001'
    """
    parts = urlsplit(host)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


# A login in an address, a secret parameter in an address, and an access token of the Hugging Face hub.
_LOGIN = re.compile(r"(?<=://)[^/\s]*@|^[^/\s:@]+:[^/\s@]+@")
_VALUE = re.compile(r"([?&;][^=&;\s]*(?:token|key|secret|passw|signature|credential|auth)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE)
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")

# The warnings that `recorded_warnings` lists, and whether they are issued. The variable belongs to one thread. Filters of the
# standard library belong to the process, and threads that change them at the same time leave them changed.
_record: ContextVar[tuple[list[str], bool] | None] = ContextVar("_record", default=None)

# Messages of this package that are no warnings about results, such as retries of requests.
LOG = logging.getLogger("tl_layersim")


class LayersimWarning(UserWarning):
    """Warning: the result is valid, but the settings are probably not what you intended."""


class LayersimError(ValueError):
    """Error for arguments, data or a model that a call cannot use. It is also raised if a requested number is undefined.

    Args:
        message: one or two sentences with the argument, its value and the allowed values; secrets are removed.

    Examples:
        >>> print(LayersimError("`threshold` is 1.5; it must be between 0 and 1."))
        `threshold` is 1.5; it must be between 0 and 1.
    """

    def __init__(self, message: str) -> None:
        # super() needs a `__class__` cell, which a class that was serialised as source for a server lacks.
        ValueError.__init__(self, without_secrets(message))


def without_secrets(text: str) -> str:
    """Remove logins, access tokens and signatures from a text. Texts pass through here before they enter a file or a log.

    Examples:
        >>> without_secrets("https://me:secret@host/model?token=abc")
        'https://host/model?token=***'
    """
    return _TOKEN.sub("hf_***", _VALUE.sub(r"\1***", _LOGIN.sub("", text)))


class LayersimTypeError(LayersimError, TypeError):
    """Error for an argument of the wrong type, or a tensor of the wrong shape."""


def warn(text: str) -> None:
    """Issue a `LayersimWarning` that points to the user's own line.

    Args:
        text: the warning; secrets in it are removed.
    """
    text = without_secrets(text)
    if (record := _record.get()) is not None:
        found, issued = record
        found.append(text)
        if not issued:
            return
    depth, frame = 2, sys._getframe(1)
    internal = (__name__.split(".")[0], "jaxtyping", "beartype", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in internal:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, LayersimWarning, stacklevel=depth)


@contextmanager
def recorded_warnings(*, issued: bool = True) -> Iterator[list[str]]:
    """A context manager that collects the texts of this package's warnings.

    Args:
        issued: False hides these warnings from the user. Warnings of other packages are always issued.
    """
    found: list[str] = []
    before = _record.set((found, issued))
    try:
        yield found
    finally:
        _record.reset(before)


def in_words(size: float) -> str:
    """A number of bytes as text, such as "1.2 MB".

    Examples:
        >>> in_words(1234567)
        '1.2 MB'
    """
    if size < 1000:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"
