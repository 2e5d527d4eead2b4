"""A run of eight shards in processes of their own, of which three are killed in the middle and repeated.

`main` writes the report of one process and that of the shards, and what was in the files of the killed shards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from ..running.options import called

# About two batches of 16 rows for each shard, in two forward passes each.
SHARDS = 8
KILLED = 3
ROWS = 280
LENGTH = 7
# Forward pass of a killed shard before which the shard is killed at the latest.
LAST_PASS = 5


def settings() -> tuple[Any, Any, list[Any], dict[str, Any]]:
    """Model, data, analyzers and options of all calls."""
    import tl_layersim as lsim

    from ..models.tiny_models import random_tokens, tiny_llama

    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=8), lsim.LogitLens()]
    return tiny_llama(), list(random_tokens(ROWS, LENGTH)), analyzers, {"batch_size": 8, "intervals": True}


def measure(number: int, folder: Path, arguments: tuple[Any, Any, list[Any], dict[str, Any]], told: int | None) -> None:
    """One shard, as a child process; it tells of each of its forward passes where it is to be killed."""
    import tl_layersim as lsim
    from tl_layersim.sources.hooked_module import HookedSource

    model, data, analyzers, options = arguments
    run = HookedSource.run
    passes: list[int] = []

    def slow(self: Any, batch: Any, kernels: Any) -> Any:
        passes.append(1)
        if told is not None:
            os.write(told, b".")
            # The next pass after those that are told of waits to be killed, however late that is.
            time.sleep(0.05 if len(passes) < LAST_PASS else 3600)
        return run(self, batch, kernels)

    HookedSource.run = slow  # type: ignore[method-assign]
    called(
        lsim.analyze, model, data, analyzers, shard=(number, SHARDS), save_to=folder / f"part-{number}.safetensors", **options
    )


def fork(number: int, folder: Path, arguments: Any, told: int | None = None) -> int:
    """The id of a child process that measures one shard."""
    child = os.fork()
    if child:
        return child
    try:
        measure(number, folder, arguments, told)
    except BaseException as error:
        print(f"shard {number}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def kill_one(number: int, folder: Path, arguments: Any, draw: random.Random) -> dict[str, Any]:
    """Start a shard, kill it before one of its batches or in the middle of it, and say what its file holds."""
    from tl_layersim.engine.shards import read_part

    reading, told = os.pipe()
    child = fork(number, folder, arguments, told)
    os.close(told)
    for _ in range(draw.randint(1, LAST_PASS - 1)):
        os.read(reading, 1)
    time.sleep(draw.uniform(0, 0.06))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    part = read_part(folder / f"part-{number}.safetensors")
    held = part.tally.tree.texts if part.tallies else 0
    return {"number": number, "signal": os.WTERMSIG(status), "done": part.is_done, "held": held}


def main(path: str) -> None:
    """Run one process over all data, and all shards."""
    import torch

    import tl_layersim as lsim
    from tl_layersim.core import resumable_file

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resumable_file.SECONDS_BETWEEN_SAVES, resumable_file.SAVE_SPACING = 0.0, 0
    folder = Path(path)
    arguments = settings()
    model, data, analyzers, options = arguments
    alone = called(lsim.analyze, model, data, analyzers, **options)
    draw = random.Random(3)
    doomed = draw.sample(range(SHARDS), KILLED)
    parts = folder / "parts"
    parts.mkdir()
    killed = [kill_one(number, parts, arguments, draw) for number in doomed]
    order = draw.sample(range(SHARDS), SHARDS)
    running: set[int] = set()
    failed = 0
    while order or running:
        while order and len(running) < 2:
            running.add(fork(order.pop(), parts, arguments))
        child, status = os.wait()
        running.discard(child)
        failed += status != 0
    merged = lsim.merge(draw.sample(sorted(parts.iterdir()), SHARDS))
    alone.save(folder / "alone.safetensors")
    merged.save(folder / "merged.safetensors")
    (folder / "found.json").write_text(json.dumps({"killed": killed, "failed": failed}))
