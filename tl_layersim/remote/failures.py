"""Failures of requests to an NDIF server, and its texts as they are shown in messages."""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import urlsplit

from ..core.errors import without_login, without_secrets


class JobTooLong(Exception):
    """A server ended a job at its time limit."""


class TransientFailure(Exception):
    """A failure of the network or the server; the request may be sent again."""


class ModelNotRunning(TransientFailure):
    """The server does not run the model and cannot start it now."""


class DamagedAnswer(TransientFailure):
    """An answer of the server arrived incomplete or unreadable; few further attempts are worth it."""


class UnsafeAnswer(Exception):
    """An answer of the server that is not what the request can return. The text continues "The result ..."."""


class RequestFailed(Exception):
    """A server's own report that a request failed.

    Args:
        text: the text of the server, as it was sent.
        code: the HTTP status; None if the text is the status of a job.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


# Escape sequences of terminals, with ESC or as single C1 characters: commands with parameters (CSI), strings up to a
# terminator (OSC, DCS, SOS, PM, APC), and all others.
ESCAPES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x1b[ -/]*[0-~]?"
)
# Longest text of a server in a message.
LONGEST_SERVER_TEXT = 300
# Longest text of a server that is looked at: a text of any length would take any time.
LONGEST_READ = 20_000
# Categories of Unicode for control characters; invisible ones, such as changes of the writing direction; halves of pairs;
# characters of private fonts; and unassigned ones.
INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}


def server_text(text: object, host: str = "", most: int = LONGEST_SERVER_TEXT) -> str:
    """A text that came from a server, as one line that can be shown and recorded.

    Escape sequences of terminals and invisible characters are removed, then the API key, logins and tokens. Long texts are cut.

    Args:
        text: the text; other values are converted to text.
        host: address of the server, with the login that is removed.
        most: largest number of characters.

    Examples:
        >>> server_text("\\x1b[31mred\\x1b[0m\\r\\nand \\u202eplain")
        'red and plain'
    """
    from nnsight.schema.config import CONFIG

    plain = ESCAPES.sub("", str(text)[:LONGEST_READ])
    # Line breaks and tabs are control characters too, but separate words.
    spaced = "".join(" " if character.isspace() else character for character in plain)
    visible = "".join(character for character in spaced if unicodedata.category(character) not in INVISIBLE)
    line = " ".join(visible.split())
    for secret in (CONFIG.API.APIKEY, urlsplit(host).password):
        # A secret of a few letters would also occur in ordinary words.
        if secret and len(secret) >= 6:
            line = re.sub(re.escape(secret), "***", line, flags=re.IGNORECASE)
    if host:
        line = line.replace(host, without_login(host))
    line = without_secrets(line)
    if len(line) > most:
        line = f"{line[: most - 3]}..."
    return line


def last_line(text: str) -> str:
    """Last line of a traceback or a server's message, where the failure is named."""
    lines = [line.strip() for line in text[-LONGEST_READ:].strip().splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "nothing"


def is_network_error(error: Exception) -> bool:
    """Whether an error is one of the network, or of a library for it."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | EOFError) or library in ("httpx", "httpcore", "h11", "websocket", "pydantic_core")
