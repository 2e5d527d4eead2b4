"""Time per token of `EarlyExit.generate` beside transformers' `generate`, without exits (threshold 1) and with exits.

    python benchmarks/bench_exit_overhead.py --model FOLDER --way max-prob:0.9 --way cosine:0.9:3,6
    python benchmarks/bench_exit_overhead.py --shape qwen2.5-0.5b

All ways of a batch size run in turn in one process, in another order in each round, so that drift of the machine cancels in
ratios. A figure is the median over rounds with its range. Processor time is measured beside wall time, because other work on
the machine does not count in it. Prompts are random tokens; every way writes as many tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

import torch
from bench_analyze import machine
from transformers import AutoModelForCausalLM, Qwen2Config
from turns import CLOCKS, ratios, spread, take_turns

import tl_layersim as lsim

SHAPES: dict[str, Callable[[], Any]] = {
    "qwen2.5-0.5b": lambda: Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
}


def build(arguments: argparse.Namespace) -> Any:
    """The model in evaluation mode: of a folder, with random weights of a shape, or the demo model."""
    dtype = getattr(torch, arguments.dtype)
    if arguments.shape:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(SHAPES[arguments.shape](), dtype=dtype).eval()
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval() if arguments.model else lsim.demo_model()


def early_exit(model: Any, way: str) -> lsim.EarlyExit:
    """An `EarlyExit` from `rule:threshold` or `rule:threshold:block,block`."""
    rule, threshold, *blocks = way.split(":")
    at = tuple(int(block) for block in blocks[0].split(",")) if blocks else None
    return lsim.EarlyExit(model, float(threshold), rule=rule, at=at)


def table(model: Any, batch: int, arguments: argparse.Namespace) -> list[str]:
    """The lines of one batch size."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(5, model.config.vocab_size - 5, (batch, arguments.seq_len), generator=generator)
    new, mask = arguments.new, torch.ones_like(prompt)
    runs = {"threshold 1": lsim.EarlyExit(model, 1.0)} | {way: early_exit(model, way) for way in arguments.way}
    # No token ends a row.
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None

    def whole() -> Any:
        return model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)

    calls: dict[str, Callable[[], Any]] = {"generate": whole}
    for name, early in runs.items():
        calls[name] = lambda early=early: early.generate(prompt, max_new_tokens=new, eos_token_id=())
    found = {name: call() for name, call in calls.items()}
    seconds = take_turns(calls, arguments.repeats)
    # Milliseconds a step.
    times = {name: {clock: [1e3 * s / new for s in row] for clock, row in of.items()} for name, of in seconds.items()}
    model.generation_config.eos_token_id = ends
    text = found["generate"][:, prompt.shape[1] :]
    lines = [
        f"### {batch} {'row' if batch == 1 else 'rows'}",
        "",
        "| way | ms a step, wall | ms a step, processor | times `generate`, wall | times `generate`, processor "
        "| ms a step beyond `generate`, processor | same tokens | mean exit |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, of in times.items():
        cells = [name, *(spread(of[clock]) for clock in CLOCKS)]
        if name not in runs:
            cells += [""] * 5
        else:
            plain, result = times["generate"], found[name]
            cells += [spread(ratios(times, "generate", name, clock)) for clock in CLOCKS]
            cells.append(spread([b - a for a, b in zip(plain["processor"], of["processor"], strict=True)]))
            same = float((torch.stack(result.tokens) == text).float().mean())
            cells += [f"{same:.3f}", f"{result.mean_exit:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model; the demo model if left out")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, in place of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--way", action="append", default=[], help="rule:threshold or rule:threshold:block,block")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seq-len", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    model = build(arguments)
    for batch in arguments.batches:
        print("\n".join(table(model, batch, arguments)), flush=True)
    arguments.batch = max(arguments.batches)
    print(f"{arguments.new} new tokens; prompts: {machine(arguments)}")


if __name__ == "__main__":
    main()
