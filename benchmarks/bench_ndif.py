"""Tokens a second through a server on this machine beside the same analysis in this process.

    TL_LAYERSIM_NDIF_PYTHON=.venv-ndif/bin/python python benchmarks/bench_ndif.py --model path/to/model

Each repeat runs, in an order that turns, this process and the server. Both sides use one thread, and a server needs a core
beside that of this process. Where other programs share the machine, compare processor seconds: a run through a server has
several processes, and gets more of a busy machine. The model
lies on a stand-in for the hub, so that the server loads it by name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ndif.hub import Hub
from tests.ndif.server import Server

LENGTH = 256  # as analyze cuts texts where it is not told otherwise
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--rows", type=int, default=96)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32], help="sequences in a request")
    asked = arguments.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ndif", dir="/tmp"))
    hub = Hub(root / "hub")
    shutil.copytree(asked.model, root / "hub/bench" / asked.model.name)
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root / "client")}
    (root / "a").mkdir()
    try:
        with Server(os.environ["TL_LAYERSIM_NDIF_PYTHON"], root / "a", hub.url) as server:
            print(table(f"bench/{asked.model.name}", server, asked))
    finally:
        hub.close()
        shutil.rmtree(root, ignore_errors=True)


class Run(NamedTuple):
    """One run: seconds of its data pass, processor seconds of this process and of the model's process on the server."""

    seconds: float
    here: float
    there: float


def model_seconds(server: Server) -> float:
    """Processor seconds so far of the server's processes that hold models."""
    total = 0.0
    for pid in server.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if command.startswith(b"ray::SandboxActor"):
            total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(name: str, server: Server, asked: argparse.Namespace) -> str:
    import torch
    from nnsight import TransformersModel
    from transformers import AutoTokenizer

    import tl_layersim as lsim

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(name)
    shell = TransformersModel(name, task="text-generation", tokenizer=tokenizer)
    near = TransformersModel(name, task="text-generation", tokenizer=tokenizer, dispatch=True, dtype=torch.float32)
    texts = [text for text in lsim.demo_text() if len(text) > 40] * 8
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=64), lsim.Trajectory()]

    def run(model: object, count: int) -> Run:
        there, here = model_seconds(server), time.process_time()
        data = lsim.Data(texts, batch_size=count, seq_len=LENGTH, pack=True, max_tokens=asked.rows * LENGTH)
        report = lsim.analyze(model, data, analyzers)
        here, there = time.process_time() - here, model_seconds(server) - there
        record = report["cka"].provenance
        # The seconds of the pass alone: opening a source asks the server three questions and runs one token.
        return Run(record.seconds, here, there)

    lines = [
        "| sequences a request | requests | local tokens/s | server / local | processor s a request: local | model on the "
        "server | this process beside the server |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for count in asked.sequences:
        far = lsim.open_model(shell, remote=server.url, tokens_per_request=count * LENGTH)
        kinds = {"local": partial(run, near, count), "server": partial(run, far, count)}
        for kind in kinds.values():
            kind()
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for repeat in range(asked.repeats):
            for kind in list(kinds)[:: -1 if repeat % 2 else 1]:
                runs[kind].append(kinds[kind]())
            print(count, {kind: f"{taken[-1].seconds:.2f} s" for kind, taken in runs.items()}, file=sys.stderr, flush=True)
        requests = asked.rows // count
        ratios = [local.seconds / there.seconds for local, there in zip(runs["local"], runs["server"], strict=True)]
        processor = [
            spread([each / requests for each in values], 3)
            for values in (
                [measured.here for measured in runs["local"]],
                [measured.there for measured in runs["server"]],
                [measured.here for measured in runs["server"]],
            )
        ]
        speeds = [asked.rows * LENGTH / measured.seconds for measured in runs["local"]]
        lines.append(f"| {count} | {requests} | {spread(speeds, 0)} | {spread(ratios)} | {' | '.join(processor)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    # Last: it goes offline when it is imported.
    from bench_analyze import machine

    return "\n".join([*lines, "", machine(argparse.Namespace(batch=asked.rows, seq_len=LENGTH, repeats=asked.repeats))])


if __name__ == "__main__":
    main()
