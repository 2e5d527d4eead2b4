"""Addresses of servers as messages show them: without a login, without a key."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def is_address(text: str) -> bool:
    """Whether a text is the address of a server, with nothing in it that could be a secret but a login."""
    try:
        parts = urlsplit(text)
        # A query or an @ further on may be part of a secret.
        odd = parts.query or parts.fragment or "@" in parts.path or parts.port == 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not odd


def shown(remote: bool | str) -> str:
    """What was given as remote=, for a message: an address without its login, and nothing of what is no address.

    >>> shown("https://me:secret@ndif.example:8001"), shown("secret"), shown(True)
    ("'https://ndif.example:8001'", 'a text that is no address', 'True')
    """
    if isinstance(remote, bool) or remote == "local":
        return repr(remote)
    return repr(without_login(remote)) if is_address(remote) else "a text that is no address"


def without_login(host: str) -> str:
    """An address without a user's name and password in it.

    >>> without_login("https://me:secret@ndif.example:8001")
    'https://ndif.example:8001'
    """
    parts = urlsplit(host)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
