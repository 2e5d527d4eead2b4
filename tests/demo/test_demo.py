"""The model and text that ship: whole, small, trained, and with layers that mean something."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

import tl_layersim as lsim
from tl_layersim import demo

FOLDER = Path(demo.__file__).parent


def test_it_is_small_and_complete(demo):
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 8e6
    assert demo.config.num_hidden_layers == 8
    assert 128 <= demo.config.hidden_size <= 192
    assert 1000 <= len(demo.tokenizer) <= 4096
    for name in ("README.md", "loss_curve.csv", "perplexity.csv", "text.txt"):
        assert (FOLDER / name).is_file()


@pytest.mark.heavy("the whole text of the demo")
def test_it_has_learned_the_text_that_it_ships_with(demo):
    """Text that it never saw; a model that knows word frequencies only reads it at several hundred."""
    losses, tokens = 0.0, 0
    for text in lsim.demo_text():
        ids = torch.tensor([[0, *demo.tokenizer(text)["input_ids"]]])[:, :256]
        with torch.no_grad():
            losses += float(demo(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert math.exp(losses / tokens) < 55


def test_its_held_out_perplexity_is_what_its_readme_says():
    with (FOLDER / "perplexity.csv").open() as file:
        found = {row["held_out_text"]: float(row["perplexity"]) for row in csv.DictReader(file)}
    readme = (FOLDER / "README.md").read_text()
    for name, value in found.items():
        assert f"| {name} |" in readme
        assert f"{value:.1f}" in readme


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_similarity_to_its_last_layer_rises_with_depth(demo):
    found = lsim.analyze(demo, lsim.Data(lsim.demo_text(), pack=True), "cosine")["cosine"]
    to_last = found.values[:, -1]
    assert (to_last.diff() > 0).all()
    assert to_last[0] < 0.5 < to_last[-2]


def test_it_speaks(demo):
    ids = torch.tensor([[0, *demo.tokenizer("Once upon a time")["input_ids"]]])
    out = demo.generate(ids, max_new_tokens=30, do_sample=False)
    assert "there was" in demo.tokenizer.decode(out[0])


def test_its_text_is_plain():
    assert all(text.isascii() and 40 < len(text.split()) < 200 for text in lsim.demo_text())


def test_the_aligned_one_is_what_its_readme_says():
    readme = (FOLDER / "README.md").read_text()
    with (FOLDER / "aligned" / "perplexity.csv").open() as file:
        for row in csv.DictReader(file):
            assert f"{float(row['perplexity']):.1f} ({row['held_out_text'].replace('_', ' ')})" in readme
    with (FOLDER / "aligned" / "loss_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    for look, name in (("0", "before"), ("600", "after 600 steps"), ("1200", "after 1,200")):
        cells = " | ".join(f"{float(row['held_out_loss']):.2f}" for row in rows if row["look"] == look)
        assert f"| {name} | {cells} |" in readme


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_alignment_made_its_shallow_layers_useful(demo):
    report = lsim.evaluate_layers(demo, lsim.demo_model(aligned=True), lsim.Data(lsim.demo_text(), pack=True, skip_first=1))
    found = report["layers"]
    assert float(found.early_share[1]) > float(found.early_share[0]) + 0.08
    assert bool((found.accuracy[1, :6] > found.accuracy[0, :6]).all())
    assert float(found.perplexity[1, -1]) < float(found.perplexity[0, -1])
    readme = (FOLDER / "README.md").read_text()
    assert f"rises from {float(found.early_share[0]):.3f} to {float(found.early_share[1]):.3f}" in readme
    assert f"perplexity falls from {float(found.perplexity[0, -1]):.1f} to {float(found.perplexity[1, -1]):.1f}" in " ".join(
        readme.split()
    )
