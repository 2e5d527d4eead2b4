"""Processor time of importing the package, opening a tiny model and analysing 8 rows, beside a forward pass, for several trees.

    python benchmarks/bench_tiny.py [path/to/another/tree ...]

Every tree is a folder that holds `tl_layersim` and `tests`; the first one is the tree of this file. Processes of the trees take
turns, so that a slow moment of the machine meets all of them. Each number is a median over processes of a median over calls, on
one thread. All processes import from compiled files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MODELS = ("Llama", "GPT-2", "demo model", "TransformerBridge", "NNsight(module)")
ROWS = 8


def milliseconds(call: Callable[[], Any], calls: int = 1) -> float:
    """Median processor time of a call."""
    times: list[float] = []
    for _ in range(calls):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def tiny_model(name: str) -> tuple[Any, Any, Callable[[], Any]]:
    """A model by its name in `MODELS`, its data, and a function that runs a forward pass over all rows."""
    import torch
    from tests.tiny_models import random_tokens, tiny_gpt2, tiny_llama

    import tl_layersim as lsim

    rows = random_tokens(ROWS)
    data: Any = rows
    if name == "demo model":
        model = lsim.demo_model()
        data = [" ".join(text.split()[:14]) for text in lsim.demo_text()[:ROWS]]
        rows = model.tokenizer(data, return_tensors="pt", padding=True)["input_ids"]
    elif name == "TransformerBridge":
        from tests.wrapped_models import bridge

        model = bridge(tiny_gpt2())
    elif name == "GPT-2":
        model = tiny_gpt2()
    else:
        model = tiny_llama()
    module = model
    if name == "NNsight(module)":
        import nnsight

        # NNsight changes the modules for good.
        module = tiny_llama()
        model = nnsight.NNsight(model)

    def forward() -> None:
        with torch.no_grad():
            module(rows)

    return model, data, forward


def measure_model(name: str, calls: int) -> dict[str, float]:
    """Milliseconds of each step with one model, in this process."""
    import torch

    torch.set_num_threads(1)
    model, data, forward = tiny_model(name)
    import tl_layersim as lsim
    from tl_layersim.remote.open_model import open_source

    # Whether the source that is opened or the model is passed, the first call imports what it needs.
    source = open_source(model)
    steps: dict[str, Callable[[], Any]] = {
        "forward pass": forward,
        "open": lambda: open_source(model),
        "analyze, opened": lambda: lsim.analyze(source, data, lsim.Cosine()),
        "analyze, bare": lambda: lsim.analyze(model, data, lsim.Cosine()),
    }
    times: dict[str, float] = {}
    for step, call in steps.items():
        call()
        call()
        times[step] = milliseconds(call, calls)
    return times


def measure_import() -> dict[str, float]:
    """Milliseconds of the import behind torch and transformers, and of the first two calls of `analyze` in this process."""
    import torch
    import transformers

    torch.set_num_threads(1)
    # transformers imports a model when it is asked for.
    _ = transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast

    def import_package() -> None:
        import tl_layersim as lsim

        # A public name is imported when it is asked for.
        _ = lsim.analyze, lsim.Cosine

    times = {"import": milliseconds(import_package)}
    model, data, _ = tiny_model("demo model")
    import tl_layersim as lsim

    times["first analyze"] = milliseconds(lambda: lsim.analyze(model, data, lsim.Cosine()))
    return times


def run_in_process(tree: Path, part: str, calls: int, compiled: str) -> dict[str, float]:
    """Milliseconds of the steps of one part, measured by this file in a new process that imports from a tree."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": compiled,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, __file__, "--part", part, "--calls", str(calls)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} in {tree} failed:\n{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    """Measure every tree, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="further trees, such as one of an earlier version")
    parser.add_argument("--calls", type=int, default=20, help="timed calls in a process")
    parser.add_argument("--processes", type=int, default=3, help="processes of each tree and model")
    parser.add_argument("--only", nargs="+", choices=("import", *MODELS), default=["import", *MODELS], help="parts to measure")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        is_import = arguments.part == "import"
        times = measure_import() if is_import else measure_model(arguments.part, arguments.calls)
        print(json.dumps(times))
        return
    trees = [HERE, *(tree.resolve() for tree in arguments.trees)]
    print("| model | step | " + " | ".join(f"{tree} (ms)" for tree in trees) + " |")
    print("| --- | --- | " + " | ".join("---:" for _ in trees) + " |")
    with tempfile.TemporaryDirectory() as folder:
        compiled = os.environ.get("PYTHONPYCACHEPREFIX", folder)
        # Compiled before anything is timed.
        for tree in trees:
            run_in_process(tree, "import", 1, compiled)
        for part in arguments.only:
            rounds: list[list[dict[str, float]]] = []
            for _ in range(arguments.processes):
                rounds.append([run_in_process(tree, part, arguments.calls, compiled) for tree in trees])
            for step in rounds[0][0]:
                medians = []
                for number in range(len(trees)):
                    medians.append(statistics.median(times_of_trees[number][step] for times_of_trees in rounds))
                label = "demo model" if part == "import" else part
                print(f"| {label} | {step} | " + " | ".join(f"{median:.1f}" for median in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
