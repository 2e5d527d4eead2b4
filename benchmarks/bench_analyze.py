"""Time and memory of `tl_layersim.analyze` beside the model's forward pass, two CKA packages, and cached activations.

    pip install -r benchmarks/requirements.txt
    python benchmarks/bench_analyze.py --model path/to/llama --data text.txt --out table.md
    python benchmarks/bench_analyze.py --shape vit-b16 --out table.md

With `--shape` the model has random weights and the data are random images or tokens, for the variants that take any model.
Every variant reads the same tokens with the same weights. They take turns in one process, in another order in each round, on
one thread; ratios are of the same round, in processor time, and the table gives their median and range. The FLOPs of a
variant's matrix products, over those of the blocks alone, say what the ratio would be if nothing else cost time. Memory is
taken in one process per variant.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Read when the packages below are imported. Nothing is fetched, and progress bars are no part of the measurement.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", MPLBACKEND="Agg")

import psutil
import torch
from nnsight import NNsight
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader, TensorDataset
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, ViTConfig, ViTModel
from turns import CLOCKS, Times, product_flops, ratios, spread, take_turns

import tl_layersim as lsim
from tl_layersim.activations.row_pools import PoolKernel
from tl_layersim.analyzers import Analyzer
from tl_layersim.core import Sums

MINIBATCH = 256
# Models with random weights, of the sizes that these configurations have by default.
SHAPES = {"vit-b16": (ViTModel, ViTConfig), "bert-base": (BertModel, BertConfig)}
Work = Callable[[Tensor], Tensor | None]  # runs on tokens `batch pos`; gives CKA `layer layer` where it measures it
kernel_seconds: list[float] = []


@dataclass(frozen=True)
class TimedCKA(lsim.CKA):
    """CKA that also says how long its kernel took: a difference of two long runs would be a noisy measure of that."""

    def kernel(self, first: Sums) -> PoolKernel:
        inner: Any = super().kernel(first)

        def timed(*samples: Any) -> dict[str, Tensor]:
            start = time.process_time()
            out: dict[str, Tensor] = inner.sums(*samples)
            kernel_seconds.append(time.process_time() - start)
            return out

        return replace(inner, sums=timed)


@dataclass(frozen=True)
class Models:
    """The loaded model, and the other ways in which it can be run."""

    path: str
    hf: Any
    tokenizer: Any

    def twin(self) -> Any:
        """The same weights in modules of their own: TransformerBridge and nnsight rebuild the modules that they wrap."""
        weights = {id(tensor): tensor for tensor in (*self.hf.parameters(), *self.hf.buffers())}
        return copy.deepcopy(self.hf, weights)

    def bridge(self) -> Any:
        """As a TransformerLens user has it."""
        return TransformerBridge.boot_transformers(self.path, hf_model=self.twin(), tokenizer=self.tokenizer)

    @property
    def options(self) -> dict[str, bool]:
        """Options of a bare forward pass."""
        return {"use_cache": False} if isinstance(getattr(self.hf.config, "use_cache", None), bool) else {}

    def base(self) -> tuple[Any, list[str]]:
        """A model with no unembedding and no cache, to the CKA packages' advantage, and modules that give the residuals."""
        base = self.twin().model
        base.config.use_cache = False
        return base, ["embed_tokens", *(f"layers.{i}" for i in range(len(base.layers)))]


# ---- (a) bare forward passes, (b) this package


def forward(model: nn.Module, **options: Any) -> Work:
    def work(tokens: Tensor) -> None:
        with torch.no_grad():
            model(tokens, **options)

    return work


def analyze(model: Any, *analyzers: Analyzer) -> Work:
    return lambda tokens: lsim.analyze(model, lsim.Data(tokens, batch_size=len(tokens)), list(analyzers))["cka"].values


# ---- (c) packages for CKA


def drop_hooks(model: nn.Module, layers: list[str]) -> None:
    """Both packages leave their hooks, and with them the activations, on the model: the next run would pay for it."""
    for name in layers:
        model.get_submodule(name)._forward_hooks.clear()


def with_ckatorch(models: Models) -> Work:
    """As in its README, one epoch: of activations `batch pos d_model` it takes each row for a minibatch of tokens."""
    from ckatorch import CKA

    base, layers = models.base()

    def work(tokens: Tensor) -> Tensor:
        # It passes a batch to the model as keyword arguments.
        loader = DataLoader([{"input_ids": row} for row in tokens], batch_size=len(tokens), shuffle=True)
        values = CKA(base, base, layers=layers, first_name="model")(loader, epochs=1)
        drop_hooks(base, layers)
        return values

    return work


class TokenSamples(nn.Module):
    """Hands each layer's output on as `sample d_model`, for a package that takes the first axis for the samples."""

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        super().__init__()
        self.model, self.taps = model, nn.ModuleList(nn.Identity() for _ in layers)
        for name, tap in zip(layers, self.taps, strict=True):
            # What a hook returns would replace the layer's output: it has to return None.
            model.get_submodule(name).register_forward_hook(lambda _m, _x, out, tap=tap: (tap(out.flatten(0, 1)), None)[1])

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


def with_torch_cka(models: Models, token_samples: bool) -> Work:
    """As in its README, a sample is a whole row, flattened; `compare` itself keeps gradients, here it may not.

    With `token_samples` rows go in one by one, each a minibatch of tokens: the statistic of the other variants.
    """
    from torch_cka import CKA

    base, layers = models.base()
    if token_samples:
        base, layers = TokenSamples(base, layers), [f"taps.{i}" for i in range(len(layers))]

    def work(tokens: Tensor) -> Tensor:
        loader = DataLoader(TensorDataset(tokens), batch_size=1 if token_samples else len(tokens))
        cka = CKA(base, base, "model", "model again", model1_layers=layers, model2_layers=layers)
        with torch.no_grad():
            cka.compare(loader)
        drop_hooks(base, layers)
        return cka.export()["CKA"]

    return work


# ---- (d) what one writes by hand


def hsic1(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 (the paper's letters)
    """Unbiased HSIC of two Gram matrices with zero diagonals (Song et al. 2012)."""
    n = len(k)
    middle = k.sum() * l.sum() / ((n - 1) * (n - 2))
    return ((k * l).sum() + middle - 2 / (n - 2) * (k.sum(0) @ l.sum(0))) / (n * (n - 3))


def by_hand(models: Models, everything: bool) -> Work:
    """run_with_cache, then a loop over pairs of layers: each pair once and no n^3 trace, as a careful user has it."""
    bridge = models.bridge()
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(bridge.cfg.n_layers))]

    def work(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(tokens, names_filter=None if everything else names)
            layers = [cache[name].flatten(0, 1) for name in names]
            parts = torch.randperm(len(layers[0])).split(MINIBATCH)
            cosine, cka = torch.ones(len(layers), len(layers)), torch.ones(len(layers), len(layers))
            for i, x in enumerate(layers):
                for j, y in enumerate(layers[:i]):
                    cosine[i, j] = cosine[j, i] = cosine_similarity(x, y, dim=-1).mean()
                    sums = torch.zeros(3)
                    for part in parts:
                        k, m = ((z[part] @ z[part].T).fill_diagonal_(0) for z in (x, y))
                        sums += torch.stack([hsic1(k, m), hsic1(k, k), hsic1(m, m)])
                    cka[i, j] = cka[j, i] = sums[0] / (sums[1] * sums[2]).sqrt()
        return cka

    return work


# Name: label, forward passes over the data, and what builds the run. Building it (imports, wrappers) is not measured.
ONE_PASS = (lsim.Cosine(center="none"), lsim.CKA())
VARIANTS: dict[str, tuple[str, int, Callable[[Models], Work]]] = {
    "a": ("(a) Hugging Face forward", 1, lambda m: forward(m.hf, **m.options)),
    # analyze() stops after the last block: set against (a) alone, its cost would look smaller than it is.
    "a-blocks": ("(a') blocks alone, no unembedding", 1, lambda m: forward(m.hf.base_model, **m.options)),
    "a-bridge": ("(a'') TransformerBridge forward", 1, lambda m: forward(m.bridge())),
    "b1": ('(b1) analyze `Cosine(center="none")`, `CKA()`', 1, lambda m: analyze(m.hf, *ONE_PASS)),
    "b1-cka": ("(b1) analyze `CKA()` alone", 1, lambda m: analyze(m.hf, TimedCKA())),
    "b2": ("(b2) analyze `Cosine()`, `CKA()`", 2, lambda m: analyze(m.hf, lsim.Cosine(), lsim.CKA())),
    "b3-bridge": ("(b3) b1 through TransformerBridge", 1, lambda m: analyze(m.bridge(), *ONE_PASS)),
    "b3-nnsight": ("(b3) b1 through nnsight", 1, lambda m: analyze(NNsight(m.twin()), *ONE_PASS)),
    "c1": ("(c) ckatorch", 2, with_ckatorch),
    "c2": ("(c) torch-cka, a sample is a row: another statistic", 2, lambda m: with_torch_cka(m, token_samples=False)),
    "c3": ("(c) torch-cka, a sample is a token", 2, lambda m: with_torch_cka(m, token_samples=True)),
    "d1": ("(d) run_with_cache of residuals, loop", 1, lambda m: by_hand(m, everything=False)),
    "d2": ("(d) run_with_cache of everything, loop", 1, lambda m: by_hand(m, everything=True)),
}
# What ratios refer to: timed in any case.
REFERENCES = ("a", "a-blocks")
# The variants that take any Hugging Face model.
ANY_MODEL = ("a", "a-blocks", "b1", "b1-cka", "b2", "b3-nnsight")


@dataclass
class Row:
    """What was measured of a variant besides times."""

    flops: int | None = None
    peak: float | None = None
    corner: float | None = None
    trouble: str = ""
    shown: bool = True


def load(args: argparse.Namespace) -> tuple[Models, Tensor]:
    if args.threads:
        torch.set_num_threads(args.threads)
    # Where memory runs out, a variant must fail by itself and not take the machine with it.
    limit = int(psutil.Process().memory_info().rss + 0.95 * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    if args.shape:
        return random_model(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    need = args.batch * args.seq_len
    # A part of the text is enough: no tokenizer makes tokens of 20 characters on average.
    text = Path(args.data).read_text(encoding="utf-8")[: 20 * need]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < need:
        raise SystemExit(f"{args.data} has {len(ids)} tokens; {need} are needed")
    return Models(args.model, model, tokenizer), torch.tensor(ids[:need]).view(args.batch, args.seq_len)


def random_model(args: argparse.Namespace) -> tuple[Models, Tensor]:
    """A model with random weights, and random images or tokens."""
    cls, config = SHAPES[args.shape]
    torch.manual_seed(0)
    model = cls(config()).eval()
    if args.shape == "vit-b16":
        size = model.config.image_size
        return Models("", model, None), torch.randn(args.batch, model.config.num_channels, size, size)
    return Models("", model, None), torch.randint(1000, model.config.vocab_size, (args.batch, args.seq_len))


def samples_in(models: Models, data: Tensor) -> int:
    """Number of positions of the data in the residual stream."""
    config = models.hf.config
    return len(data) * ((config.image_size // config.patch_size) ** 2 + 1) if data.is_floating_point() else data.numel()


def warm(work: Work, tokens: Tensor) -> None:
    """Late imports, thread pools and caches that belong to no single run."""
    work(tokens[:8] if tokens.is_floating_point() else tokens[:8, :16])


def with_peak(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and the highest resident size while it ran, less what stood there before, in MB."""
    gc.collect()
    # Freed memory that malloc still holds would hide as much of the run's own.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = psutil.Process().memory_info().rss
    # Linux resets its own high-water mark on this; sampling in a thread would miss short peaks.
    Path("/proc/self/clear_refs").write_text("5")
    values = work()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    return values, (peak - before) / 1e6


def peak_above_model(name: str, args: argparse.Namespace) -> dict[str, float | None]:
    """In a process of its own: highest resident size during one run, less what stood there before, in MB; and a CKA."""
    models, tokens = load(args)
    work = VARIANTS[name][2](models)
    warm(work, tokens)
    values, peak = with_peak(lambda: work(tokens))
    return {"peak": peak, "corner": None if values is None else float(values[0, -1])}


def measure_memory(rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        done = subprocess.run([sys.executable, *sys.argv, "--peak-of", name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            row.peak, row.corner = found["peak"], found["corner"]
        else:
            row.trouble = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:160].replace("|", "/")
        print(f"memory of {name}: {row.trouble or f'{row.peak:.0f} MB'}", file=sys.stderr, flush=True)


def measure_time(rows: dict[str, Row], models: Models, tokens: Tensor, repeats: int) -> Times:
    """Times of the variants and of the bare passes that ratios refer to; and the FLOPs of their products."""
    # What failed in a process of its own would fail here too, and end the others' measurement.
    names = [*(name for name in REFERENCES if name not in rows), *(name for name, row in rows.items() if not row.trouble)]
    works = {name: partial(VARIANTS[name][2](models), tokens) for name in names}
    for name, work in works.items():
        # Late imports, thread pools and caches belong to no single run; this one is not timed.
        rows.setdefault(name, Row(shown=False)).flops = product_flops(work)
    kernel_seconds.clear()
    return take_turns(works, repeats, lambda number, name: print(f"round {number}: {name}", file=sys.stderr, flush=True))


def report(rows: dict[str, Row], times: Times, residuals: float) -> str:
    """The table, and under it the comparisons that the project's claims rest on. `residuals` in MB."""

    def beyond(name: str) -> float:
        """Processor seconds beyond as many passes through the blocks alone as the variant makes."""
        pairs = zip(times[name]["processor"], times["a-blocks"]["processor"], strict=True)
        return statistics.median(s - VARIANTS[name][1] * blocks for s, blocks in pairs)

    lines = [
        "| variant | seconds | processor seconds | / (a) | / (a') | products' FLOPs / (a') | its forward passes "
        "| s beyond them, as (a') | peak MB above the loaded model | CKA(first, last) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        if not row.shown:
            continue
        cells = [VARIANTS[name][0], row.trouble, *[""] * 4, str(VARIANTS[name][1]), ""]
        if name in times:
            cells[1:3] = [spread(times[name][clock]) for clock in CLOCKS]
            cells[3:5] = [spread(ratios(times, name, other, "processor")) for other in REFERENCES]
            cells[5] = f"{(row.flops or 0) / (rows['a-blocks'].flops or 1):.3f}"
            cells[7] = f"{beyond(name):.2f}"
        cells += ["" if row.peak is None else f"{row.peak:.0f}", "" if row.corner is None else f"{row.corner:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"- Residuals of one batch: {residuals:.0f} MB."]
    for name in (n for n in rows if n.startswith("b")):
        peak, top = rows[name].peak, rows["a"].peak
        if peak is not None and top is not None:
            verdict = "yes" if peak <= top + 2 * residuals else "no"
            lines.append(f"- peak({name}) <= peak(a) + 2 x residuals: {verdict}, {peak:.0f} and {top + 2 * residuals:.0f} MB.")
    if "b1" in times:
        wall = spread(ratios(times, "b1", "a-blocks", "wall"))
        lines.append(f"- One pass with both analyzers, wall time over that of the blocks alone: {wall}.")
    if kernel_seconds and "b1-cka" in times:
        inside, outside = statistics.median(kernel_seconds), beyond("b1-cka")
        lines.append(f"- CKA part of b1: {inside:.2f} s in its kernel; analyze(CKA) takes {outside:.2f} s beyond (a').")
        for name in (n for n in times if n.startswith("c")):
            theirs = beyond(name)
            # The larger of our two measures, and both of their passes given to them: the ratio is no flattery.
            factor = theirs / max(inside, outside)
            lines.append(f"- {VARIANTS[name][0]}: {theirs:.2f} s beyond both its passes of (a'), {factor:.1f} x the CKA part.")
    return "\n".join(lines)


def machine(args: argparse.Namespace) -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.processor())
    packages = []
    for package in ("torch", "transformers", "transformer-lens", "nnsight", "tl_layersim", "ckatorch", "torch-cka"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{package} {importlib.metadata.version(package)}")
    # Other benchmarks, which call this too, have no shapes.
    shape = getattr(args, "shape", None)
    what = f"{args.batch} images" if shape == "vit-b16" else f"{args.batch} x {args.seq_len} tokens"
    return (
        f"{shape or 'the model'}: {what}, float32, median of {args.repeats}. {datetime.date.today()}; {cpu}, "
        f"{os.cpu_count()} cores, torch threads: {torch.get_num_threads()}, {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"load {os.getloadavg()[0]:.1f} at the end; Python {platform.python_version()}, {', '.join(packages)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Llama-like Hugging Face model, of about 135M parameters")
    parser.add_argument("--data", help="text file that the tokens are taken from")
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights, without --model and --data")
    parser.add_argument("--batch", type=int, default=16, help="rows of tokens")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a row")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch; 0 for its own choice")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants to run; default: all that take the model")
    parser.add_argument("--out", help="file for the table, in Markdown")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.shape is None) == (args.model is None or args.data is None):
        parser.error("either --shape, or --model with --data")
    args.only = args.only or list(ANY_MODEL if args.shape else VARIANTS)
    if args.shape and set(args.only) - set(ANY_MODEL):
        parser.error(f"--shape takes the variants {', '.join(ANY_MODEL)}")
    if args.peak_of:
        print(json.dumps(peak_above_model(args.peak_of, args)))
        return
    rows = {name: Row() for name in args.only}
    measure_memory(rows)
    models, tokens = load(args)
    times = measure_time(rows, models, tokens, args.repeats)
    config = models.hf.config
    residuals = (config.num_hidden_layers + 1) * samples_in(models, tokens) * config.hidden_size * 4 / 1e6
    text = f"{report(rows, times, residuals)}\n\n{machine(args)}\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
