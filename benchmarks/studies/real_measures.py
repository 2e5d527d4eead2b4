"""Every similarity of layers on a real model, with its interval, its null and its calibrated value, as Markdown tables.

    python benchmarks/studies/real_measures.py --model FOLDER --data FILE.txt --name NAME --sites 0 10 20 28 29

`--sites` are the numbers of the blocks after which the measures of cross-products are taken, which need (sites d)^2 numbers;
all others read every layer. Lines of the file longer than 40 characters are the texts.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1")

from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim


def row(name: str, result: Any, null: Any, pair: tuple[int, int]) -> str:
    """A line of the table: value and interval of one pair of layers, and its null where there is one."""
    value, low, high, _ = (one[pair] for one in result.interval("values"))
    if not getattr(null, "permutations", 0):
        return f"| {name} | {value:.3f} | {low:.3f} to {high:.3f} | | | |"
    return (
        f"| {name} | {value:.3f} | {low:.3f} to {high:.3f} | {null.null_mean[pair]:.3f} | "
        f"{null.calibrated[pair]:.3f} | {null.p_values[pair]:.3f} |"
    )


def order(values: Any) -> str:
    """The numbers of the layers in descending order of their similarity to the last, the last left out."""
    return " ".join(map(str, values[:-1, -1].nan_to_num(-2).argsort(descending=True)[:6].tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sites", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--permutations", type=int, default=200)
    parser.add_argument("--cross-permutations", type=int, default=19)
    options = parser.parse_args()
    warnings.simplefilter("ignore", lsim.LayersimWarning)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [line for line in Path(options.data).read_text().splitlines() if len(line) > 40]
    data = lsim.Data(
        texts,
        tokenizer=tokenizer,
        seq_len=options.seq_len,
        pack=True,
        skip_first=2,
        max_tokens=options.tokens,
        batch_size=options.batch,
    )
    every = options.permutations
    all_layers = {
        "Cosine": lsim.Cosine(center="none"),
        "CKA": lsim.CKA(permutations=every),
        "CKA_biased": lsim.CKA(estimator="biased", permutations=every),
        "RSA": lsim.RSA(permutations=every),
        "MutualKNN": lsim.MutualKNN(permutations=every),
    }
    few = options.cross_permutations
    started = time.time()
    results: dict[str, Any] = dict(lsim.analyze(model, data, all_layers, intervals=True))
    nulls = dict[str, Any]()
    names = results["CKA"].layers
    chosen = [name for name in names if any(name.endswith(f"blocks.{n}.hook_resid_post") for n in options.sites)]
    cross = {"Procrustes": lsim.Procrustes, "CCA": lsim.CCA}
    # It holds out whole texts.
    unpacked = replace(data, pack=False, batch_size=2 * options.batch)
    for measures, own in ((cross, data), ({"LinearPredictivity": lsim.LinearPredictivity}, unpacked)):
        # Cross-products of each permutation and of each block of the data would be held at once.
        results |= lsim.analyze(model, own, {n: m() for n, m in measures.items()}, at=chosen, intervals=True)
        nulls |= lsim.analyze(model, own, {n: m(permutations=few) for n, m in measures.items()}, at=chosen)
    [ranks] = lsim.analyze(model, data, [lsim.EffectiveRank()], at=chosen, intervals=True).values()

    tokens = results["CKA"].provenance.tokens
    print(f"\n## {options.name}\n\n{tokens} tokens, {len(results['CKA'].block_tokens)} blocks.")
    for title, first in (("middle layer", chosen[len(chosen) // 2 - 1]), ("last but one", names[-2])):
        print(f"\n{title} ({first}) and last:\n")
        print("| measure | value | 95 % interval | null mean | calibrated | p |\n| --- | --- | --- | --- | --- | --- |")
        for name, result in results.items():
            if first in result.layers:
                print(row(name, result, nulls.get(name, result), (result.layers.index(first), len(result.layers) - 1)))
    print("\n| measure | layers nearest to the last | after calibration | largest pair | calibrated | p |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, result in (results | nulls).items():
        if getattr(result, "permutations", 0):
            print(
                f"| {name} | {order(result.values)} | {order(result.calibrated)} | {result.max_value:.3f} | "
                f"{result.max_calibrated:.3f} | {result.max_p_value:.3f} |"
            )
    print("\n| layer | effective rank | 95 % interval | participation ratio | 95 % interval |\n| --- | --- | --- | --- | --- |")
    for number, name in enumerate(ranks.layers):
        one, two = ranks.interval("values"), ranks.interval("participation_ratio")
        print(
            f"| {name} | {one.value[number]:.1f} | {one.low[number]:.1f} to {one.high[number]:.1f} | "
            f"{two.value[number]:.2f} | {two.low[number]:.2f} to {two.high[number]:.2f} |"
        )
    print(f"\nin {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
