"""Tables of docs/lens.md, decide.md, early_exit.md and depth.md: predictions and contributions of layers of real models.

    python benchmarks/studies/real_lens.py --model stories15M=FOLDER --model smollm2=FOLDER \\
        --text FILE --tokens 8192 > tables.md

Folders hold Hugging Face weights; the text is cut into full rows of 256 tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from real_models import SKIP, load

import tl_layersim as lsim


def tables(name: str, model: Any, texts: list[str], tokens: int) -> None:
    data = lsim.Data(texts, pack=True, max_tokens=tokens, skip_first=SKIP, seq_len=256)
    every = [lsim.LogitLens(), lsim.ExitCurve(), lsim.Saturation(), lsim.Trajectory(window=4), lsim.NeuralCollapse()]
    final = lsim.analyze(model, data, every)
    bare = lsim.analyze(model, data, [lsim.LogitLens(norm="none"), lsim.Saturation(norm="none")])
    lens, none, p = final["logit_lens"], bare["logit_lens"], final["logit_lens"].provenance
    print(
        f"## {name}\n\n{p.tokens} tokens in {p.sequences} rows, the first {SKIP} of each row left out; {lens.targets} targets;"
    )
    print(f"`{lens.unembedding}`; data `{p.data[:12]}`, weights `{p.weights_hash}`.\n")
    print("### With and without the final norm\n")
    columns = (f"{name} | {name}, no norm" for name in ("cross-entropy", "accuracy", "agreement"))
    print(f"| block | {' | '.join(columns)} | KL to last | entropy | p(target) |")
    print("|" + " ---: |" * 10)
    for i in range(len(lens.values)):
        print(
            f"| {i} | {lens.cross_entropy[i]:.2f} | {none.cross_entropy[i]:.2f} "
            f"| {lens.accuracy[i]:.3f} | {none.accuracy[i]:.3f} "
            f"| {lens.agreement[i]:.3f} | {none.agreement[i]:.3f} | {lens.kl_to_final[i]:.2f} | {lens.entropy[i]:.2f} "
            f"| {lens.target_probability[i]:.3f} |"
        )
    rising = f"{100 * float(lens.monotone_share):.1f} % of the targets"
    print(f"\nThe probability of the target rises at every block for {rising}.\n")
    print("### Saturation\n")
    one, other = final["saturation"], bare["saturation"]
    print(
        f"Before the last block: {float(one.early_share):.3f} with the norm, {float(other.early_share):.3f} without. ", end=""
    )
    print(f"Correlation of events with the cosine: {float(one.correlation):.2f}.\n")
    print("| block | events | cumulative | cosine to the last layer |\n| --- | --- | --- | --- |")
    for i in range(len(one.values)):
        print(f"| {i} | {int(one.counts[i])} | {one.cumulative[i]:.3f} | {one.cosine_to_last[i]:.3f} |")
    print("\n### Exits\n\n| threshold | exits before the last block | accuracy | agreement | perplexity | speed-up in blocks |")
    print("| --- |" + " --- |" * 5)
    curve = final["exit_curve"]
    for threshold in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0):
        at = curve.at(threshold)
        early = float(at.exits[:-1].sum() / at.exits.sum())
        print(
            f"| {threshold:g} | {early:.3f} | {at.accuracy:.3f} | {at.agreement:.3f} | {at.perplexity:.1f} | {at.speedup:.2f} |"
        )
    found = [f"{a:.0%}: {curve.threshold_for(agreement=a):g}" for a in (0.8, 0.9, 0.95, 0.99)]
    print(f"\nThreshold for an agreement of {', '.join(found)}.\n")
    path, collapse = final["trajectory"], final["neural_collapse"]
    median = path.quantiles.index(0.5)
    print("### Paths and collapse\n")
    print(
        f"Line-shape score {float(path.lss.mean):.2f} (std {float(path.lss.std):.2f}); expodistance, median "
        f"{float(path.expodistance.quantiles[median]):.2f}; equidistance {float(path.equidistance.mean):.2f}.\n"
    )
    print("| after block | norm | update norm | windowed LSS | NC1 |\n| --- | --- | --- | --- | --- |")
    windowed = dict(zip(path.centres, path.windowed_lss.tolist(), strict=True))
    for i, layer in enumerate(path.layers):
        update = f"{path.update_norm[i - 1]:.1f}" if i else ""
        shape = f"{windowed[layer]:.2f}" if layer in windowed else ""
        name = "embed" if i == 0 else str(i - 1)
        print(f"| {name} | {path.norm[i]:.1f} | {update} | {shape} | {collapse.nc1[i]:.2f} |")
    words = ", ".join(repr(model.tokenizer.decode([c])) for c in collapse.labels)
    print(f"\nNC1 is of the {len(collapse.labels)} most frequent next tokens: {words}.\n")
    depth(model, data)


def depth(model: Any, data: lsim.Data) -> None:
    report = lsim.analyze(model, data, [lsim.Contribution(), lsim.SkipEffect()])
    added, effect = report["contribution"], report["skip_effect"]
    print("### What sublayers add, and what depends on a block\n")
    kinds = " | ".join(f"{kind}: norm / stream | cosine with the stream | with the final one" for kind in ("attention", "MLP"))
    print(f"| block | {kinds} |")
    print("| --- |" + " --- |" * 6)
    for block in range(len(added.sublayers) // 2):
        rows = (2 * block, 2 * block + 1)
        cells = (f"{added.relative_norm[i]:.2f} | {added.cosine[i]:.2f} | {added.cosine_to_final[i]:.2f}" for i in rows)
        print(f"| {block} | {' | '.join(cells)} |")
    columns = ("later blocks", "largest in a row", "later positions", "output probabilities", "of later positions")
    print(f"\n| skipped block | change of {' | '.join(columns)} |")
    print("| --- |" + " --- |" * 5)
    for block in range(len(effect.values)):
        means = (float(matrix[block].nanmean()) for matrix in (effect.values, effect.largest, effect.later))
        changes = (float(curve[block]) for curve in (effect.probability_change, effect.later_probability_change))
        cells = (*means, *changes)
        print(f"| {block} | {' | '.join('' if x != x else f'{x:.2f}' for x in cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    texts = [line.strip() for line in arguments.text.read_text().splitlines() if len(line.strip()) > 40]
    for item in arguments.model:
        name, folder = item.split("=", 1)
        tables(name, load(folder), texts, arguments.tokens)


if __name__ == "__main__":
    main()
