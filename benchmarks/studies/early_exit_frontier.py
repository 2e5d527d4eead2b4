"""How fast early exit is at a given agreement: settings chosen on some prompts, judged on others.

    python benchmarks/studies/early_exit_frontier.py --model standard=FOLDER --model aligned=FOLDER --data FILE

For each model a grid of rules, thresholds, check layers and shortlists writes text from the first prompts. The fastest setting
with an agreement of 95 % there (and the fastest with 90 %) is then judged on other prompts, in turn with transformers' own
`generate` and with `EarlyExit` at threshold 1, greedy, one row, processor time of one thread; ratios are medians over prompts.
Agreement is the share of tokens written that the whole model would write behind the same tokens. `demo` and `demo-aligned` in
the place of a folder are the models that ship.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim
from tl_layersim.early_exit import frequent_tokens

CHOSEN, JUDGED, NEW, WORDS = 6, 30, 48, 12
AIMS = (0.95, 0.9)


def load(what: str) -> Any:
    """A model with its tokenizer."""
    if what.startswith("demo"):
        return lsim.demo_model(aligned=what.endswith("aligned"))
    model = AutoModelForCausalLM.from_pretrained(what, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(what)
    return model


def texts_of(path: str) -> list[str]:
    """Stories, or paragraphs."""
    text = Path(path).read_text(encoding="utf-8")[:4_000_000]
    pieces = text.split("<|endoftext|>") if "<|endoftext|>" in text else text.split("\n")
    return [piece.strip() for piece in pieces if len(piece.split()) > 3 * WORDS]


def settings(model: Any, texts: list[str]) -> list[dict[str, Any]]:
    """The grid."""
    blocks = model.config.num_hidden_layers
    layers = sorted({(max(0, round(share * blocks) - 1),) for share in (0.2, 0.35, 0.5, 0.65, 0.85)})
    likely = frequent_tokens(model, texts, min(1000, len(model.tokenizer) // 2))
    grid: list[dict[str, Any]] = []
    for at in layers:
        grid += [{"rule": "max-prob", "threshold": t, "at": at} for t in (0.2, 0.35, 0.5, 0.7)]
        grid += [{"rule": "max-prob", "threshold": t, "at": at, "shortlist": likely} for t in (0.2, 0.4, 0.6)]
        grid += [{"rule": "margin", "threshold": t, "at": at} for t in (0.1, 0.25, 0.5)]
        grid += [{"rule": "cosine", "threshold": t, "at": at} for t in (0.8, 0.9, 0.95)]
    return grid


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.thread_time()
    return call(), time.thread_time() - start


def agreement(model: Any, prompt: torch.Tensor, found: Any) -> float:
    whole = torch.cat([prompt[0], found.tokens[0]])[None]
    with torch.no_grad():
        said = model(whole[:, :-1], use_cache=False).logits[0, prompt.shape[1] - 1 :].argmax(-1)
    return float((said == found.tokens[0]).float().mean())


class Writer:
    """A model that writes, whole and with early exits."""

    def __init__(self, model: Any) -> None:
        self.model, self.whole = model, lsim.EarlyExit(model, 1.0)

    def write(self, early: Any, prompt: torch.Tensor) -> Any:
        return early.generate(prompt, max_new_tokens=NEW, eos_token_id=())

    def own(self, prompt: torch.Tensor) -> Any:
        """Transformers' own."""
        mask = torch.ones_like(prompt)
        return self.model.generate(
            prompt, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )

    def judge(self, setting: dict[str, Any], prompts: list[torch.Tensor], with_own: bool) -> dict[str, float]:
        """Agreement and speed of a setting, each prompt in turn with the whole model."""
        early = lsim.EarlyExit(self.model, **setting)
        agreed, faster, faster_than_own, exits = [], [], [], []
        for prompt in prompts:
            found, seconds = timed(partial(self.write, early, prompt))
            faster.append(timed(partial(self.write, self.whole, prompt))[1] / seconds)
            agreed.append(agreement(self.model, prompt, found))
            exits.append(found.mean_exit)
            if with_own:
                faster_than_own.append(timed(partial(self.own, prompt))[1] / seconds)
        return {
            "agreement": statistics.mean(agreed),
            "speed": statistics.median(faster),
            "own": statistics.median(faster_than_own) if with_own else 0.0,
            "exit": statistics.mean(exits),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="name=FOLDER")
    parser.add_argument("--data", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = texts_of(options.data)
    print("| model | chosen for | asked | agreement | times threshold 1 | times `generate` | mean exit |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for given in options.model:
        name, folder = given.split("=", 1)
        model = load(folder)
        some = texts[:: max(1, len(texts) // (CHOSEN + JUDGED))]
        prompts = [model.tokenizer(" ".join(text.split()[:WORDS]), return_tensors="pt").input_ids for text in some]
        writer, blocks = Writer(model), model.config.num_hidden_layers
        found = [(setting, writer.judge(setting, prompts[:CHOSEN], False)) for setting in settings(model, texts[1::3][:200])]
        for aim in AIMS:
            enough = [row for row in found if row[1]["agreement"] >= aim]
            if not enough:
                print(f"| {name} | {aim:.0%} | nothing in the grid | | | | |", flush=True)
                continue
            setting = max(enough, key=lambda row: row[1]["speed"])[0]
            judged = writer.judge(setting, prompts[CHOSEN : CHOSEN + JUDGED], True)
            asked = f"{setting['rule']} > {setting['threshold']:g} after block {setting['at'][0]} of {blocks}"
            asked += f", over {len(setting['shortlist'])} tokens" if "shortlist" in setting else ""
            print(
                f"| {name} | {aim:.0%} | {asked} | {judged['agreement']:.3f} | {judged['speed']:.2f} | {judged['own']:.2f} | "
                f"{judged['exit']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
