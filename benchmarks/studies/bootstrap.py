"""Standard errors of `intervals=True` beside those of a bootstrap over documents, on a real model and real texts.

    python benchmarks/studies/bootstrap.py --model path/to/smollm2 --data wikitext/test_detok_paras.txt --out table.md

The model reads each document once. Its sums are kept by document; resamples of the documents are weighted sums of them. Ratios
are of the jackknife to the bootstrap: in the order of the data, where neighbours may be paragraphs of one article, and
shuffled.
"""

from __future__ import annotations

import argparse
import os
import random
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

# Nothing is fetched, and progress bars are no part of the output.
os.environ.update(TQDM_DISABLE="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim
from tl_layersim.core import Sums
from tl_layersim.core import sums as blocks
from tl_layersim.core.intervals import standard_error
from tl_layersim.core.sums import DataBlock, SumTree
from tl_layersim.engine import report_assembly as report_assembly

FIELDS = {
    "cosine": ("values", "std", "to_last", "adjacent", "norm_ratio"),
    "cka": ("values",),
    "logit_lens": ("cross_entropy", "accuracy", "agreement", "kl_to_final", "entropy", "target_probability"),
}


def documents_of(
    model: Any, data: lsim.Data, documents: int, analyzers: list[Any]
) -> dict[str, tuple[Any, Any, list[DataBlock]]]:
    """By analyzer: itself, its run, and the sums of each document."""
    found = {}

    def keep(result: Any, analyzer: Any, run: Any, name: str, own: Any) -> Any:
        found[name] = (analyzer, run, list(own))
        return result

    # One block for each document, and no replicates.
    most, report_assembly.replicated, blocks.MOST_BLOCKS = blocks.MOST_BLOCKS, keep, documents + 1
    lsim.analyze(model, data, analyzers, intervals=True)
    blocks.MOST_BLOCKS = most
    return found


def jackknife(analyzer: Any, run: Any, name: str, documents: list[DataBlock], each: int) -> dict[str, torch.Tensor]:
    """Standard errors from blocks of documents, `each` of them in a batch."""
    own = SumTree(1)
    for start in range(0, len(documents), each):
        own = own.add(sum_of(documents[start : start + each]))
    parts = [block.sums[name] for block in own.blocks()]
    results = [analyzer.compute(rest, run) for rest in blocks_without(parts)]
    whole = analyzer.compute(total(parts), run)
    fields = FIELDS[name]
    return {f: standard_error(getattr(whole, f), torch.stack([getattr(one, f) for one in results])) for f in fields}


def bootstrap(analyzer: Any, run: Any, name: str, documents: list[DataBlock], resamples: int) -> dict[str, torch.Tensor]:
    """Standard deviations over resamples of the documents with replacement."""
    generator = torch.Generator().manual_seed(0)
    stacked = {key: torch.stack([d.sums[name][key] for d in documents]) for key in documents[0].sums[name].fields}
    values: dict[str, list[torch.Tensor]] = {field: [] for field in FIELDS[name]}
    for _ in range(resamples):
        drawn = torch.randint(len(documents), (len(documents),), generator=generator)
        times = torch.bincount(drawn, minlength=len(documents))
        sums = Sums({key: torch.tensordot(times.to(own.dtype), own, 1) for key, own in stacked.items()})
        result = analyzer.compute(sums, run)
        for field, own_values in values.items():
            own_values.append(getattr(result, field))
    return {field: torch.stack(own).std(0) for field, own in values.items()}


def sum_of(documents: list[DataBlock]) -> DataBlock:
    merged = documents[0]
    for document in documents[1:]:
        merged = merged + document
    return DataBlock(1, merged.tokens, merged.sums)


def total(parts: list[Sums]) -> Sums:
    return sum(parts, Sums())


def blocks_without(parts: list[Sums]) -> list[Sums]:
    return [total(parts[:j] + parts[j + 1 :]) for j in range(len(parts))]


def _ratio(error: torch.Tensor, deviation: torch.Tensor) -> str:
    """Median, and 5 and 95 % quantile, over the entries of a field."""
    known = (deviation > 1e-12) & error.isfinite()
    low, middle, high = (error[known] / deviation[known]).quantile(torch.tensor([0.05, 0.5, 0.95]).double())
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a text a line")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lens-step", type=int, default=8, help="the logit lens reads every so many positions")
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # A document is one row: cut here, because `analyze` continues long texts in further rows.
    lines = [line for line in args.data.read_text().splitlines() if len(line) > 100][: args.texts]
    texts = [tokenizer.decode(tokenizer(line)["input_ids"][: args.seq_len - 4], skip_special_tokens=True) for line in lines]
    read = partial(lsim.Data, texts, tokenizer=tokenizer, seq_len=args.seq_len, batch_size=1)
    start = time.perf_counter()
    found = documents_of(model, read(skip_first=4), len(texts), [lsim.Cosine(center="none"), lsim.CKA(minibatch=32)])
    lens_positions = slice(args.lens_step - 1, None, args.lens_step)
    found |= documents_of(model, read(positions=lens_positions), len(texts), [lsim.LogitLens()])
    print(f"{len(texts)} texts read in {time.perf_counter() - start:.0f} s", flush=True)
    table = ["| field | in the order of the data | shuffled |", "| --- | --- | --- |"]
    for name, (analyzer, run, documents) in found.items():
        other = bootstrap(analyzer, run, name, documents, args.resamples)
        in_order = jackknife(analyzer, run, name, documents, each=8)
        shuffled = [jackknife(analyzer, run, name, random.Random(n).sample(documents, len(documents)), 8) for n in range(4)]
        for field, deviation in other.items():
            each = [
                _ratio(in_order[field], deviation),
                _ratio(torch.stack([one[field] for one in shuffled]).mean(0), deviation),
            ]
            table.append(f"| `{name}.{field}` | {each[0]} | {each[1]} |")
            print(table[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
