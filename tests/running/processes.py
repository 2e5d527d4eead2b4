"""Other processes of tests: forks of one process that has imported the libraries, which takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from ..ndif.server import free_ports

# Started with the first process that is asked for, and ended with this one. It never imports the package itself.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "nnsight", "accelerate", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"]
)


def started(script: str, *arguments: str, **environment: str) -> BaseProcess:
    """A process that runs a script, with `sys.argv[1:]` and variables added to its environment."""
    process = FORKS.Process(target=_run, args=(script, arguments, environment), daemon=True)
    process.start()
    return process


def _run(script: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = arguments
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


def finish(*processes: BaseProcess, seconds: float = 1500) -> None:
    """Wait until processes end; raises an error if one of them fails or takes longer."""
    try:
        for process in processes:
            process.join(seconds)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def kill_when(path: Path, process: BaseProcess, seconds: float = 900) -> None:
    """Kill a process as soon as a file exists that it writes."""
    end = time.monotonic() + seconds
    while not path.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert path.exists()


def run_in_group(script: str, size: int, *arguments: str, **environment: str) -> None:
    """Run a script in the processes of a group of `torch.distributed`, which only this machine can reach."""
    [port] = free_ports(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size)}
    finish(*(started(script, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **place, **environment) for rank in range(size)))
