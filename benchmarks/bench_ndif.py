"""Tokens a second through a server on this machine beside the same analysis in this process.

    TL_LAYERSIM_NDIF_PYTHON=.venv-ndif/bin/python python benchmarks/bench_ndif.py --model path/to/model

Each remote run stands between two local ones of the same batches, on as many threads as the server has: one. The model lies
on a stand-in for the hub, so that the server loads it by name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ndif.hub import Hub
from tests.ndif.server import Server

LENGTH = 256  # as analyze cuts texts where it is not told otherwise


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", required=True, type=Path)
    arguments.add_argument("--rows", type=int, default=96)
    arguments.add_argument("--repeats", type=int, default=3)
    asked = arguments.parse_args()
    root = Path(tempfile.mkdtemp(prefix="ndif", dir="/tmp"))
    hub = Hub(root / "hub")
    shutil.copytree(asked.model, root / "hub/bench" / asked.model.name)
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root / "client")}
    (root / "a").mkdir()
    try:
        with Server(os.environ["TL_LAYERSIM_NDIF_PYTHON"], root / "a", hub.url) as server:
            print(table(f"bench/{asked.model.name}", server.url, asked.rows, asked.repeats))
    finally:
        hub.close()
        shutil.rmtree(root, ignore_errors=True)


def table(name: str, url: str, rows: int, repeats: int) -> str:
    import torch
    from nnsight import TransformersModel
    from transformers import AutoTokenizer

    import tl_layersim as lsim
    from tl_layersim.core import Provenance

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(name)
    far = TransformersModel(name, task="text-generation", tokenizer=tokenizer)
    near = TransformersModel(name, task="text-generation", tokenizer=tokenizer, dispatch=True, dtype=torch.float32)
    texts = [text for text in lsim.demo_text() if len(text) > 40] * 8
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=64), lsim.Trajectory()]

    def run(model: object, count: int, **where: object) -> tuple[float, Provenance]:
        # The pass alone: opening a source asks the server three questions and runs one token.
        report = lsim.analyze(
            model, texts, analyzers, batch_size=count, seq_len=LENGTH, pack=True, max_tokens=rows * LENGTH, **where
        )
        record = report["cka"].provenance
        return record.tokens / record.seconds, record

    lines = [
        "| sequences a request | local tokens/s | remote tokens/s | remote / local | requests | kB sent a request | kB back |"
    ]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for count in (1, 8, 32):
        run(far, count, remote=url, tokens_per_request=count * LENGTH)
        ratios, here, there = [], [], []
        for _ in range(repeats):
            before = run(near, count)[0]
            speed, record = run(far, count, remote=url, tokens_per_request=count * LENGTH)
            after = run(near, count)[0]
            here.append((before + after) / 2)
            there.append(speed)
            ratios.append(speed / here[-1])
        [place] = record.options["remote"]
        requests = place["requests"]
        lines.append(
            f"| {count} | {statistics.median(here):.0f} | {statistics.median(there):.0f} | {statistics.median(ratios):.2f} | "
            f"{requests} | {place['bytes_sent'] / requests / 1e3:.1f} | {place['bytes_received'] / requests / 1e3:.1f} |"
        )
    # Last: it goes offline when it is imported.
    from bench_analyze import machine

    return "\n".join([*lines, "", machine(argparse.Namespace(batch=rows, seq_len=LENGTH, repeats=repeats))])


if __name__ == "__main__":
    main()
