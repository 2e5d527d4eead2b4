"""Address and status of an NDIF server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..core.errors import LayersimError, is_address, shown, without_secrets
from .failures import server_text


def host_of(remote: bool | str) -> str:
    """Return the address of the server that `remote` names.

    True stands for nnsight's setting NDIF_HOST.

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


def remove_secrets_of_record(record: logging.LogRecord) -> bool:
    """Log filter that removes logins and signatures from addresses."""
    # The message is complete, so that logging must not insert the arguments again.
    record.msg = without_secrets(record.getMessage())
    record.args = None
    return True


CRITICAL = ("nnsight", "transformers", "torch")
# Longest name or version of a server that is kept.
LONGEST_SERVER_NAME = 100


@dataclass(frozen=True)
class ServerStatus:
    """Status of an NDIF server and of one model on the server.

    Attributes:
        running: names of the loaded models.
        dtype: dtype of this model's weights on the server; "" if the server does not report it.
        job_limit: time limit for a job in seconds; None if there is no limit or none is reported.
        versions: versions of Python, nnsight, transformers and torch on the server.
        differences: descriptions of versions that differ from this process.
        server: address of the server; "" before the request.
        trusted: whether requests run in the process with the weights. If False, they run in a sandbox without weights and
            gradients.
        devices: devices of the blocks, as kernels see them.
    """

    running: tuple[str, ...]
    dtype: str
    job_limit: float | None
    versions: Mapping[str, str]
    differences: tuple[str, ...]
    server: str = ""
    trusted: bool = False
    devices: tuple[str, ...] = ()


def parse_status(model_key: str, status: Any, env: Any) -> ServerStatus:
    """Build a `ServerStatus` from the JSON of /status and /env. Malformed JSON raises ordinary Python errors.

    Args:
        model_key: the model's name on the server.
        status: the JSON of /status.
        env: the JSON of /env.
    """
    from nnsight.ndif import EnvComparison

    # Entries of other users' models may be empty; they must not fail this model.
    entries = [entry for entry in status["deployments"].values() if isinstance(entry, dict)]
    running = [entry for entry in entries if entry.get("application_state") == "RUNNING"]
    deployment: dict[str, Any] = next((entry for entry in running if entry.get("model_key") == model_key), {})
    comparison = EnvComparison(_local_env(), env)
    local_python = comparison.local_python
    server_python = _server_name(comparison.remote_python)
    differences = []
    if _minor(local_python) != _minor(server_python):
        differences.append(f"Python {local_python} here, {server_python} there")
    for package, versions in comparison.critical_mismatches.items():
        server_version = _server_name(versions["remote"])
        differences.append(f"{_server_name(package)} {versions['local']} here, {server_version} there")
    packages = env.get("packages", {})
    server_versions = {"python": server_python}
    for name in CRITICAL:
        if name in packages:
            server_versions[name] = _server_name(packages[name])
    return ServerStatus(
        running=tuple(sorted({_server_name(entry.get("repo_id")) for entry in running})),
        dtype=_dtype(deployment.get("dtype")),
        job_limit=_limit(deployment.get("execution_timeout_seconds")),
        versions=server_versions,
        differences=tuple(differences),
    )


def _server_name(name: Any) -> str:
    """A name or a version that the server reports, as it can be shown and recorded."""
    return server_text(name, most=LONGEST_SERVER_NAME)


def _dtype(reported: Any) -> str:
    """Name of a floating dtype of torch; "" if the server reports another text or none."""
    name = str(reported).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return name if isinstance(dtype, torch.dtype) and dtype.is_floating_point else ""


def _limit(reported: Any) -> float | None:
    """Time limit for a job in seconds; None if there is none.

    Raises:
        ValueError: the limit is no positive number.
    """
    if not reported:
        return None
    limit = float(reported)
    if not 0 < limit < float("inf"):
        raise ValueError(f"execution_timeout_seconds is {limit}")
    return limit


# Cached, because nnsight reads the files of every installed package.
@cache
def _local_env() -> dict[str, Any]:
    from nnsight.ndif import get_local_env

    env: dict[str, Any] = get_local_env()
    return env


def _minor(version: Any) -> list[str]:
    return str(version).split(".")[:2]
