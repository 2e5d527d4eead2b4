"""Address and API key of an NDIF server: read from nnsight's settings, and kept out of logs and messages."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from ..core.errors import LayersimError, without_secrets
from ..core.server_addresses import is_address, shown, without_login


def host_of(remote: bool | str) -> str:
    """The server's address: nnsight's setting NDIF_HOST if `remote` is True, else `remote`. The API key is nnsight's.

    Raises:
        LayersimError: `remote` is not an address.
    """
    from nnsight.schema.config import CONFIG

    host = str(CONFIG.API.HOST if remote is True else remote).rstrip("/")
    if not is_address(host):
        raise LayersimError(
            f"`remote` is {shown(remote)}; it must be True, 'local', or the address of a server, such as "
            "'http://127.0.0.1:8001'."
        )
    return host


class WithoutSecrets(logging.Filter):
    """Removes logins and signatures from the addresses in log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_secrets(record.getMessage()), None
        return True


def keep_logins_out_of_logs() -> None:
    """Add the filter to the logger of httpx, which logs the address of each request at level INFO."""
    logger = logging.getLogger("httpx")
    if not any(isinstance(known, WithoutSecrets) for known in logger.filters):
        logger.addFilter(WithoutSecrets())


def redacted(text: str, host: str = "") -> str:
    """A server's message without the API key and the login, because some servers repeat what they were sent."""
    from nnsight.schema.config import CONFIG

    for secret in (CONFIG.API.APIKEY, urlsplit(host).password):
        # A secret of a few letters would also occur in ordinary words.
        if secret and len(secret) >= 6:
            text = text.replace(secret, "***")
    return without_secrets(text.replace(host, without_login(host)) if host else text)
