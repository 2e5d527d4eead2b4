"""Errors, warnings and log of this package. Logins and tokens are removed from their texts."""

from __future__ import annotations

import logging
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
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


# A login after the scheme of an address, whose slashes `pathlib` makes one; a login without a scheme; a secret parameter in an
# address; and an access token of the Hugging Face hub, also inside a longer name.
_LOGIN = re.compile(r"((?<!\w)[a-z][\w+.-]*://|(?<!\w)(?:https?|ftps?|wss?|ssh|s3):/)[^/\s]*@", re.IGNORECASE)
_BARE_LOGIN = re.compile(r"(^|[\s'\"`(\[=,])[^/\s:@'\"`]+:[^/\s@]+@")
_SECRET_PARAMETER = re.compile(
    r"([?&;][^=&;\s]*(?:token|key|secret|passw|signature|credential|auth)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE
)
_HUB_TOKEN = re.compile(r"(hf_|api_org_)[A-Za-z0-9]{16,}")

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
        ValueError.__init__(self, printable(without_secrets(message)))


def without_secrets(text: str) -> str:
    """Remove logins, access tokens and signatures from a text. Texts pass through here before they enter a file or a log.

    Examples:
        >>> without_secrets("https://me:secret@host/model?token=abc")
        'https://host/model?token=***'
    """
    text = _BARE_LOGIN.sub(r"\1", _LOGIN.sub(r"\1", text))
    return _HUB_TOKEN.sub(r"\1***", _SECRET_PARAMETER.sub(r"\1***", text))


# Characters that reorder the text around them.
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, lines: bool = True) -> str:
    r"""A text whose control characters are written as escapes, so that a name from outside cannot steer a terminal.

    Args:
        text: the text.
        lines: whether line ends and tabs stay as they are.

    Examples:
        >>> print(printable("a\x1b[31mb\rc"), printable("a\nb", lines=False))
        a\x1b[31mb\rc a\nb
    """
    if text.isprintable():
        return text
    return "".join(_printable_character(character, lines) for character in text)


def _printable_character(character: str, lines: bool) -> str:
    if character in "\n\t":
        return character if lines else repr(character)[1:-1]
    unsafe = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _BIDIRECTIONAL
    return character.encode("unicode_escape").decode() if unsafe else character


def excerpt(text: str, length: int) -> str:
    """The beginning of a text without secrets. They are removed before the text is cut: half a login is not recognised.

    Args:
        text: the text.
        length: number of characters.
    """
    return without_secrets(text)[:length]


def remove_secrets(error: BaseException) -> None:
    """Remove secrets from an exception, and from all exceptions that a traceback would print with it.

    Public functions call it before an exception leaves them: errors of the operating system and of other libraries quote the
    path or the address that they were given.

    Args:
        error: the exception, whose texts are replaced in place. An exception before it that builds its text anew is detached.
    """
    cleaned_ids: set[int] = set()
    waiting = [error]
    while waiting:
        current = waiting.pop()
        cleaned_ids.add(id(current))
        _clean_texts(current)
        for link in ("__cause__", "__context__"):
            earlier = getattr(current, link)
            if earlier is None or id(earlier) in cleaned_ids:
                continue
            waiting.append(earlier)
            _clean_texts(earlier)
            if _shows_secrets(earlier):
                # To set `__cause__` also sets `__suppress_context__`.
                suppresses_context = current.__suppress_context__
                setattr(current, link, None)
                current.__suppress_context__ = suppresses_context
        waiting += [inner for inner in getattr(current, "exceptions", ()) if id(inner) not in cleaned_ids]


def _shows_secrets(error: BaseException) -> bool:
    try:
        text = str(error)
    except Exception:
        return False
    return without_secrets(text) != text


def _clean_texts(error: BaseException) -> None:
    """Remove secrets from the texts that an exception holds: arguments, notes and attributes, such as the path of a file."""
    error.args = tuple(_cleaned(value) for value in error.args)
    for name in ("filename", "filename2", "strerror"):
        value = getattr(error, name, None)
        cleaned = _cleaned(value)
        if cleaned is not value:
            setattr(error, name, cleaned)
    for name, value in list(vars(error).items()):
        vars(error)[name] = [_cleaned(item) for item in value] if name == "__notes__" else _cleaned(value)


def _cleaned(value: Any) -> Any:
    """The value, or its text without secrets if it is a text or a path that shows some."""
    if not isinstance(value, str | os.PathLike):
        return value
    text = os.fspath(value)
    if not isinstance(text, str) or without_secrets(text) == text:
        return value
    return without_secrets(text)


@contextmanager
def as_argument(inner: str, argument: str) -> Iterator[None]:
    """A context manager in whose errors an argument has the name that it has in the public function.

    Functions that open models and read data write `model` and `data`; the user may have passed `model_b` and `eval_data`.

    Args:
        inner: name of the argument of the functions inside.
        argument: the argument of the public function, such as "model_b", with an entry after a blank, such as "models 'a'".

    Examples:
        >>> with as_argument("data", "eval_data"):
        ...     raise LayersimError("`data` is 3.")
        Traceback (most recent call last):
        tl_layersim.core.errors.LayersimError: `eval_data` is 3.
    """
    try:
        yield
    except LayersimError as error:
        name, _, entry = argument.partition(" ")
        replacement = f"`{name}` ({entry})" if entry else f"`{name}`"
        error.args = (str(error).replace(f"`{inner}`", replacement),)
        raise


class LayersimTypeError(LayersimError, TypeError):
    """Error for an argument of the wrong type, or a tensor of the wrong shape."""


def warn(text: str) -> None:
    """Issue a `LayersimWarning` that points to the user's own line.

    Args:
        text: the warning; secrets in it are removed.
    """
    text = printable(without_secrets(text))
    record = _record.get()
    if record is not None:
        texts, issued = record
        texts.append(text)
        if not issued:
            return
    # The first frame outside this package and the libraries that wrap its functions.
    internal = (__name__.split(".")[0], "jaxtyping", "beartype", "contextlib")
    depth = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in internal:
        depth += 1
        frame = frame.f_back
    warnings.warn(text, LayersimWarning, stacklevel=depth)


@contextmanager
def recorded_warnings(*, issued: bool = True) -> Iterator[list[str]]:
    """A context manager that collects the texts of this package's warnings.

    Args:
        issued: False hides these warnings from the user. Warnings of other packages are always issued.
    """
    texts: list[str] = []
    token = _record.set((texts, issued))
    try:
        yield texts
    finally:
        _record.reset(token)


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
