"""Two models side by side."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import THRESHOLDS

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..running.options import called
from .helpers import with_words


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_every_field_is_what_the_analyzers_say():
    a = tiny_llama()
    b = tiny_llama(seed=1)
    tokens = random_tokens(12, 9)

    report = lsim.evaluate_layers(a, b, lsim.Data(tokens, batch_size=5), threshold=0.37, names=("old", "new"))
    result = report["layers"]

    assert result.models == ("old", "new")
    for number, model in enumerate((a, b)):
        alone = lsim.analyze(
            model,
            tokens,
            [lsim.LogitLens(), lsim.Saturation(), lsim.Cosine(), lsim.ExitCurve(thresholds=0.37), lsim.NeuralCollapse()],
        )
        whole = lsim.analyze(model, tokens, [lsim.ExitCurve(thresholds=(*THRESHOLDS, 0.37))])["exit_curve"]
        lens = alone["logit_lens"]
        exits = alone["exit_curve"].at(0.37)
        for name, expected in {
            "cross_entropy": lens.cross_entropy,
            "perplexity": lens.perplexity,
            "accuracy": lens.accuracy,
            "agreement": lens.agreement,
            "saturated": alone["saturation"].counts.cumsum(0) / alone["saturation"].counts.sum(),
            "cosine_to_last": alone["cosine"].values[:, -1],
            "exits": exits.exits / exits.exits.sum(),
            "nc1": alone["neural_collapse"].nc1,
            "early_share": alone["saturation"].early_share,
            "exit_accuracy": torch.tensor(exits.accuracy),
            "speedup": torch.tensor(exits.speedup),
            "speedup_at_agreement": torch.tensor(whole.at(whole.threshold_for(agreement=0.95), held_out=True).speedup),
            "effective_depth": torch.tensor(float(lens.effective_depth(0.1))),
        }.items():
            torch.testing.assert_close(getattr(result, name)[number], expected.double(), rtol=1e-6, atol=1e-9, msg=name)
        torch.testing.assert_close(report[("cosine_before", "cosine_after")[number]].values, alone["cosine"].values)
    assert result.provenance.model.count("|") == 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_page_a_table_and_a_file(tmp_path):
    report = lsim.evaluate_layers(tiny_llama(), tiny_llama(seed=1), random_tokens(12, 9))
    page = report.to_html(tmp_path / "page.html").read_text()

    assert "before" in page
    assert "after" in page

    loaded = lsim.load(report.save(tmp_path / "report.safetensors"))
    assert torch.equal(loaded["layers"].values, report["layers"].values)

    table = report["layers"].to_frame()
    assert set(table["model"]) == {"before", "after"}
    assert len(table) == 6
    for picture in report["layers"].pictures:
        assert len(report["layers"].plot(picture.name).data) == 2


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"`before`.* 3 .*`after`.* 2\b"):
        lsim.evaluate_layers(tiny_llama(), tiny_llama(layers=2), random_tokens(4, 6))

    after = with_words(tiny_llama(seed=1))
    after.tokenizer = tiny_tokenizer(50)
    with pytest.raises(lsim.LayersimError, match=r"`before`.*`after`.*tokenizer="):
        lsim.evaluate_layers(with_words(tiny_llama()), after, ["w60 w70 w3 w4"] * 4)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_classifier_is_asked_for_its_labels():
    from .helpers import bert

    rows = [{"input_ids": random_tokens(1, 7, seed=i)[0].tolist(), "label": i % 3} for i in range(12)]
    result = lsim.evaluate_layers(bert(), bert(), rows)["layers"]
    hits = [bert()(torch.tensor([row["input_ids"]])).logits.argmax().item() == row["label"] for row in rows]

    assert float(result.accuracy[0, -1]) == pytest.approx(sum(hits) / 12)


class LabelledVectors(torch.nn.Module):
    """A model of vectors, not of tokens, with a norm and a head of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(6, 8)
        self.steps = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 3)
        self.eval()

    def forward(self, x):
        x = self.embed(x)
        for step in self.steps:
            x = step(x)
        return self.out(self.norm(x))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_labels_beside_rows_without_tokens_are_the_default():
    paths = {"layers": [f"steps.{i}" for i in range(3)], "unembed": ["norm", "out"]}
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(24) % 3
    model = LabelledVectors()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
    rows = [{"x": a, "label": int(b)} for a, b in zip(x, y, strict=True)]

    for data in ({"x": x, "label": y}, rows):
        result = called(lsim.evaluate_layers, model, model, data, **paths)["layers"]
        from_data = called(lsim.evaluate_layers, model, model, data, labels="data", **paths)["layers"]
        assert result.to_frame().equals(from_data.to_frame())

    final = called(lsim.analyze, model, rows, lsim.LogitLens(labels="data"), **paths)["logit_lens"].cross_entropy[-1]
    assert float(final) == pytest.approx(loss, rel=1e-5)

    settings = lsim.AlignedTraining(steps=2, lr=1e-3)
    assert called(lsim.finetune_aligned, model, {"x": x, "label": y}, settings, batch_size=8, **paths).loss.isfinite().all()
    with pytest.raises(lsim.LayersimError, match="`labels` is 'next_token'") as error:
        called(lsim.evaluate_layers, model, model, x, **paths)
    assert "labels='data'" in str(error.value)
    assert "DETR" not in str(error.value)
