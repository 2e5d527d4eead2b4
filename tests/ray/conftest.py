"""A real cluster of Ray on this machine, which nothing else can reach."""

from __future__ import annotations

import logging
import secrets
import tempfile
from contextlib import contextmanager

import pytest

SETTINGS = {
    # Ray binds all interfaces and the address of the machine, by which it also replaces 127.0.0.1 as `_node_ip_address`. Where
    # clusters of several machines are off, as by default on macOS and Windows, all of its processes bind 127.0.0.1 alone: the
    # GCS server, the raylet, the agent of runtime environments, the driver and each worker.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Calls need this token. Without it Ray writes one to the home directory.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def ray_on_loopback():
    """A context in which Ray is imported, and started, so that only this machine can reach it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
        assert ray.util.get_node_ip_address() == "127.0.0.1", "Ray was imported before, and would bind other addresses"
        yield ray


@pytest.fixture(scope="module")
def cluster():
    """Ray with four CPUs, which leaves no process and no file."""
    # The paths of sockets have at most 107 bytes: the folder of a test would be too long.
    folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    with folder, ray_on_loopback() as ray:
        try:
            ray.init(
                # Never another cluster of this machine.
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder.name,
            )
            yield ray
        finally:
            ray.shutdown()


@pytest.fixture
def one_thread():
    """As many threads as Ray gives a worker of one core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
