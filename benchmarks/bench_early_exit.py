"""Early exit against the whole model: tokens a second, agreement, and what the cost model promised.

    python benchmarks/bench_early_exit.py --model FOLDER --data text.txt --out table.md

All ways of one batch size are timed in turn, round by round, so that drift of the machine cancels in ratios. Every way writes
as many tokens. Agreement is the share of what was written that the whole model would write behind the same tokens. Promises are
made by costs measured on this machine: from an exit curve of the text, before anything is written, and from the exits that
came.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_analyze import machine
from real_models import load
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.early_exit import Generated, frequent_tokens
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.early_exit.exit_plan import ExitCosts, plan_for, seconds_of

THRESHOLDS = (0.5, 0.7, 0.9, 0.97)


def prompts(model: Any, text: str, rows: int, length: int) -> Tensor:
    """Pieces of the text, each with BOS where the model has one."""
    ids = model.tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
    bos = [model.tokenizer.bos_token_id] if model.tokenizer.bos_token_id is not None else []
    step = len(ids) // rows
    return torch.tensor([[*bos, *ids[i * step : i * step + length - len(bos)]] for i in range(rows)])


def agreement(model: Any, prompt: Tensor, found: Generated) -> float:
    """Teacher-forced: share of new tokens that the whole model would say behind the same tokens."""
    text = torch.cat([prompt, torch.stack(found.tokens)], 1)
    with torch.no_grad():
        logits = model(text[:, :-1], use_cache=False).logits[:, prompt.shape[1] - 1 :]
    return float((logits.argmax(-1) == text[:, prompt.shape[1] :]).float().mean())


def gone(found: Generated) -> list[float]:
    """For each block, the share of new tokens that had left after it."""
    exits = torch.cat(found.exits)
    shares = [float((exits <= layer).float().mean()) for layer in range(1, found.layers)]
    return [*shares, 0.0]


def ways(model: Any, curve: Any, costs: dict[str, ExitCosts], short: Tensor) -> dict[str, EarlyExit]:
    """What is compared, by its name in the table."""
    found = {"early exit, threshold 1": EarlyExit(model, 1.0)}
    for threshold in THRESHOLDS:
        early = EarlyExit(model, threshold, curve=curve, costs=costs["full"])
        found[f"max-prob > {threshold:g}, chosen layers"] = early
    blocks = len(early.split_model.blocks)
    middle = (blocks // 2 - 1, blocks - 2)
    found["max-prob > 0.9, every layer"] = EarlyExit(model, 0.9, at="all")
    found["max-prob > 0.9, default layers"] = EarlyExit(model, 0.9)
    found[f"max-prob > 0.9 over {len(short)} tokens, chosen layers"] = EarlyExit(
        model, 0.9, curve=curve, costs=costs["short"], shortlist=short
    )
    found["margin > 0.8, two layers"] = EarlyExit(model, 0.8, rule="margin", at=middle)
    found["patience 2, two layers"] = EarlyExit(model, 2, rule="patience", at=middle)
    found["cosine > 0.9, two layers"] = EarlyExit(model, 0.9, rule="cosine", at=middle)
    return found


def table(model: Any, curve: Any, text: str, batch: int, arguments: argparse.Namespace) -> list[str]:
    """One batch size."""
    clock = getattr(time, arguments.clock)
    short = frequent_tokens(model, [text[:200_000]], arguments.shortlist)
    costs = {
        "full": ExitCosts.measure(model, batch=batch, clock=clock),
        "short": ExitCosts.measure(model, batch=batch, shortlist=short, clock=clock),
        "cosine": ExitCosts.measure(model, batch=batch, rule="cosine", clock=clock),
    }
    prompt = prompts(model, text, batch, arguments.seq_len)
    new = arguments.new
    runs = ways(model, curve, costs, short)

    def hugging_face() -> Any:
        mask = torch.ones_like(prompt)
        return model.generate(
            prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )

    calls: dict[str, Callable[[], Any]] = {"generate of transformers": hugging_face}
    for name, early in runs.items():
        calls[name] = lambda early=early: early.generate(prompt, max_new_tokens=new, eos_token_id=())
    found = {name: call() for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.repeats):
        for name, call in calls.items():
            times[name].append(seconds_of(call, clock))
    blocks = curve.exits.shape[1]
    whole = times["early exit, threshold 1"]
    plain = times["generate of transformers"]
    lines = [
        f"### {batch} {'row' if batch == 1 else 'rows'}",
        "",
        "| way | asked after blocks | tokens a second | times transformers' | times threshold 1 | promised by curve "
        "| promised by exits | measured / promised | agreement | mean exit |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, values in times.items():
        rate = batch * new / statistics.median(values)
        times_plain = statistics.median(a / b for a, b in zip(plain, values, strict=True))
        times_whole = statistics.median(a / b for a, b in zip(whole, values, strict=True))
        if name not in runs:
            lines.append(f"| {name} | | {rate:.1f} | 1 | {times_whole:.2f} | | | | 1 | {blocks} |")
            continue
        early, result = runs[name], found[name]
        kind = "full" if early.rule.gives_logits else "short" if early.rule.reads_logits else "cosine"
        by_curve = f"{early.plan.speedup:.2f}" if early.plan is not None else ""
        at = () if early.rule.never else early.at
        by_exits = plan_for(costs[kind], gone(result), at).speedup
        asked = "all" if at == tuple(range(result.layers - 1)) else ", ".join(map(str, at)) or "none"
        lines.append(
            f"| {name} | {asked} | {rate:.1f} | {times_plain:.2f} | {times_whole:.2f} | {by_curve} | {by_exits:.2f} | "
            f"{times_whole / by_exits:.2f} | {agreement(model, prompt, result):.3f} | {result.mean_exit:.2f} |"
        )
    c = costs["full"]
    lines += [
        "",
        f"Measured, in ms a step: a block {1e3 * c.block:.3f}, a check {1e3 * c.check:.3f}, an unembedding "
        f"{1e3 * c.head:.3f}, what a step begins with {1e3 * c.start:.3f}.",
        "",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, or `demo`")
    parser.add_argument("--data", type=Path, help="a text; default: the one that ships")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seq-len", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=100)
    parser.add_argument("--shortlist", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="for the exit curve")
    parser.add_argument(
        "--clock",
        choices=("perf_counter", "thread_time"),
        default="perf_counter",
        help="thread_time: processor time, for one thread on a machine that others use too",
    )
    parser.add_argument("--out", type=Path)
    parser.set_defaults(shape=None)
    arguments = parser.parse_args()
    model = lsim.demo_model() if arguments.model == "demo" else load(arguments.model).eval()
    text = arguments.data.read_text(encoding="utf-8") if arguments.data else "\n\n".join(lsim.demo_text())
    curve = lsim.analyze(model, lsim.Data([text], seq_len=128, max_tokens=arguments.tokens), [lsim.ExitCurve()])["exit_curve"]
    lines = []
    for batch in arguments.batches:
        lines += table(model, curve, text, batch, arguments)
    arguments.batch = max(arguments.batches)
    lines.append(f"{arguments.new} new tokens, by {arguments.clock}; prompts: {machine(arguments)}")
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
