"""Coverage of intervals on rows of real articles, of which those of one article depend on each other.

    python benchmarks/studies/articles.py --model stories260K=FOLDER --text valid.txt test.txt --simulations 300 --out table.md

Run from the root of the repository. The articles of WikiText-2 (`valid.txt` and `test.txt` in its tokenised form) are the
population: a sample is of articles with replacement, and of rows that follow each other at a random place of each. The model
runs once; samples look up its losses and activations. The true cross-entropy is that of all articles and places, the true CKA
the mean of all simulations.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from real_models import load
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import tl_layersim as lsim
from tests.models.token_bank import opened

LENGTH = 32
# Rows of an article from which samples are drawn.
ROWS = 32
# Rows of each sampled article, and numbers of articles.
SAMPLES = ((16, 2), (16, 4), (16, 8), (4, 32))
# Articles from which on the interval of CKA has two blocks of 16 texts.
ARTICLES_FOR_CKA = 32
# Logit of classes that no token has.
NEVER = -1e4


def articles_of(texts: Sequence[str]) -> list[str]:
    """The articles of WikiText, which begin with a line such as " = Title = "."""
    return [article for text in texts for article in re.split(r"(?m)^ = [^=\n]+ = $", text) if len(article) > 1000]


def bank_of(model: Any, articles: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Activations of the first rows of each article that is long enough, and the losses of these rows.

    Args:
        model: the language model, with its tokenizer.
        articles: their texts.

    Returns:
        Activations `token site width`, and mean losses `article row`. The last site has two logits, whose cross-entropy for the
        class of a token, 0 and 1 in turn, is the model's for the next token.
    """
    sites, losses = [], []
    for article in articles:
        ids = model.tokenizer(article, add_special_tokens=False)["input_ids"][: ROWS * LENGTH]
        if len(ids) < ROWS * LENGTH:
            continue
        rows = torch.tensor(ids).view(ROWS, LENGTH)
        with torch.no_grad():
            out = model(rows, output_hidden_states=True)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].mT, rows[:, 1:], reduction="none")
        margin = torch.zeros(ROWS, LENGTH)
        margin[:, :-1] = -torch.log(torch.expm1(loss.double().clamp(min=1e-6))).float()
        states = [out.hidden_states[layer] for layer in (1, len(out.hidden_states) // 2, -1)]
        logits = torch.full_like(states[0], NEVER)
        place = torch.arange(LENGTH)
        logits[..., :2] = 0.0
        logits[:, place, place % 2] = margin
        sites.append(torch.stack([*states, logits], 2).flatten(0, 1))
        losses.append(loss.double().mean(1))
    return torch.cat(sites), torch.stack(losses)


def sample(articles: int, rows: int, drawn: int, generator: torch.Generator) -> tuple[Tensor, list[int]]:
    """Places in the bank of rows that follow each other in random articles (`row pos`), and the article of each row.

    Args:
        articles: number of all articles.
        rows: rows of each article.
        drawn: number of articles to draw.
        generator: of the draw.
    """
    article = torch.randint(articles, (drawn,), generator=generator)
    start = torch.randint(ROWS - rows + 1, (drawn,), generator=generator)
    row = (article * ROWS + start)[:, None] + torch.arange(rows)
    ids = row.flatten()[:, None] * LENGTH + torch.arange(LENGTH)
    return ids, torch.arange(drawn).repeat_interleave(rows).tolist()


def is_warned(report: lsim.Report, name: str) -> bool:
    """Whether a result has a warning about its number of texts, or about texts that are alike."""
    return any("texts" in text for text in report[name].provenance.warnings)


def rows_of_table(model: Any, articles: Sequence[str], simulations: int) -> list[str]:
    bank, losses = bank_of(model, articles)
    labels = torch.arange(LENGTH) % 2
    labels[-1] = -100
    lines = [
        f"| rows of each of {len(losses)} articles | articles | given as | cross-entropy | width | warned | CKA | width |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rows, drawn in SAMPLES:
        truth = float(losses.unfold(1, rows, 1).mean())
        for how in ("groups", "rows"):
            generator = torch.Generator().manual_seed(0)
            lens, cka, warned = [], [], 0
            for _ in range(simulations):
                ids, group = sample(len(losses), rows, drawn, generator)
                # The model of a sample holds its own activations alone, because a run digests all that a model holds.
                source = opened(bank[ids.flatten()])
                numbers = torch.arange(ids.numel()).view(ids.shape)
                columns = {"input_ids": numbers, "labels": labels.expand(ids.shape)}
                data = lsim.Data(columns, groups=group if how == "groups" else None, batch_size=64)
                analyzers: list[Any] = [lsim.LogitLens(labels="data")]
                has_cka = drawn >= ARTICLES_FOR_CKA
                analyzers += [lsim.CKA()] if has_cka else []
                report = lsim.analyze(source, data, analyzers, intervals=True)
                value, low, high, _ = (each[-1] for each in report["logit_lens"].interval("cross_entropy"))
                lens.append((float(value), float(low), float(high)))
                warned += is_warned(report, "logit_lens")
                if has_cka:
                    value, low, high, _ = (each[0, 2] for each in report["cka"].interval("values"))
                    cka.append((float(value), float(low), float(high)))
            cells = [f"{rows}", f"{drawn}", how, *covered(lens, truth), f"{warned / simulations:.0%}"]
            cells += covered(cka, sum(value for value, _, _ in cka) / len(cka)) if cka else ["–", "–"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def covered(intervals: Sequence[tuple[float, float, float]], truth: float) -> list[str]:
    """Share of intervals that contain the true value, with its standard error; and their median width."""
    inside = torch.tensor([low <= truth <= high for _, low, high in intervals]).double()
    share = float(inside.mean())
    width = torch.tensor([high - low for _, low, high in intervals]).median()
    return [f"{share:.1%} ± {math.sqrt(share * (1 - share) / len(inside)):.1%}", f"{float(width):.3g}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="NAME=FOLDER of a language model")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--simulations", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(args.model.split("=", 1)[-1])
    absent = [str(path) for path in (folder, *args.text) if not path.exists()]
    if absent:
        print(f"Skipped: {', '.join(absent)} is not there.")
        return
    lines = rows_of_table(load(str(folder)), articles_of([path.read_text() for path in args.text]), args.simulations)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
