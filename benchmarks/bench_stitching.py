"""A training step against whole models, the closed form against training, and memory.

    python benchmarks/bench_stitching.py --model LLAMA --small LLAMA --pair LLAMA LLAMA --data text.txt --out table.md

The step: front and back are two copies of `--model`, joined in the middle; each step of ours stands beside one of each naive
way, so that drift of the machine cancels in ratios. Memory is taken in one process per variant. The closed form: time until it
has its adapter, beside the time in which training from the identity comes to the same training loss (or the time after which it
was stopped); for `--small` with a copy of itself in another orthogonal basis, and for `--pair`, two models of independent runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_analyze import machine, with_peak
from studies.real_models import load
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.data.batches import Batch, Batches
from tl_layersim.remote.open_model import open_split_model
from tl_layersim.stitching.activation_store import ActivationStore
from tl_layersim.stitching.adapters import ADAPTER_KINDS
from tl_layersim.stitching.fitting import Progress, StitchDescent, identity_adapter, least_squares

ROWS, LENGTH = 4, 128
PATIENCE = 12
NAMES = {
    "naive": "both models whole, weights not frozen",
    "frozen": "both models whole, weights frozen, front without gradients",
    "ours": "ours",
}


def rows_of(model: Any, text: Path, rows: int, length: int) -> Tensor:
    """Full rows of a text, each with BOS."""
    ids = model.tokenizer(text.read_text(encoding="utf-8")[: 12 * rows * length], verbose=False)["input_ids"]
    step = length - 1
    bos = model.tokenizer.bos_token_id
    return torch.tensor([[bos, *ids[i * step : (i + 1) * step]] for i in range(rows)])


def batches_of(model: Any, tokens: Tensor, size: int) -> tuple[Batch, ...]:
    return tuple(Batches(lsim.Data(tokens, batch_size=size), open_split_model(model).model))


class Steps:
    """One optimiser step of an affine adapter between the middles of two models, by hand and by this package."""

    def __init__(self, front: Any, back: Any, tokens: Tensor) -> None:
        self.front, self.back, self.tokens = front, back, tokens
        self.layer = len(front.model.layers) // 2
        d = front.config.hidden_size
        self.weight, self.bias = torch.nn.Parameter(torch.eye(d)), torch.nn.Parameter(torch.zeros(d))
        self.models = [open_split_model(front), open_split_model(back)]
        self.acts = ActivationStore(self.models[0], self.layer, batches_of(front, tokens, len(tokens)))

    def naive(self) -> None:
        """Both models whole, a hook between them, gradients of everything, as one writes it first."""
        self._by_hand(frozen=False)

    def frozen(self) -> None:
        """The same with frozen weights, and the front outside autograd."""
        self._by_hand(frozen=True)

    def _by_hand(self, frozen: bool) -> None:
        for model in (self.front, self.back):
            model.requires_grad_(not frozen)
        optimiser = torch.optim.SGD([self.weight, self.bias], lr=0.1, momentum=0.9, nesterov=True)
        seen: list[Tensor] = []
        read = self.front.model.layers[self.layer - 1].register_forward_hook(lambda _m, _a, out: seen.append(out))
        put = self.back.model.layers[self.layer - 1].register_forward_hook(
            lambda *_: torch.nn.functional.linear(seen[-1], self.weight, self.bias)
        )
        try:
            with torch.set_grad_enabled(not frozen):
                self.front(self.tokens, use_cache=False)
            self.back(self.tokens, labels=self.tokens, use_cache=False).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        finally:
            read.remove()
            put.remove()
            for model in (self.front, self.back):
                model.zero_grad()

    def prepare(self) -> None:
        """What `ours` does once: the front's activations."""
        self.acts[0]

    def ours(self) -> None:
        """The second of two steps of `StitchDescent`, whose activations are at hand; what comes once is left out."""
        front, back = self.models
        ends: list[float] = []

        class Noted(StitchDescent):
            def apply(self) -> None:
                super().apply()
                ends.append(time.perf_counter())

        with front.evaluating(), back.evaluating(), self.acts.keep(None):
            start = identity_adapter(ADAPTER_KINDS.named("affine")(), *self.weight.shape).float()
            settings = lsim.stitching.StitchTraining(steps=2, relative=False)
            targets = [self.acts.batches[0].next_tokens]
            Noted(start, 0.0, self.acts, back, self.layer, targets, settings, Progress(None, {}), "").run()
        self.seconds = ends[1] - ends[0]


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rotated(model: Any) -> Any:
    """The same Llama in another orthogonal basis of its residual stream; norms' weights are folded into what reads them."""
    turned = copy.deepcopy(model)
    d = model.config.hidden_size
    q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    with torch.no_grad():
        turned.lm_head.weight = torch.nn.Parameter(turned.lm_head.weight.clone())

        def reads(linear: Any, norm: Any) -> None:
            linear.weight.copy_((linear.weight.double() * norm.weight.double()) @ q.T)

        def writes(linear: Any) -> None:
            linear.weight.copy_(q @ linear.weight.double())

        turned.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.double() @ q.T)
        reads(turned.lm_head, turned.model.norm)
        turned.model.norm.weight.fill_(1.0)
        for block in turned.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                reads(linear, block.input_layernorm)
            for linear in (mlp.gate_proj, mlp.up_proj):
                reads(linear, block.post_attention_layernorm)
            block.input_layernorm.weight.fill_(1.0)
            block.post_attention_layernorm.weight.fill_(1.0)
            writes(attention.o_proj)
            writes(mlp.down_proj)
    return turned


class Reached(Exception):
    """Training has come to the loss of the closed form, or is out of time."""


def race(front: Any, back: Any, tokens: Tensor, layer: int) -> str:
    """Closed form and training to the same training loss, on the same batches."""
    models = [open_split_model(front), open_split_model(back)]
    batches = batches_of(front, tokens, 8)
    d = front.config.hidden_size
    with models[0].evaluating(), models[1].evaluating():
        acts = ActivationStore(models[0], layer, batches)
        start = time.perf_counter()
        adapter, explained = least_squares(ADAPTER_KINDS.named("affine")(), acts, models[1], layer, 0.0)
        closed = time.perf_counter() - start
        adapter = adapter.float()

        def loss_of(map_: Any) -> float:
            found = [
                models[1].score(b, b.next_tokens, layer, map_(acts[i]) if map_ else None) for i, b in enumerate(batches[:8])
            ]
            return float(sum(f["loss"] for f in found) / sum(f["count"] for f in found))

        own, goal = loss_of(None), loss_of(adapter)
        seen: list[float] = []
        start = time.perf_counter()

        class Watched(StitchDescent):
            def apply(self) -> None:
                super().apply()
                seen[:] = self.curve
                recent = sum(seen[-10:]) / 10 if len(seen) >= 10 else float("inf")
                if recent <= goal + 0.005 or time.perf_counter() - start > PATIENCE * closed:
                    raise Reached

        with acts.keep(None):
            try:
                targets = [b.next_tokens for b in batches]
                settings = lsim.stitching.StitchTraining(steps=100_000, warmup=50)
                identity = identity_adapter(ADAPTER_KINDS.named("affine")(), d, d).float()
                Watched(identity, 0.0, acts, models[1], layer, targets, settings, Progress(None, {}), "").run()
            except Reached:
                pass
        trained = time.perf_counter() - start
    came = sum(seen[-10:]) / len(seen[-10:])
    reached = came <= goal + 0.005
    beside = f"{'' if reached else 'not within '}{trained:.1f} ({len(seen)} steps, {came - own:+.3f})"
    ratio = f"{'' if reached else 'below '}{closed / trained:.3f}"
    return f"{goal - own:+.4f} | {explained:.3f} | {closed:.1f} | {beside} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--small", required=True)
    parser.add_argument("--pair", nargs=2, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", choices=NAMES, help="print the peak memory of one variant, in a process of its own")
    arguments = parser.parse_args()
    front, back = load(arguments.model), load(arguments.model)
    steps = Steps(front, back, rows_of(front, arguments.data, ROWS, LENGTH))
    if arguments.peak:
        print(json.dumps(with_peak(getattr(steps, arguments.peak))[1]))
        return
    for name in NAMES:
        getattr(steps, name)()
    times: dict[str, list[float]] = {name: [] for name in (*NAMES, "prepare")}
    for _ in range(arguments.repeats):
        for name in ("naive", "frozen", "prepare"):
            times[name].append(timed(getattr(steps, name)))
        steps.ours()
        times["ours"].append(steps.seconds)
    command = [sys.executable, __file__, *sys.argv[1:], "--peak"]
    peaks = {name: json.loads(subprocess.run([*command, name], capture_output=True, check=True).stdout) for name in NAMES}
    middle = {name: statistics.median(values) for name, values in times.items()}

    def line(name: str, words: str) -> str:
        ratio = statistics.median(ours / other for ours, other in zip(times["ours"], times[name], strict=True))
        return f"| {words} | {middle[name]:.2f} | {ratio:.2f} | {peaks[name]:.0f} |"

    lines = [
        "| a step | seconds | ours / it | peak MB above the loaded models |",
        "| --- | ---: | ---: | ---: |",
        *(line(name, words) for name, words in NAMES.items()),
        "",
        f"Once a batch, before training: the front up to the stitch point, {middle['prepare']:.2f} s. "
        f"{ROWS} x {LENGTH} tokens, stitch point after block {steps.layer - 1} of {len(front.model.layers)}.",
        "",
        "| closed form | penalty of it | R² | seconds | training to the same loss, seconds | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    small = load(arguments.small)
    tokens = rows_of(small, arguments.data, 240, 128)
    for layer in (2, 4):
        found = race(small, rotated(small), tokens, layer)
        lines.append(f"| a model and its copy in another basis, after block {layer - 1} | {found}")
    a, b = (load(folder) for folder in arguments.pair)
    tokens = rows_of(a, arguments.data, 240, 128)
    for layer in (1, 3, 5):
        lines.append(f"| two independent models, after block {layer - 1} | {race(a, b, tokens, layer)}")
    arguments.batch, arguments.seq_len = ROWS, LENGTH
    text = "\n".join([*lines, "", machine(arguments)])
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
