"""Time and memory of measures on a sparse file of vectors that is larger than memory.

    python benchmarks/bench_vectors.py --gigabytes 20 --folder /tmp

The file is a hole with numbers at the beginning of each row, so that it takes a small part of its size on the disk. Peak memory
is that of the process, above its size before the measurement.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import numpy as np

import tl_layersim as lsim

# Numbers of each vector that are not in a hole.
FILLED = 1024


def sparse_file(path: Path, gigabytes: float, positions: int, width: int) -> np.ndarray:
    """A memory map of half-precision vectors, `row pos width`, of which the first numbers are random."""
    rows = round(gigabytes * 1e9 / (2 * positions * width))
    vectors = np.lib.format.open_memmap(path, "w+", np.float16, (rows, positions, width))
    for row in range(rows):
        vectors[row, :, :FILLED] = np.random.default_rng(row).normal(size=(positions, FILLED))
    vectors.flush()
    return np.load(path, mmap_mode="r")


def peak_memory() -> int:
    """Largest memory of this process so far in bytes, of Linux."""
    kilobytes = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert kilobytes is not None
    return 1000 * int(kilobytes[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--width", type=int, default=16384)
    options = parser.parse_args()
    analyzers = {"CKA": lsim.CKA(), "Cosine": lsim.Cosine(center="none")}
    print("| measure | rows | time | read per second | memory |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        whole = sparse_file(Path(folder) / "vectors.npy", options.gigabytes, options.positions, options.width)
        vectors = lsim.from_vectors({"x": whole})
        for name, analyzer in analyzers.items():
            # Libraries are loaded before memory is measured.
            lsim.analyze(lsim.from_vectors({"x": np.ones((64, 8)).cumsum(0) ** 0.5}), analyzers=analyzer)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            before = peak_memory()
            began = time.monotonic()
            lsim.analyze(vectors, analyzers=analyzer)
            seconds = time.monotonic() - began
            added = (peak_memory() - before) / 1e6
            speed = whole.nbytes / 1e6 / seconds
            print(f"| `{name}` | {len(whole)} | {seconds:.0f} s | {speed:.0f} MB | {added:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
