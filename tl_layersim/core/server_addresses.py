"""Server addresses, and how messages show them without logins and keys."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def is_address(text: str) -> bool:
    """Whether a text is an http address that contains no secret except a login.

    Args:
        text: any text.
    """
    try:
        parts = urlsplit(text)
        # A query, or an @ in the path, may be part of a secret.
        suspicious = parts.query or parts.fragment or "@" in parts.path or parts.port == 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not suspicious


def shown(remote: bool | str) -> str:
    """The value of `remote` for a message: an address without its login; any other text is not shown.

    Args:
        remote: as a user passed it.

    Examples:
        >>> shown("https://me:secret@ndif.example:8001"), shown("secret"), shown(True)
        ("'https://ndif.example:8001'", 'a text that is not an address', 'True')
    """
    if isinstance(remote, bool) or remote == "local":
        return repr(remote)
    return repr(without_login(remote)) if is_address(remote) else "a text that is not an address"


def without_login(host: str) -> str:
    """An address without user name and password.

    Args:
        host: the address.

    Examples:
        >>> without_login("https://me:secret@ndif.example:8001")
        'https://ndif.example:8001'
    """
    parts = urlsplit(host)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
