"""Time and memory of `tl_layersim.analyze` beside the model's forward pass, two CKA packages, and cached activations.

    pip install -r benchmarks/requirements.txt
    python benchmarks/bench_analyze.py --model path/to/llama --data text.txt --out table.md

Every variant reads the same tokens with the same weights. Times are interleaved in one process: each run stands beside
a bare forward pass of its own, so that drift of the machine cancels in ratios. Memory is taken in a process per variant.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# All of these are read when the packages below are imported. Nothing is fetched, and bars are no part of the measurement.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", MPLBACKEND="Agg")

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim
from tl_layersim.source import Kernel
from tl_layersim.sums import Sums

MINIBATCH = 256
Work = Callable[[Tensor], Tensor | None]  # runs on tokens `batch pos`; gives CKA `layer layer` where it has one
KERNEL_SECONDS: list[float] = []


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        label: in the table.
        prepare: builds the run from the loaded model; imports and wrappers are made here and are not measured.
        passes: how many forward passes it makes over the data.
    """

    label: str
    prepare: Callable[[Bench], Work]
    passes: int = 1


@dataclass(frozen=True)
class Bench:
    """The loaded model and what was asked for."""

    args: argparse.Namespace
    model: Any
    tokenizer: Any

    def twin(self) -> Any:
        """The same weights in modules of their own: TransformerBridge and nnsight rebuild the modules that they wrap."""
        weights = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, weights)

    def bridge(self) -> Any:
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(
            self.args.model, hf_model=self.twin(), tokenizer=self.tokenizer, dtype=torch.float32
        )

    def analyze(self, model: Any, *analyzers: lsim.Analyzer) -> Work:
        def work(tokens: Tensor) -> Tensor:
            report = lsim.analyze(model, tokens, list(analyzers), batch_size=len(tokens), tokenizer=self.tokenizer)
            return report["cka"].values

        return work


@dataclass(frozen=True)
class TimedCKA(lsim.CKA):
    """CKA that also says how long its kernel took: a difference of two long runs would be a noisy measure of that."""

    def kernel(self, first: Sums) -> Kernel:
        inner = super().kernel(first)

        def timed(*views: lsim.View) -> dict[str, Tensor]:
            start = time.perf_counter()
            out = inner(*views)
            KERNEL_SECONDS.append(time.perf_counter() - start)
            return out

        return timed


# ---- (a) bare forward passes


def forward(bench: Bench) -> Work:
    def work(tokens: Tensor) -> None:
        with torch.no_grad():
            bench.model(tokens, use_cache=False)

    return work


def forward_blocks(bench: Bench) -> Work:
    """Without the unembedding: analyze() stops after the last block, so a plain forward would flatter it."""

    def work(tokens: Tensor) -> None:
        with torch.no_grad():
            bench.model.model(tokens, use_cache=False)

    return work


def forward_bridge(bench: Bench) -> Work:
    bridge = bench.bridge()

    def work(tokens: Tensor) -> None:
        with torch.no_grad():
            bridge(tokens)

    return work


# ---- (b) this package


def through_nnsight(bench: Bench) -> Work:
    from nnsight import NNsight

    return bench.analyze(NNsight(bench.twin()), lsim.Cosine(center="none"), lsim.CKA())


# ---- (c) packages for CKA


class TokenSamples(nn.Module):
    """Hands each layer's output on as `sample d_model`, for packages that take the first axis for the samples."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        super().__init__()
        self.model = model
        self.taps = nn.ModuleList(nn.Identity() for _ in layers)
        for name, tap in zip(layers, self.taps, strict=True):
            model.get_submodule(name).register_forward_hook(lambda _module, _args, out, tap=tap: void(tap(out.flatten(0, 1))))

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


class Rows(Dataset):
    """Rows of tokens as the keyword arguments that ckatorch passes to the model."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index]}


def void(_value: object) -> None:
    """A hook that returns something would replace the layer's output."""


def base_model(bench: Bench) -> tuple[Any, list[str]]:
    """A model without unembedding or cache, to the packages' advantage, and names of modules that give the residuals."""
    base = bench.twin().model
    base.config.use_cache = False
    return base, ["embed_tokens", *(f"layers.{i}" for i in range(len(base.layers)))]


@contextlib.contextmanager
def hooks_removed(module: nn.Module) -> Any:
    """Both packages leave their hooks, and with them the activations, on the model: the next run would pay for it."""
    before = {sub: set(sub._forward_hooks) for sub in module.modules()}
    try:
        yield
    finally:
        for sub, known in before.items():
            for key in set(sub._forward_hooks) - known:
                del sub._forward_hooks[key]


def with_ckatorch(bench: Bench) -> Work:
    """As its README has it, one epoch: of activations `batch pos d_model` it takes each row for a minibatch of tokens."""
    from ckatorch import CKA

    base, layers = base_model(bench)

    def work(tokens: Tensor) -> Tensor:
        loader = DataLoader(Rows(tokens), batch_size=len(tokens), shuffle=True)
        with hooks_removed(base):
            return CKA(base, base, layers=layers, first_name="model")(loader, epochs=1)

    return work


def with_torch_cka(bench: Bench, token_samples: bool = False) -> Work:
    """As its README has it, a sample is a whole row, flattened. With `token_samples` rows go in one by one instead, each a
    minibatch of tokens, which is the statistic of the other variants. `compare` itself keeps gradients; here it may not.
    """
    from torch_cka import CKA

    base, layers = base_model(bench)
    if token_samples:
        base, layers = TokenSamples(base, layers), [f"taps.{i}" for i in range(len(layers))]

    def work(tokens: Tensor) -> Tensor:
        loader = DataLoader(TensorDataset(tokens), batch_size=1 if token_samples else len(tokens))
        with hooks_removed(base), torch.no_grad():
            cka = CKA(base, base, "model", "model again", model1_layers=layers, model2_layers=layers)
            cka.compare(loader)
            return cka.export()["CKA"]

    return work


# ---- (d) what one writes by hand


def hsic1(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 (the paper's letters)
    """Unbiased HSIC of two Gram matrices with zero diagonals (Song et al. 2012)."""
    n = len(k)
    middle = k.sum() * l.sum() / ((n - 1) * (n - 2))
    return ((k * l).sum() + middle - 2 / (n - 2) * (k.sum(0) @ l.sum(0))) / (n * (n - 3))


def by_hand(bench: Bench, everything: bool) -> Work:
    """run_with_cache, then a loop over pairs of layers. It computes each pair once and no n^3 product: a careful user."""
    bridge = bench.bridge()
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(bridge.cfg.n_layers))]

    def gram(x: Tensor) -> Tensor:
        return (x @ x.T).fill_diagonal_(0)

    def work(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(tokens, names_filter=None if everything else names)
            layers = [cache[name].flatten(0, 1) for name in names]
            order = torch.randperm(len(layers[0])).split(MINIBATCH)
            cosine, cka = torch.ones(len(layers), len(layers)), torch.ones(len(layers), len(layers))
            for i, x in enumerate(layers):
                for j, y in enumerate(layers[:i]):
                    cosine[i, j] = cosine[j, i] = cosine_similarity(x, y, dim=-1).mean()
                    grams = [(gram(x[part]), gram(y[part])) for part in order]
                    xy, xx, yy = (sum(hsic1(*pair) for pair in pairs) for pairs in (
                        grams, [(k, k) for k, _ in grams], [(l, l) for _, l in grams],  # noqa: E741
                    ))
                    cka[i, j] = cka[j, i] = xy / (xx * yy).sqrt()
        return cka

    return work


VARIANTS: dict[str, Variant] = {
    "a": Variant("(a) Hugging Face forward", forward),
    "a-blocks": Variant("(a') forward of the blocks alone, no unembedding", forward_blocks),
    "a-bridge": Variant("(a'') TransformerBridge forward", forward_bridge),
    "b1": Variant(
        '(b1) analyze, `Cosine(center="none")` + `CKA()`',
        lambda b: b.analyze(b.model, lsim.Cosine(center="none"), TimedCKA()),
    ),
    "b1-cka": Variant("(b1) analyze, `CKA()` alone", lambda b: b.analyze(b.model, TimedCKA())),
    "b2": Variant("(b2) analyze, `Cosine()` + `CKA()`", lambda b: b.analyze(b.model, lsim.Cosine(), lsim.CKA()), passes=2),
    "b3-bridge": Variant(
        "(b3) as b1, through TransformerBridge", lambda b: b.analyze(b.bridge(), lsim.Cosine(center="none"), lsim.CKA())
    ),
    "b3-nnsight": Variant("(b3) as b1, through nnsight", through_nnsight),
    "c1": Variant("(c) ckatorch", with_ckatorch, passes=2),
    "c2": Variant("(c) torch-cka, a sample is a row", with_torch_cka, passes=2),
    "c3": Variant("(c) torch-cka, a sample is a token", lambda b: with_torch_cka(b, token_samples=True), passes=2),
    "d1": Variant("(d) run_with_cache, residuals only, + loop", lambda b: by_hand(b, everything=False)),
    "d2": Variant("(d) run_with_cache, everything, + loop", lambda b: by_hand(b, everything=True)),
}


@dataclass
class Row:
    """What was measured of a variant; lists hold one value per repeat."""

    seconds: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    peak: float | None = None
    corner: float | None = None
    trouble: str = ""


def load(args: argparse.Namespace) -> tuple[Bench, Tensor]:
    if args.threads:
        torch.set_num_threads(args.threads)
    # Where memory runs out, a variant must fail by itself and not take the machine with it.
    limit = int(psutil.Process().memory_info().rss + 0.95 * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    need = args.batch * args.seq_len
    # No token of this text is longer than 20 characters on average: a part is enough.
    text = Path(args.data).read_text(encoding="utf-8")[: 20 * need]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < need:
        raise SystemExit(f"{args.data} has {len(ids)} tokens; {need} are needed")
    return Bench(args, model, tokenizer), torch.tensor(ids[:need]).view(args.batch, args.seq_len)


def warm(work: Work, tokens: Tensor) -> None:
    """Imports, thread pools and caches that belong to no single run."""
    work(tokens[:, : min(16, tokens.shape[1])][:8])


def peak_above_model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own: highest resident size during one run, less what the loaded model takes."""
    bench, tokens = load(args)
    work = VARIANTS[name].prepare(bench)
    warm(work, tokens)
    gc.collect()
    # Freed memory that malloc still holds would hide as much of the run's own.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = psutil.Process().memory_info().rss
    # Linux resets its own high-water mark on this; sampling in a thread would miss short peaks.
    Path("/proc/self/clear_refs").write_text("5")
    values = work(tokens)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    return {"peak": (peak - before) / 1e6, "corner": None if values is None else float(values[0, -1])}


def measure_memory(names: list[str], rows: Mapping[str, Row]) -> None:
    for name in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            rows[name].peak, rows[name].corner = found["peak"], found["corner"]
        else:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            rows[name].trouble = f"exit {done.returncode}: {''.join(last)[:160]}"
        print(f"memory of {name}: {rows[name].trouble or round(rows[name].peak or 0)}", file=sys.stderr, flush=True)


def measure_time(names: list[str], rows: Mapping[str, Row], bench: Bench, tokens: Tensor) -> None:
    """Each variant right after a bare forward pass, all variants in turn, and again."""
    works = {name: VARIANTS[name].prepare(bench) for name in names}
    reference = forward(bench)

    def seconds(work: Work) -> float:
        gc.collect()
        start = time.perf_counter()
        work(tokens)
        return time.perf_counter() - start

    for work in (*works.values(), reference):
        warm(work, tokens)
    KERNEL_SECONDS.clear()
    seconds(reference)
    for repeat in range(bench.args.repeats):
        for name, work in works.items():
            rows[name].forward.append(seconds(reference))
            rows[name].seconds.append(seconds(work))
            print(f"time {repeat} of {name}: {rows[name].seconds[-1]:.2f} s", file=sys.stderr, flush=True)


def table(rows: Mapping[str, Row], bench: Bench, tokens: Tensor) -> str:
    """The table, and the sentences that the project's claims are checked by."""
    config = bench.model.config
    residuals = (config.num_hidden_layers + 1) * tokens.numel() * config.hidden_size * 4 / 1e6
    ratio = {n: statistics.median(s / f for s, f in zip(r.seconds, r.forward, strict=True)) for n, r in rows.items() if r.seconds}
    blocks = ratio.get("a-blocks", 1.0)

    def beyond(name: str, forward_ratio: float) -> float:
        passes = VARIANTS[name].passes * forward_ratio
        return statistics.median(s - passes * f for s, f in zip(rows[name].seconds, rows[name].forward, strict=True))

    lines = [
        "| variant | seconds | / (a) | forward passes | s beyond its passes of (a) | s beyond its passes of (a') "
        "| peak MB above the model | CKA(first, last) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        label, passes = VARIANTS[name].label, VARIANTS[name].passes
        peak = "" if row.peak is None else f"{row.peak:.0f}"
        corner = "" if row.corner is None else f"{row.corner:.3f}"
        if name in ratio:
            cells = [f"{statistics.median(row.seconds):.2f}", f"{ratio[name]:.2f}", str(passes)]
            cells += [f"{beyond(name, 1.0):.2f}", f"{beyond(name, blocks):.2f}"] if name != "a" else ["", ""]
        else:
            cells = [row.trouble.replace("|", "/"), "", str(passes), "", ""]
        lines.append("| " + " | ".join([label, *cells, peak, corner]) + " |")
    lines += ["", f"- Residuals of one batch: {residuals:.0f} MB ({config.num_hidden_layers + 1} layers, {tokens.numel()} tokens)."]
    for limit in ("a", "a-blocks"):
        for name in (n for n in rows if n.startswith("b")):
            peak, top = rows[name].peak, rows[limit].peak if limit in rows else None
            if peak is not None and top is not None:
                bound = top + 2 * residuals
                verdict = "yes" if peak <= bound else "NO"
                lines.append(f"- peak({name}) <= peak({limit}) + 2 x residuals: {verdict} ({peak:.0f} <= {bound:.0f} MB).")
    if KERNEL_SECONDS and "b1-cka" in ratio:
        inside, outside = statistics.median(KERNEL_SECONDS), beyond("b1-cka", blocks)
        lines.append(f"- CKA part of b1: {inside:.2f} s in its kernel; analyze(CKA) takes {outside:.2f} s beyond (a').")
        for name in (n for n in ratio if n.startswith("c")):
            theirs = beyond(name, blocks)
            lines.append(
                f"- {VARIANTS[name].label}: {theirs:.2f} s beyond its own two passes of (a'), "
                f"{theirs / inside:.1f} x the kernel, {theirs / outside:.1f} x analyze(CKA) beyond (a')."
            )
    return "\n".join(lines)


def machine(args: argparse.Namespace) -> str:
    info = Path("/proc/cpuinfo")
    cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), platform.processor())
    packages = ("torch", "transformers", "transformer-lens", "nnsight", "tl_layersim", "ckatorch", "torch-cka")
    found = []
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return (
        f"{datetime.date.today()}; {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f} at the end; {platform.system()}, "
        f"Python {platform.python_version()}, {', '.join(found)}.\n"
        f"{args.batch} x {args.seq_len} tokens, float32, median of {args.repeats}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Llama-like Hugging Face model of about 135M parameters")
    parser.add_argument("--data", required=True, help="text file that the tokens are taken from")
    parser.add_argument("--batch", type=int, default=16, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 for its own choice")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants to run")
    parser.add_argument("--out", help="file for the table, in Markdown")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print(json.dumps(peak_above_model(args.peak_of, args)))
        return
    rows = {name: Row() for name in args.only}
    measure_memory(args.only, rows)
    bench, tokens = load(args)
    # What failed in a process of its own would fail here, and take the others' times with it.
    measure_time([name for name in args.only if not rows[name].trouble], rows, bench, tokens)
    text = f"{table(rows, bench, tokens)}\n\n{machine(args)}\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
