"""Tables of docs/results.md and docs/traps.md: cosine and CKA of real models over real text, and what moves them.

    python benchmarks/studies/real_models.py --model stories15M=FOLDER --model smollm2=FOLDER \\
        --text FILE --tokens 16384 > tables.md
    python benchmarks/studies/real_models.py --model smollm2=FOLDER --text FILE --tokens 2048 --intervals > intervals.md

Folders hold Hugging Face weights; the text is cut into full rows of 256 tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim

SKIP = 2


def load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model


def by_layer(name: str, report: lsim.Report) -> None:
    """Similarity of every layer to the last, with its spread."""
    cosine, cka = report["cosine"], report["cka"]
    p = cosine.provenance
    print(f"### {name}\n")
    print(f"{p.tokens} tokens in {p.sequences} rows, first {SKIP} tokens of each row left out;")
    print(f"data `{p.data[:12]}`, weights `{p.weights_hash}`.\n")
    print("| layer | COS to last | std over tokens | 5 % | 95 % | CKA to last | norm ratio of the next block |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for i in range(len(cosine.layers)):
        label = "embed" if i == 0 else str(i - 1)
        ratio = f"{cosine.norm_ratio[i]:.2f}" if i < len(cosine.norm_ratio) else ""
        low, high = cosine.to_last[0, i], cosine.to_last[-1, i]
        print(
            f"| {label} | {cosine.values[i, -1]:.3f} | {cosine.std[i, -1]:.3f} | {low:.3f} | {high:.3f} "
            f"| {cka.values[i, -1]:.3f} | {ratio} |"
        )
    rises = (cosine.values[:, -1].diff() > 0).double().mean()
    print(
        f"\nMean COS to the last layer rises at {rises:.0%} of the steps; it rises at every step for "
        f"{float(cosine.monotone_share):.1%} of the tokens (theorem 2.1).\n"
    )


def with_intervals(name: str, report: lsim.Report) -> None:
    """Cosine of every layer to the last and accuracy of the logit lens, with half of their 95 % intervals."""
    cosine = report["cosine"]
    p = cosine.provenance
    print(f"### {name}\n")
    print(f"{p.tokens} tokens in {p.sequences} rows, first {SKIP} tokens of each row left out;")
    print(f"data `{p.data[:12]}`, weights `{p.weights_hash}`.\n")
    print("| after block | cosine to the last layer | accuracy of the lens |\n| --- | --- | --- |")
    similar, right = cosine.interval("values"), report["logit_lens"].interval("accuracy")
    for block in range(len(cosine.layers) - 1):
        cells = [
            f"{own.value[at]:.3f} ± {(own.high[at] - own.low[at]) / 2:.3f}"
            for own, at in ((similar, (block + 1, -1)), (right, (block,)))
        ]
        print("|", " | ".join([str(block), *cells]), "|")
    early = report["saturation"].interval("early_share")
    margin = float(early.high - early.low) / 2
    print(f"\nSaturated before the last block: {float(early.value):.3f} ± {margin:.3f} of the tokens.\n", flush=True)


def traps(name: str, model: Any, texts: list[str], tokens: int) -> None:
    """One pair of layers, early and late, under each choice."""
    depth = model.config.num_hidden_layers
    early, late = depth * 2 // 5 - 1, depth - 2
    sites = [f"blocks.{block}.hook_resid_post" for block in (early, late)]
    common = {"CKA, minibatches of 256": lsim.CKA(), "COS, centred": lsim.Cosine(), "COS": lsim.Cosine(center="none")}
    choices = {
        "CKA, exact": lsim.CKA(estimator="exact"),
        **common,
        "the same CKA, another seed": lsim.CKA(seed=1),
        "CKA, minibatches of 64": lsim.CKA(minibatch=64),
        "CKA, pairs of tokens of one row counted": lsim.CKA(unit="token"),
        "CKA, biased, n = 256": lsim.CKA(estimator="biased"),
        "CKA, biased, n = 64": lsim.CKA(estimator="biased", minibatch=64),
    }
    print(f"### {name}: after block {early} and after block {late}, of {depth} blocks\n")
    print(f"| measure | value | effective samples after block {early} |\n| --- | --- | --- |")
    for skip, own in ((SKIP, choices), (1, common), (0, common)):
        named = {f"m{number}": analyzer for number, analyzer in enumerate(own.values())}
        data = lsim.Data(texts, pack=True, max_tokens=tokens, seq_len=256, skip_first=skip)
        report = lsim.analyze(model, data, named, at=sites)
        for label, found in zip(own, report.values(), strict=True):
            samples = f"{found.effective_samples[0]:.0f} of {found.samples}" if "CKA" in label else ""
            skipped = "" if skip == SKIP else f", {skip} first tokens left out" if skip else ", all tokens counted"
            print(f"| {label}{skipped} | {found.values[0, 1]:.3f} | {samples} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--trap-tokens", type=int, default=8192)
    parser.add_argument("--intervals", action="store_true", help="the table with intervals alone, in rows of 128 tokens")
    arguments = parser.parse_args()
    texts = [line.strip() for line in arguments.text.read_text().splitlines() if len(line.strip()) > 40]
    for item in arguments.model:
        name, folder = item.split("=", 1)
        model = load(folder)
        if arguments.intervals:
            data = lsim.Data(texts, pack=True, max_tokens=arguments.tokens, skip_first=SKIP, seq_len=128)
            analyzers = [lsim.Cosine(center="none"), lsim.LogitLens(), lsim.Saturation()]
            with_intervals(name, lsim.analyze(model, data, analyzers, intervals=True))
            continue
        data = lsim.Data(texts, pack=True, max_tokens=arguments.tokens, skip_first=SKIP, seq_len=256)
        by_layer(name, lsim.analyze(model, data, [lsim.Cosine(), lsim.CKA()]))
        traps(name, model, texts, arguments.trap_tokens)


if __name__ == "__main__":
    main()
