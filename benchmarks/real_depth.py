"""Tables of docs/depth.md: what each sublayer adds in real models, and what depends on it, over real text.

    python benchmarks/real_depth.py --model stories15M=FOLDER --text FILE --tokens 8192 > tables.md

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
    report = lsim.analyze(model, data, [lsim.Contribution(), lsim.SkipEffect()])
    added, effect = report["contribution"], report["skip_effect"]
    p = added.provenance
    print(f"### {name}\n\n{p.tokens} tokens in {p.sequences} rows, the first {SKIP} of each row left out; ", end="")
    print(f"data `{p.data[:12]}`, weights `{p.weights_hash}`.\n")
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
