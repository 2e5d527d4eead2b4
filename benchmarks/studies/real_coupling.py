"""Tables of docs/coupling.md: real models beside the same models with fresh random weights, and beside random vectors.

    python benchmarks/studies/real_coupling.py --model stories15M=FOLDER --model smollm2=FOLDER \\
        --text FILE --prompts 20 > tables.md

Folders hold Hugging Face weights. Each line of the text that is long enough gives a prompt, its first 32 tokens with BOS.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from real_models import load
from transformers import AutoModelForCausalLM

import tl_layersim as lsim
from tl_layersim.analyzers.block_coupling import BlockCouplingResult

KS = (10, 30, 50)
LENGTH = 32


def measure(model: Any, rows: torch.Tensor) -> BlockCouplingResult:
    """Coupling over all prompts."""
    found: BlockCouplingResult = lsim.analyze(model, lsim.Data(rows, batch_size=4), lsim.BlockCoupling(k=KS))["block_coupling"]
    return found


def spread(found: BlockCouplingResult, number: int) -> str:
    """Coupling of different blocks at the number-th k, and of neighbours."""
    values = found.by_k[number]
    other = ~torch.eye(len(values), dtype=torch.bool)
    near = torch.cat([values.diagonal(1), values.diagonal(-1)])
    return f"{1 - float(values[other].mean()):.3f} | {1 - float(near.mean()):.3f}"


def bases(found: BlockCouplingResult) -> str:
    """Means over blocks at the first k: alignments, errors of linearised blocks, and input along singular vectors."""
    sides = (found.mean("left_alignment"), found.mean("right_alignment"), float(found.cross_alignment.diagonal().mean()))
    errors = (float(found.update_error.mean()), float(found.path_error[-1]))
    shares = (float(one[:, : KS[0]].sum(1).mean()) for one in (found.left_share, found.right_share))
    return " | ".join(f"{value:.3f}" for value in (*sides, *errors, *shares))


def main() -> None:
    """One table for all models, and singular values by depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    arguments = parser.parse_args()
    lines = [line.strip() for line in arguments.text.read_text(encoding="utf-8").splitlines()]
    print("| model | k | coupling | of neighbours | random vectors | random weights | of neighbours | prompts |")
    print("| --- |" + " --- |" * 7)
    depth, aligned = [], []
    for name, folder in (one.split("=", 1) for one in arguments.model):
        model = load(Path(folder))
        ids = [model.tokenizer(line)["input_ids"] for line in lines if len(line) > 40]
        bos = model.tokenizer.bos_token_id
        rows = [([] if one[0] == bos else [bos]) + one for one in ids]
        prompts = torch.tensor([row[:LENGTH] for row in rows if len(row) >= LENGTH][: arguments.prompts])
        found = measure(model, prompts)
        torch.manual_seed(0)
        fresh = measure(AutoModelForCausalLM.from_config(model.config).eval(), prompts)
        for number, k in enumerate(KS):
            null = found.null_by_k[number]
            other = ~torch.eye(len(null), dtype=torch.bool)
            print(
                f"| {name} | {k} | {spread(found, number)} | {1 - float(null[other].mean()):.3f} | {spread(fresh, number)} "
                f"| {len(prompts)} |",
                flush=True,
            )
        chance = KS[0] / model.config.hidden_size
        for kind, one in (("trained", found), ("random", fresh)):
            aligned.append(f"| {name}, {kind} | {chance:.3f} | {bases(one)} |")
        top = [f"{value:.1f}" for value in found.singular_values[:, 0]]
        depth.append(
            f"- {name}, weights `{found.provenance.weights_hash}`, data `{found.provenance.data[:12]}`: {', '.join(top)}"
        )
    print(f"\nk = {KS[0]}:\n\n| model | chance | left | right | U and V | update error | path error | on left | on right |")
    print("| --- |" + " ---: |" * 8)
    print("\n".join(aligned))
    print("\nLargest singular value of each block's Jacobian, in the mean over prompts:\n")
    print("\n".join(depth))


if __name__ == "__main__":
    main()
