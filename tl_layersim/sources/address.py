"""Addresses of servers, and what is shown of them: never a login, never a key."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from ..errors import LayersimError


def host_of(remote: bool | str) -> str:
    """The server's address: nnsight's own setting (NDIF_HOST), or the one given; the key is nnsight's in either case."""
    from nnsight.schema.config import CONFIG

    host = str(CONFIG.API.HOST if remote is True else remote).rstrip("/")
    if not _is_address(host):
        raise LayersimError(
            "This is no address of a server.",
            given=f"remote={shown(remote)}",
            expected="True, for the server that nnsight is set to; 'local'; or http://host:port, https://host",
            do="remote='http://127.0.0.1:8001'; a key goes into NDIF_API_KEY, not into an address",
        )
    return host


def _is_address(text: str) -> bool:
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
    return repr(without_login(remote)) if _is_address(remote) else "a text that is no address"


def without_login(host: str) -> str:
    """An address without a user's name and password in it.

    >>> without_login("https://me:secret@ndif.example:8001")
    'https://ndif.example:8001'
    """
    parts = urlsplit(host)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def redacted(text: str, host: str = "") -> str:
    """A server's words without the key: some servers repeat what they were sent."""
    from nnsight.schema.config import CONFIG

    for secret in (CONFIG.API.APIKEY, urlsplit(host).password):
        # Of a few letters nothing could be told from words.
        if secret and len(secret) >= 6:
            text = text.replace(secret, "***")
    return text.replace(host, without_login(host)) if host else text
