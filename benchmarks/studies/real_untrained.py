"""Table of docs/results.md: which properties of real models does training make? Trained models beside three untrained twins.

    python benchmarks/studies/real_untrained.py --model stories15M=FOLDER --model smollm2=FOLDER \\
        --text FILE --tokens 8192 > table.md

Folders hold Hugging Face weights; the text is cut into full rows of 128 tokens. Trained: value ± half of its 95 % interval over
other texts. Untrained: mean (sd over three seeds of the weights).
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from real_models import SKIP, load

import tl_layersim as lsim

ANALYZERS = {
    "path": lsim.Trajectory(),
    "raw": lsim.Cosine(center="none"),
    "centred": lsim.Cosine(),
}


def fitted(name: str) -> Callable[[Any], Any]:
    """A number of the fits of the mean norm at all sites, the embedding included."""
    return lambda path: lsim.many.exponential_fit(path, "norm")[name].values.flat[0]


def middle(result: Any) -> Any:
    return result.values[len(result.layers) // 2, -1]


NUMBERS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("line-shape score", "path", lambda path: path.lss_mean),
    ("norm: R² of an exponential", "path", fitted("r_squared")),
    ("norm: R² of a line", "path", fitted("linear_r_squared")),
    ("norm: last layer over embedding", "path", lambda path: path.norm[-1] / path.norm[0]),
    ("expodistance, median token", "path", lambda path: path.expodistance.quantiles[path.quantiles.index(0.5)]),
    ("tokens whose cosine to the last rises at every block", "raw", lambda cosine: cosine.monotone_share),
    ("the same, centred", "centred", lambda cosine: cosine.monotone_share),
    ("cosine of the middle layer to the last, centred", "centred", middle),
)


def column(model: Any, texts: list[str], tokens: int) -> Iterator[tuple[str, str]]:
    """Each number of a model and of its untrained twins."""
    data = lsim.Data(texts, pack=True, max_tokens=tokens, skip_first=SKIP, seq_len=128)
    report = lsim.analyze(model, data, ANALYZERS, intervals=True, baseline="untrained")
    for _, name, number in NUMBERS:
        value, low, high, _ = map(float, report[name].interval(number))
        twins = [float(number(one)) for one in report[name].untrained]
        # A fraction of no token has an upper end alone.
        margin = f"± {(high - low) / 2:.3f}" if low < value else f"(at most {high:.3f})"
        yield f"{value:.3f} {margin}", f"{np.mean(twins):.3f} ({np.std(twins, ddof=1):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    texts = [line.strip() for line in arguments.text.read_text().splitlines() if len(line.strip()) > 40]
    named = [item.split("=", 1) for item in arguments.model]
    columns = [list(column(load(folder), texts, arguments.tokens)) for _, folder in named]
    print(f"| | {' | '.join(f'{name} | untrained' for name, _ in named)} |\n|{' --- |' * (1 + 2 * len(named))}")
    for (label, _, _), *cells in zip(NUMBERS, *columns, strict=True):
        print(f"| {label} | {' | '.join(cell for pair in cells for cell in pair)} |")


if __name__ == "__main__":
    main()
