"""Tables of docs/results.md and docs/traps.md: cosine and CKA of real models over real text, and what moves them.

    python benchmarks/real_models.py --model stories15M=FOLDER --model smollm2=FOLDER --text FILE --tokens 16384 > tables.md

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


def traps(name: str, model: Any, texts: list[str], tokens: int, exact_gb: float) -> None:
    """One pair of layers, early and late, under each choice."""
    options: dict[str, Any] = {"pack": True, "max_tokens": tokens, "seq_len": 256}
    depth = model.config.num_hidden_layers
    early, late = depth * 2 // 5, depth - 1

    def cka(analyzer: lsim.CKA, **more: Any) -> str:
        found = lsim.analyze(model, texts, analyzer, **(options | more))["cka"]
        return f"{found.values[early, late]:.3f} | {found.effective_samples[early]:.0f} of {found.samples}"

    def cosine(analyzer: lsim.Cosine, **more: Any) -> str:
        values = lsim.analyze(model, texts, analyzer, **(options | more))["cosine"].values
        return f"{values[early, late]:.3f} |"

    print(f"### {name}: after block {early - 1} and after block {late - 1}, of {depth} blocks\n")
    print(f"The first {SKIP} tokens of each row are left out where nothing else is said.\n")
    print(f"| measure | value | effective samples after block {early - 1} |\n| --- | --- | --- |")
    exact = lsim.CKA(estimator="exact", max_memory_gb=exact_gb)
    two = {"skip_first": SKIP}
    rows = [
        ("CKA, exact", cka(exact, **two)),
        ("CKA, minibatches of 256 shuffled tokens", cka(lsim.CKA(), **two)),
        ("the same, another seed", cka(lsim.CKA(seed=1), **two)),
        ("CKA, minibatches of 64 shuffled tokens", cka(lsim.CKA(minibatch=64), **two)),
        ("CKA, minibatches of contiguous tokens, one row each", cka(lsim.CKA(minibatch=254), batch_size=1, **two)),
        ("CKA, biased, n = 256", cka(lsim.CKA(estimator="biased"), **two)),
        ("CKA, biased, n = 64", cka(lsim.CKA(estimator="biased", minibatch=64), **two)),
        ("CKA, minibatches of 256, first token left out, second counted", cka(lsim.CKA(), skip_first=1)),
        ("CKA, minibatches of 256, all tokens counted", cka(lsim.CKA())),
        ("COS, dataset-centred", cosine(lsim.Cosine(), **two)),
        ("COS, uncentred", cosine(lsim.Cosine(center="none"), **two)),
        ("COS, dataset-centred, all tokens counted", cosine(lsim.Cosine())),
        ("COS, uncentred, all tokens counted", cosine(lsim.Cosine(center="none"))),
    ]
    for label, value in rows:
        print(f"| {label} | {value} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--trap-tokens", type=int, default=8192)
    parser.add_argument("--exact-gb", type=float, default=8.0, help="memory that exact CKA may take")
    arguments = parser.parse_args()
    texts = [line.strip() for line in arguments.text.read_text().splitlines() if len(line.strip()) > 40]
    for item in arguments.model:
        name, folder = item.split("=", 1)
        model = load(folder)
        analyzers = [lsim.Cosine(), lsim.CKA()]
        by_layer(
            name, lsim.analyze(model, texts, analyzers, pack=True, max_tokens=arguments.tokens, skip_first=SKIP, seq_len=256)
        )
        traps(name, model, texts, arguments.trap_tokens, arguments.exact_gb)


if __name__ == "__main__":
    main()
