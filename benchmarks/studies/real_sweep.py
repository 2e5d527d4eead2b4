"""Figures and tables of docs/sweeps.md: twenty checkpoints of a small Llama that this script trains on WikiText-2.

    python benchmarks/studies/real_sweep.py train --text wikitext-2/valid.txt --out FOLDER
    python benchmarks/studies/real_sweep.py measure --checkpoints FOLDER --text wikitext-2/test.txt --out FIGURES > tables.md

Training takes about a quarter of an hour on one core, and needs no network. `measure` continues where it was interrupted.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import tl_layersim as lsim

BLOCKS, WIDTH, VOCABULARY, CONTEXT, BATCH = 8, 128, 1024, 128, 16
CHECKPOINTS = 20


def tokenizer_of(folder: Path) -> ByteLevelBPETokenizer:
    """The byte-level BPE tokenizer that was trained on the training text."""
    return ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def rows_of(folder: Path, text: Path) -> torch.Tensor:
    """A text as rows of tokens of the length of the context."""
    ids = torch.tensor(tokenizer_of(folder).encode(text.read_text(encoding="utf-8")).ids)
    return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def train(text: Path, out: Path, steps: int, seed: int) -> None:
    """Train from scratch, and keep checkpoints at steps that are evenly spaced on a logarithmic axis, step 0 included."""
    out.mkdir(parents=True, exist_ok=True)
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(text)], vocab_size=VOCABULARY, show_progress=False)
    bpe.save_model(str(out))
    rows = rows_of(out, text)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=344,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    kept = {0, *np.geomspace(1, steps, CHECKPOINTS).round().astype(int).tolist()}

    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = min(50, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min((s + 1) / warm_up, 0.55 + 0.45 * np.cos(np.pi * s / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    began = time.monotonic()
    for step in range(steps + 1):
        if step in kept:
            model.save_pretrained(out / f"step-{step}")
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step in kept:
            print(f"step {step}: loss {float(loss.detach()):.3f}, {time.monotonic() - began:.0f} s", flush=True)


def load(folder: Path) -> LlamaForCausalLM:
    """A checkpoint."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def measure(checkpoints: Path, text: Path, rows: int, out: Path) -> None:
    """Print tables, and write the figures of the page."""
    out.mkdir(parents=True, exist_ok=True)
    folders = {int(one.name.removeprefix("step-")): one for one in checkpoints.glob("step-*")}
    models = {step: partial(load, folders[step]) for step in sorted(folders)}
    # Evenly spread over the text, in its order.
    every = rows_of(checkpoints, text)
    data = every[:: len(every) // rows][:rows]
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(), lsim.Trajectory(), lsim.LogitLens()]
    # A prompt has 32 tokens: blocks are linearised at its last.
    found = lsim.sweep(models, lsim.Data(data, batch_size=4), analyzers, intervals=True, checkpoint=out / "reports")
    coupling = lsim.sweep(
        models, lsim.Data(data[:, :32], batch_size=2), lsim.BlockCoupling(), intervals=True, checkpoint=out / "coupling"
    )

    def column(one: lsim.Result, what: object) -> str:
        value, low, high, _ = one.interval(what)
        return f"{float(value):.3f} ± {float(high - low) / 2:.3f}"

    print(
        "| step | cross-entropy | coupling | of neighbours | random vectors | LSS | CKA, mean | cosine, mean | expodistance |"
    )
    print("| --- |" + " --- |" * 8)
    for step in found:
        report, blocks = found[step], coupling[step]["block_coupling"]
        path = report["trajectory"]
        cells = [
            column(report["logit_lens"], lambda one: one.cross_entropy[-1]),
            column(blocks, lambda one: one.mean()),
            column(blocks, lambda one: one.neighbours()),
            f"{blocks.mean('null_coupling'):.3f}",
            column(path, "lss_mean"),
            column(report["cka"], lambda one: one.values[:-1, -1].mean()),
            column(report["cosine"], lambda one: one.values[:-1, -1].mean()),
            column(path, lambda one: one.expodistance_quantiles[one.quantiles.index(0.5)]),
        ]
        print(f"| {step} | " + " | ".join(cells) + " |")
    print()
    print("| norm by depth, step | exponential: rate (standard error of the fit) | R² | line: R² |")
    print("| --- | --- | --- | --- |")
    for step in found:
        fit = lsim.many.exponential_fit(found[step]["trajectory"], "norm")
        rate, error, r_squared, linear = (fit[name].item() for name in ("rate", "rate_se", "r_squared", "linear_r_squared"))
        print(f"| {step} | {rate:.3f} ({error:.3f}) | {r_squared:.3f} | {linear:.3f} |")
    print()
    table, blocks = lsim.stack(found, "step"), lsim.stack(coupling, "step")["block_coupling"]
    accuracy, mean = table["logit_lens"]["accuracy"].isel(layer=-1), blocks["mean_coupling"].sel(pair_kind="all pairs")
    for own in (mean, table["trajectory"]["lss_mean"]):
        for shape in ("line", "exponential"):
            print(f"- {lsim.many.relate(own, accuracy, shape=shape)}")
    cka = table["cka"].isel(column=-1)
    figures = {
        "coupling": lsim.plot(blocks, "mean_coupling"),
        "lss": lsim.plot(table["trajectory"], "lss_mean"),
        "cka": lsim.plot(cka),
        "cosine": lsim.plot(table["cosine"].sel(quantile=0.5), "to_last"),
        "lens": lsim.plot(table["logit_lens"], over="layer"),
        "heat": lsim.plot(cka, over=("step", "row")),
        "norm": lsim.plot(lsim.many.exponential_fit(found[max(found)]["trajectory"], "norm")),
        "relation": lsim.many.relate(mean, accuracy).plot(),
    }
    for name, figure in figures.items():
        figure.write_html(out / f"{name}.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for_training = commands.add_parser("train")
    for_training.add_argument("--text", type=Path, required=True)
    for_training.add_argument("--out", type=Path, required=True)
    for_training.add_argument("--steps", type=int, default=1600)
    for_training.add_argument("--seed", type=int, default=0)
    for_measuring = commands.add_parser("measure")
    for_measuring.add_argument("--checkpoints", type=Path, required=True)
    for_measuring.add_argument("--text", type=Path, required=True)
    for_measuring.add_argument("--rows", type=int, default=128)
    for_measuring.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "train":
        train(arguments.text, arguments.out, arguments.steps, arguments.seed)
    else:
        measure(arguments.checkpoints, arguments.text, arguments.rows, arguments.out)
