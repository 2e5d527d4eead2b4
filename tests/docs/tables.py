"""The tables of docs/tables as numbers, and the pictures of the pages that are drawn from them."""

from __future__ import annotations

import csv
import re
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import xarray

import tl_layersim as lsim
from tl_layersim.reporting.lines_and_bars import Ends, Series, lines
from tl_layersim.reporting.style import BLUE, DASHES, GREEN, GREY, ORANGE, PURPLE, with_size, with_subtitle

from .helpers import ROOT

NUMBER = re.compile(r"(-?[\d.]+)(?: (?:± ([\d.]+)|\(([\d.]+)\)))?")
# Pixels: height of a picture; width of a figure alone, and of one of two side by side.
HEIGHT, ALONE, BESIDE = 400, 640, 450
# Greatest height of two side by side, and the size of their letters.
HIGHEST, LARGER = 460, 14


class Picture(NamedTuple):
    """Figures side by side.

    Attributes:
        figures: with their widths in pixels.
        height: of all of them in pixels.
    """

    figures: list[tuple[Any, int]]
    height: int = HEIGHT


def side_by_side(*figures: Any) -> Picture:
    """A picture of figures that are readable in a column of 600 pixels."""
    for figure in figures:
        with_size(figure, None, None, BESIDE).update_layout(font_size=LARGER, legend_font_size=LARGER)
    return Picture([(figure, BESIDE) for figure in figures], min(HIGHEST, max(figure.layout.height for figure in figures)))


class Cells(NamedTuple):
    """Numbers of a row or a column, and their margins or standard deviations; NaN where a cell holds none."""

    values: Any
    margins: Any

    def ends(self) -> Ends | None:
        """The ends of the intervals; None where no cell has a margin."""
        known = not np.isnan(self.margins).all()
        return Ends(self.values - self.margins, self.values + self.margins) if known else None


class Table(NamedTuple):
    """A table.

    Attributes:
        head: of the columns, without the first.
        labels: of the rows.
        cells: `row column`.
    """

    head: list[str]
    labels: list[str]
    cells: list[list[str]]

    def row(self, label: str) -> Cells:
        """A row by its label."""
        return numbers(self.cells[self.labels.index(label)])

    def column(self, name: str) -> Cells:
        """A column by its name."""
        at = self.head.index(name)
        return numbers([row[at] for row in self.cells])


def read_csv(name: str) -> Table:
    """A table of `docs/tables`."""
    head, *rows = csv.reader((ROOT / "docs/tables" / f"{name}.csv").read_text(encoding="utf-8").splitlines())
    return Table(head[1:], [row[0] for row in rows], [row[1:] for row in rows])


def numbers(cells: list[str]) -> Cells:
    """Cells such as `0.524 ± 0.022`, `0.524 (0.022)`, `0.524`, `–` or none."""
    found = [NUMBER.fullmatch(cell) for cell in cells]
    values = [float(one[1]) if one else np.nan for one in found]
    margins = [float(one[2] or one[3]) if one and (one[2] or one[3]) else np.nan for one in found]
    return Cells(np.array(values), np.array(margins))


def series(cells: Cells, label: str, colour: str, symbol: str, dash: str = DASHES[0]) -> Series:
    """A line of a picture."""
    return Series(label, cells.values, cells.ends(), colour, symbol, dash)


def by_layer(layers: range, drawn: list[Series], title: str, quantity: str, axis: str) -> go.Figure:
    """Lines over layers that are numbered as on the page."""
    figure = lines(tuple(layers), drawn, title, quantity, "number")
    return figure.update_xaxes(title=axis, tickmode="linear", dtick=1, range=[layers[0] - 0.25, layers[-1] + 0.25])


def groups() -> go.Figure:
    """CKA within and between groups of fine-tunes."""
    table = read_csv("fine_tunes_cka")
    layers = [n for n, label in enumerate(table.labels) if label.startswith("after layer")]
    looks = ((BLUE, "circle", "solid"), (GREEN, "square", "dash"), (ORANGE, "diamond", "solid"))
    drawn = []
    for name, look in zip(table.head, looks, strict=True):
        values, margins = table.column(name)
        drawn.append(series(Cells(values[layers], margins[layers]), name, *look))
    figure = by_layer(
        range(1, len(layers) + 1), drawn, "CKA within and between groups of fine-tunes", "Linear CKA", "After layer"
    )
    return with_subtitle(figure, "Bands: standard deviation over pairs of models")


def stitching() -> go.Figure:
    """Penalties of both directions between two models, and of each model with itself."""
    table = read_csv("stitching")
    looks = {
        "279K-xs into 260K": (ORANGE, "square", "solid"),
        "260K into 279K-xs": (BLUE, "circle", "solid"),
        "260K into itself": (GREY, "x", "dash"),
        "279K-xs into itself": (GREY, "diamond", "dot"),
    }
    drawn = [series(table.row(label), label, *look) for label, look in looks.items()]
    title = "Stitching penalty between two small Llamas, in both directions"
    figure = by_layer(range(1, len(table.head) + 1), drawn, title, "Penalty (nats a token)", "Stitched after layer")
    return with_subtitle(figure.update_yaxes(zeroline=True, zerolinecolor="#888888"), "Bands: 95 % intervals")


def smollm2() -> list[go.Figure]:
    """Cosine to the last layer and accuracy of the logit lens in SmolLM2, with intervals."""
    table = read_csv("smollm2_lens")
    figures = []
    for column, title, quantity, look in (
        ("cosine to the last layer", "How similar is each layer to the last?", "Cosine similarity", (BLUE, "circle")),
        ("accuracy of the lens", "What does each layer predict?", "Accuracy of the logit lens", (ORANGE, "square")),
    ):
        figure = by_layer(
            range(len(table.labels)), [series(table.column(column), column, *look)], title, quantity, "After block"
        )
        figures.append(with_subtitle(figure.update_xaxes(dtick=5), "SmolLM2-135M; bands: 95 % intervals"))
    return figures


def similarity() -> list[go.Figure]:
    """Cosine and CKA to the last layer of two language models."""
    figures = []
    for model, name in {"stories15M": "stories15m_similarity", "SmolLM2-135M": "smollm2_similarity"}.items():
        table = read_csv(name)
        blocks = [label for label in table.labels if label != "embed"]
        names = ("blocks.0.hook_resid_pre", *(f"blocks.{block}.hook_resid_post" for block in blocks))
        spread = Ends(table.column("5 %").values, table.column("95 %").values)
        drawn = [
            Series("cosine", table.column("COS to last").values, spread, BLUE, "circle"),
            series(table.column("CKA to last"), "CKA", GREEN, "diamond"),
        ]
        figure = lines(names, drawn, f"{model}: similarity to the last layer", "Similarity", "residual")
        figures.append(with_subtitle(figure.update_yaxes(range=[-0.15, 1.05]), "Band: 90 % of the tokens"))
    return figures


def measures() -> go.Figure:
    """Similarity of two layers to the last by every measure, with intervals and the mean of the null."""
    table = read_csv("stories15m_measures")

    def of_block(block: str, name: str, colour: str, symbol: str) -> Series:
        at = table.head.index(f"block {block}")
        ends = [row[at + 1].split(" to ") for row in table.cells]
        low, high = np.array(ends, float).T
        return Series(name, numbers([row[at] for row in table.cells]).values, Ends(low, high), colour, symbol)

    drawn = [
        of_block("4", "after block 4", BLUE, "circle"),
        of_block("3", "after block 3", ORANGE, "square"),
        series(table.column("block 3, null mean"), "random pairing of rows, block 3", GREY, "x"),
    ]
    names = tuple(label.removesuffix("()") for label in table.labels)
    names = tuple({'Cosine(center="none")': "Cosine", 'CKA(estimator="biased")': "CKA, biased"}.get(n, n) for n in names)
    figure = lines(names, drawn, "stories15M: similarity to the last layer (block 5)", "Similarity", "measure")
    figure.update_yaxes(range=[0, 1]).update_xaxes(tickangle=0).update_layout(font_size=LARGER, legend_font_size=LARGER)
    return with_subtitle(figure, "Whiskers: 95 % intervals")


def paths() -> list[go.Figure]:
    """Windowed line-shape score and NC1 of two language models."""
    figures = []
    for model, name in {"SmolLM2-135M": "smollm2_paths", "stories15M": "stories15m_paths"}.items():
        table = read_csv(name)
        drawn = [
            series(table.column("windowed LSS"), "line-shape score of 4 blocks", BLUE, "circle"),
            series(table.column("NC1"), "NC1", ORANGE, "square"),
        ]
        # Without the embedding, which stands before the first block.
        drawn = [one._replace(values=one.values[1:]) for one in drawn]
        figure = by_layer(range(len(table.labels) - 1), drawn, f"{model}: paths and collapse", "Score, or NC1", "After block")
        figures.append(figure.update_xaxes(dtick=5 if len(table.labels) > 10 else 1).update_yaxes(rangemode="tozero"))
    return figures


# Arms of the vision transformer, as they are drawn.
ARMS = {
    "standard": (GREY, "x", "dash"),
    "aligned": (BLUE, "circle", "solid"),
    "cosine-reg": (ORANGE, "square", "solid"),
    "multi-head": (GREEN, "diamond", "solid"),
    "multi-head, own heads": (GREEN, "diamond", "solid"),
    "multi-head, last head": (PURPLE, "diamond", "dot"),
}


def vit() -> list[go.Figure]:
    """Accuracy and cosine to the last block of vision transformers with four objectives."""
    figures = []
    for name, title, quantity in (
        ("vit_accuracy", "Accuracy by block", "Accuracy (fraction)"),
        ("vit_cosine", "Cosine to the last block", "Cosine similarity"),
    ):
        table = read_csv(name)
        drawn = [series(table.row(label), label.removeprefix("multi-head, "), *ARMS[label]) for label in table.labels]
        figures.append(with_subtitle(by_layer(range(1, 9), drawn, title, quantity, "After block"), "ViT on CIFAR-10, [CLS]"))
    return figures


def vit_coupling() -> list[go.Figure]:
    """Coupling and accuracy of two vision transformers during training."""
    arms = {arm: read_csv(f"vit_coupling_{arm}") for arm in ("standard", "aligned")}
    steps = tuple(int(label) for label in arms["standard"].labels)
    figures = []
    for column, title in (("coupling", "Coupling of blocks during training"), ("accuracy", "Accuracy during training")):
        drawn = [series(table.column(column), arm, *ARMS[arm]) for arm, table in arms.items()]
        figure = lines(steps, drawn, title, column.capitalize(), "number").update_xaxes(title="Training step")
        figures.append(with_subtitle(figure, "ViT on CIFAR-10, one seed"))
    figures[0].add_hline(y=0.052, line={"color": GREY, "dash": "dot"}, annotation_text="random vectors")
    return figures


def sentence_encoder() -> list[go.Figure]:
    """Accuracy by layer of a sentence encoder on two tasks."""
    figures = []
    for name, task in (("minilm_sst2", "SST-2"), ("minilm_pairs", "pairs of sentences")):
        table = read_csv(name)
        drawn = [series(table.row(f"{arm}: accuracy"), arm, *ARMS[arm]) for arm in ("standard", "aligned")]
        figure = by_layer(range(1, 7), drawn, f"MiniLM on {task}", "Accuracy (fraction)", "After layer")
        figures.append(with_subtitle(figure.update_yaxes(range=[0.4, 0.85]), "Bands: standard deviation over three seeds"))
    return figures


def mlp_skip() -> list[go.Figure]:
    """Accuracy, cosine and CKA of MLPs without and with skip connections."""
    table = read_csv("mlp_skip")
    figures = []
    for kind in ("without", "with"):
        rows = f"{kind} skip connections"
        drawn = [
            series(table.row(f"{rows}: accuracy"), "accuracy", BLUE, "circle"),
            series(table.row(f"{rows}: COS to the last layer"), "cosine", ORANGE, "square"),
            series(table.row(f"{rows}: CKA to the last layer"), "CKA", GREEN, "diamond"),
        ]
        title = f"MLP {kind} skip connections"
        figure = by_layer(range(1, len(table.head) + 1), drawn, title, "Accuracy, or similarity", "After layer")
        figures.append(with_subtitle(figure.update_yaxes(range=[0, 1.05]), "Cosine and CKA: to the last layer"))
    return figures


def clip() -> list[go.Figure]:
    """Similarity of both towers of a CLIP, and its zero-shot accuracy, by vision layer."""
    table = read_csv("clip_digits")
    first, *blocks = table.head
    assert first == "embedding"
    names = ("vision.blocks.0.hook_resid_pre", *(f"vision.blocks.{block}.hook_resid_post" for block in blocks))
    similar = [
        series(table.row("CKA with the last text layer, without projections"), "CKA", GREEN, "diamond"),
        series(table.row("cosine with the last text layer, of its text"), "cosine: its text", BLUE, "circle"),
        series(table.row("the same, of the texts of other images"), "cosine: other texts", ORANGE, "square"),
    ]
    right = [
        series(table.row("zero-shot accuracy"), "accuracy", BLUE, "circle"),
        series(table.row("agreement with the last layer"), "agreement with the last layer", PURPLE, "square", "dash"),
    ]
    # Before the first block all images have the same vector, and no class.
    right = [one._replace(values=one.values[1:]) for one in right]
    axis = "vision_layer"
    figures = [
        lines(names, similar, "Similarity to the last text layer", "Similarity", axis),
        lines(names[1:], right, "Zero-shot classification", "Fraction of images", axis),
    ]
    return [figure.update_yaxes(range=[0, 1.05]) for figure in figures]


def sweep() -> list[go.Figure]:
    """Coupling and line-shape score by training step."""
    table = read_csv("sweep")
    steps = [int(label) for label in table.labels]

    def drawn(names: dict[str, str], quantity: str, title: str) -> go.Figure:
        cells = [table.column(column) for column in names]
        ends = {"": 0, "_low": -1, "_high": 1}
        parts = {
            f"value{end}": (("line", "step"), [one.values + sign * np.nan_to_num(one.margins) for one in cells])
            for end, sign in ends.items()
        }
        found = xarray.Dataset(parts, {"line": list(names.values()), "step": steps})
        found["value"].attrs["long_name"] = quantity
        return lsim.plot(found, title=title).update_yaxes(rangemode="tozero")

    pairs = {"of neighbours": "neighbours", "coupling": "all pairs", "random vectors": "random vectors"}
    return [
        drawn(pairs, "Coupling", "Coupling of blocks during training"),
        drawn({"LSS": "line-shape score"}, "Line-shape score (1: straight)", "Line-shape score during training"),
    ]


def lens() -> list[go.Figure]:
    """Cross-entropy and accuracy of the logit lens by block, with and without the final norm."""
    table = read_csv("smollm2_logit_lens")
    figures = []
    for column, title, quantity in (
        ("cross-entropy", "Cross-entropy of the logit lens", "Cross-entropy (nats)"),
        ("accuracy", "Accuracy of the logit lens", "Accuracy (fraction)"),
    ):
        drawn = [
            series(table.column(column), "with the final norm", BLUE, "circle"),
            series(table.column(f"{column}, no norm"), "without", ORANGE, "square", "dash"),
        ]
        figure = by_layer(range(len(table.labels)), drawn, title, quantity, "After block")
        figures.append(with_subtitle(figure.update_xaxes(dtick=5), "SmolLM2-135M, WikiText-2"))
    figures[0].update_yaxes(type="log", tickvals=[3, 10, 30, 100, 300])
    return figures


def pictures_of_tables() -> dict[str, Picture]:
    """The pictures that are drawn from tables."""
    alone = {
        name: Picture([(figure, ALONE)], figure.layout.height)
        for name, figure in (("groups", groups()), ("stitching", stitching()))
    }
    alone["measures"] = Picture([(measures(), 2 * BESIDE)], HIGHEST)
    pairs = {"mlp_skip": mlp_skip(), "clip": clip(), "sweep": sweep(), "lens": lens(), "smollm2": smollm2()}
    pairs |= {"similarity": similarity(), "paths": paths(), "vit": vit(), "vit_coupling": vit_coupling()}
    pairs |= {"sentence_encoder": sentence_encoder()}
    return alone | {name: side_by_side(*figures) for name, figures in pairs.items()}
