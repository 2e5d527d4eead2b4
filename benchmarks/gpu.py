"""What `docs/performance.md` reports for a CPU, on the GPU that is present, in under eight minutes; weights are random.

    python benchmarks/gpu.py                                  # prints tables, writes gpu_benchmark.json
    python benchmarks/gpu.py --device cpu --shape tiny        # to see that it runs

Parts: one pass of analyzers beside the bare forward pass, coupling of two blocks at d = 4096, an aligned training step, early
exit. Variants of a part take turns, so that drift of the clock rate cancels in the ratios of each round. The device is
synchronised before and after each run. Memory is the peak of the device's allocator above what the model holds.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read when the packages below are imported. Nothing is fetched, and progress bars are no part of the measurement.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tl_layersim as lsim

Work = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of the models and of the data.

    Attributes:
        llama: of the model for all parts but the coupling.
        rows: of tokens in the pass; a quarter of them in a training step.
        length: tokens in a row.
        block: of the two blocks for the coupling.
        new: tokens that early exit writes.
        memory_gb: of the device, for training with AdamW's moments.
    """

    llama: dict[str, int]
    rows: int
    length: int
    block: dict[str, int]
    new: int
    memory_gb: float


def _llama(d: int, layers: int, heads: int, kv: int, mlp: int, words: int) -> dict[str, int]:
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return dict(zip(names, (d, layers, heads, kv, mlp, words), strict=True))


BLOCK = _llama(4096, 2, 32, 8, 14336, 1000)
# By falling memory; "1b" has the proportions of Llama 3.2 1B, with head and embedding apart.
SHAPES = {
    "1b": Shape(_llama(2048, 16, 32, 8, 8192, 128256), 8, 1024, BLOCK, 64, 36),
    "small": Shape(_llama(1024, 16, 16, 8, 4096, 32000), 8, 512, BLOCK, 64, 8),
    "tiny": Shape(_llama(64, 4, 4, 2, 128, 200), 4, 32, _llama(64, 2, 4, 2, 128, 200), 4, 0),
}
# Parts, and the fraction of the time that each may take.
PARTS = {"pass": 0.35, "coupling": 0.15, "training": 0.25, "early exit": 0.25}


@dataclass
class Timings:
    """Measurements of the variants of one part.

    Attributes:
        seconds: of each variant in each round.
        peak: largest memory of each variant above the models, in bytes; None where the device does not count it.
        bases: variants that the others are divided by.
        warm: whether rounds followed a warm-up; False where the warm-up alone took all the time of the part.
        held: bytes of the model.
        more: numbers of the part, by name.
    """

    seconds: dict[str, list[float]]
    peak: dict[str, int | None]
    bases: tuple[str, ...]
    warm: bool = True
    held: int | None = None
    more: dict[str, float] = field(default_factory=dict)


class Device:
    """The device that is measured.

    Args:
        name: "cuda", "cpu", or another device of torch.
    """

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.counts = self.torch.type == "cuda"

    def wait(self) -> None:
        """Wait until everything that was launched is done."""
        if self.torch.type != "cpu":
            getattr(torch, self.torch.type).synchronize()

    def held(self) -> int | None:
        return torch.cuda.memory_allocated(self.torch) if self.counts else None

    def run(self, work: Work) -> tuple[float, int | None]:
        """Seconds of one run, and its peak memory above what was held before."""
        self.wait()
        before = self.held()
        if self.counts:
            torch.cuda.reset_peak_memory_stats(self.torch)
        start = time.perf_counter()
        work()
        self.wait()
        seconds = time.perf_counter() - start
        return seconds, None if before is None else torch.cuda.max_memory_allocated(self.torch) - before

    def name(self) -> str:
        if not self.counts:
            return platform.processor() or platform.machine()
        about = torch.cuda.get_device_properties(self.torch)
        return f"{about.name}, {about.total_memory / 2**30:.0f} GiB"

    def memory_gb(self) -> float:
        return torch.cuda.get_device_properties(self.torch).total_memory / 1e9 if self.counts else 0.0

    def release(self) -> None:
        gc.collect()
        if self.counts:
            torch.cuda.empty_cache()


class Clock:
    """Time that is left, and how much of it a part may take.

    Args:
        seconds: in all.
    """

    def __init__(self, seconds: float) -> None:
        self.end, self.left = time.monotonic() + seconds, dict(PARTS)

    def deadline(self, part: str) -> float:
        """The moment at which a part must end; what earlier parts did not use is shared out."""
        rest = self.end - time.monotonic()
        fraction = self.left.pop(part)
        return time.monotonic() + rest * fraction / (fraction + sum(self.left.values()))


def measure(device: Device, variants: dict[str, Work], deadline: float, repeats: int, bases: tuple[str, ...] = ()) -> Timings:
    """Run all variants in turn: once to warm up, then for as many rounds as fit before the deadline.

    Args:
        device: that runs them.
        variants: by name.
        deadline: of `time.monotonic`.
        repeats: largest number of rounds.
        bases: variants that the others are divided by; default: the first.
    """
    bases = bases or (next(iter(variants)),)
    held, start = device.held(), time.monotonic()
    first = {name: device.run(work) for name, work in variants.items()}
    # A round of warm runs takes at most as long as the first one.
    round_seconds = time.monotonic() - start
    found = Timings({name: [] for name in variants}, dict.fromkeys(variants), bases, held=held)
    rounds = 0
    while rounds < repeats and time.monotonic() + round_seconds < deadline:
        start = time.monotonic()
        for name, work in variants.items():
            seconds, peak = device.run(work)
            found.seconds[name].append(seconds)
            if peak is not None:
                found.peak[name] = max(peak, found.peak[name] or 0)
        round_seconds = time.monotonic() - start
        rounds += 1
    if not rounds:
        found.warm = False
        found.seconds = {name: [seconds] for name, (seconds, _) in first.items()}
        found.peak = {name: peak for name, (_, peak) in first.items()}
    return found


@contextmanager
def model_of(sizes: dict[str, int], dtype: torch.dtype, device: Device) -> Iterator[LlamaForCausalLM]:
    """A Llama with random weights, made on the device and freed at the end."""
    torch.manual_seed(0)
    with device.torch:
        config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, max_position_embeddings=4096)
        model = LlamaForCausalLM(config).to(dtype).eval()
    try:
        yield model
    finally:
        del model
        device.release()


def tokens_of(rows: int, length: int, words: int) -> Tensor:
    return torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(0))


# ---- parts: each gives the works that are compared, the first of them the one that others are divided by


def one_pass(device: Device, shape: Shape, deadline: float, repeats: int) -> Timings:
    """Analyzers over one batch, beside the bare forward pass and the blocks alone."""
    with model_of(shape.llama, torch.bfloat16, device) as model:
        tokens = tokens_of(shape.rows, shape.length, shape.llama["vocab_size"])
        there = tokens.to(device.torch)

        def bare(module: Any) -> Work:
            def work() -> None:
                with torch.no_grad():
                    module(there, use_cache=False)

            return work

        def analyze(*analyzers: Any) -> Work:
            return lambda: lsim.analyze(model, lsim.Data(tokens, batch_size=len(tokens)), list(analyzers))

        variants = {
            "forward pass": bare(model),
            "blocks alone": bare(model.model),
            '`Cosine(center="none")`, `CKA()`': analyze(lsim.Cosine(center="none"), lsim.CKA()),
            "`CKA()`": analyze(lsim.CKA()),
            "`Cosine()`, `CKA()`, two passes": analyze(lsim.Cosine(), lsim.CKA()),
            "`LogitLens()`": analyze(lsim.LogitLens()),
        }
        found = measure(device, variants, deadline, repeats, ("forward pass", "blocks alone"))
        found.more["tokens"] = tokens.numel()
        found.more["MB of residuals"] = 4e-6 * (len(model.model.layers) + 1) * tokens.numel() * shape.llama["hidden_size"]
        return found


def coupling(device: Device, shape: Shape, deadline: float, repeats: int) -> Timings:
    """Jacobians of two blocks at the last of 64 tokens and their coupling, in float32."""
    with model_of(shape.block, torch.float32, device) as model:
        tokens = tokens_of(1, min(64, shape.length), shape.block["vocab_size"])

        def couple(method: str) -> Work:
            return lambda: lsim.analyze(model, tokens, lsim.BlockCoupling(k=10, method=method))

        variants = {"`BlockCoupling(method='dense')`": couple("dense"), "`BlockCoupling(method='krylov')`": couple("krylov")}
        found = measure(device, variants, deadline, repeats)
        found.more["d_model"] = shape.block["hidden_size"]
        return found


def training(device: Device, shape: Shape, deadline: float, repeats: int) -> Timings:
    """Forward, backward and AdamW in bfloat16: the model's own loss, and the aligned loss of all layers."""
    with model_of(shape.llama, torch.bfloat16, device) as model:
        model.train()
        tokens = tokens_of(max(1, shape.rows // 4), shape.length, shape.llama["vocab_size"]).to(device.torch)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
        # Moments and gradients are there before anything is measured.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimiser.step()

        def step(loss: Callable[[], Tensor]) -> Work:
            def work() -> None:
                loss().backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=False)

            return work

        layers = len(model.model.layers)
        two = [0.0] * layers
        two[layers // 2 - 1], two[-1] = 1 / 3, 2 / 3
        variants = {
            "standard: the model's own loss": step(lambda: model(tokens, labels=tokens, use_cache=False).loss),
            "aligned: `aligned_loss`": step(lambda: lsim.training.aligned_loss(model, tokens)),
            "aligned, two layers": step(lambda: lsim.training.aligned_loss(model, tokens, weights=two)),
        }
        found = measure(device, variants, deadline, repeats)
        head = model.lm_head.weight.numel()
        inside = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
        found.more["tokens"] = tokens.numel()
        found.more["FLOPs of an aligned step / a standard one"] = (inside + layers * head) / (inside + head)
        return found


def early_exit(device: Device, shape: Shape, deadline: float, repeats: int) -> Timings:
    """Greedy decoding of one row: transformers' `generate`, no exits, and exits of all tokens after half of the blocks."""
    with model_of(shape.llama, torch.bfloat16, device) as model:
        prompt = tokens_of(1, min(64, shape.length), shape.llama["vocab_size"]).to(device.torch)
        half = shape.llama["num_hidden_layers"] // 2

        def plain() -> None:
            more = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": shape.new, "max_new_tokens": shape.new}
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **more)

        whole, exits = lsim.EarlyExit(model, 1.0), lsim.EarlyExit(model, 0.0, at=(half - 1,))

        def write(early: Any) -> Work:
            return lambda: early.generate(prompt, max_new_tokens=shape.new, eos_token_id=())

        variants = {
            "`generate` of transformers": plain,
            "`EarlyExit`, threshold 1": write(whole),
            f"`EarlyExit`, every token after {half} of {2 * half} blocks": write(exits),
        }
        found = measure(device, variants, deadline, repeats)
        found.more["new tokens"] = shape.new
        return found


RUN = {"pass": one_pass, "coupling": coupling, "training": training, "early exit": early_exit}


# ---- tables


def table(part: str, found: Timings) -> list[str]:
    """Median seconds (range), the ratios to the bases within each round, and peak memory."""
    lines = [f"### {part[0].upper()}{part[1:]}", ""]
    lines.append(f"| variant | seconds | {' | '.join(f'/ {base}' for base in found.bases)} | peak MB above the model |")
    lines.append("| --- | ---: |" + " ---: |" * len(found.bases) + " ---: |")
    for name, seconds in found.seconds.items():
        ratios = [[own / one for own, one in zip(seconds, found.seconds[base], strict=True)] for base in found.bases]
        cells = [_range(seconds, 4), *(_range(one, 2) for one in ratios)]
        peak = found.peak[name]
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if peak is None else f'{peak / 1e6:,.0f}'} |")
    rounds = len(found.seconds[found.bases[0]])
    facts = [f"{rounds} rounds" if found.warm else "one round without a warm-up, because time was short"]
    facts += [f"{name}: {value:,.6g}" for name, value in found.more.items()]
    if found.held is not None:
        facts.append(f"MB of the model: {found.held / 1e6:,.0f}")
    return [*lines, "", "; ".join(facts) + ".", ""]


def _range(values: list[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def record(device: Device, shape_name: str, results: dict[str, Timings], errors: dict[str, str]) -> dict[str, Any]:
    """Everything that was measured and on what, for a JSON file."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tl_layersim")}
    driver = {"cuda": torch.version.cuda, "capability": torch.cuda.get_device_capability()} if device.counts else {}
    parts = {part: vars(found) for part, found in results.items()}
    about = {
        "device": device.name(),
        "shape": shape_name,
        "sizes": vars(SHAPES[shape_name]),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    return about | driver | {"date": str(datetime.date.today()), "versions": versions, "parts": parts, "errors": errors}


def main() -> None:
    """Measure the parts, print tables in Markdown and write the JSON record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, help="default: the largest whose training fits into the device's memory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further round begins")
    parser.add_argument("--repeats", type=int, default=9, help="largest number of rounds of a part")
    parser.add_argument("--json", type=Path, default=Path("gpu_benchmark.json"))
    options = parser.parse_args()
    # Imports and the writing of tables take some seconds of the time.
    clock = Clock(60 * options.minutes * 0.9)
    warnings.simplefilter("ignore")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device is present; --device cpu --shape tiny shows that the script runs")
    device = Device(options.device)
    shape_name = options.shape or next(name for name, one in SHAPES.items() if device.memory_gb() >= one.memory_gb)
    results: dict[str, Timings] = {}
    errors: dict[str, str] = {}
    lines = []
    clock.left = {part: PARTS[part] for part in options.parts}
    for part in options.parts:
        try:
            results[part] = RUN[part](device, SHAPES[shape_name], clock.deadline(part), options.repeats)
            lines = table(part, results[part])
        except (RuntimeError, lsim.LayersimError) as error:
            # The other parts are worth their time.
            errors[part] = f"{type(error).__name__}: {error}"
            lines = [f"### {part}", "", f"Failed: {errors[part]}", ""]
        print("\n".join(lines), flush=True)
        device.release()
    about = record(device, shape_name, results, errors)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    how = f"shape {shape_name}, random weights, median (range) of rounds that take turns"
    print(f"{about['device']}, {how}. {about['date']}; {versions}.")
    options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
