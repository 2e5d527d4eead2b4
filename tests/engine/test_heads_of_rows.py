"""Analyses of classifiers whose head makes one vector of several positions of a row."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads

from ..models.head_models import IMAGE, MODERN


def image_model(name: str, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**IMAGE, **settings)
    return getattr(transformers, f"{name}ForImageClassification")(config).double().eval()


PIXELS = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_heads_of_a_head_that_joins_two_vectors():
    model = image_model("Dinov2", num_labels=3)
    weight = model.classifier.weight.detach()
    assert weight.shape == (3, 32)

    heads = ExitHeads(weight.expand(2, -1, -1), model.classifier.bias.detach().expand(2, -1))
    labels = torch.arange(5) % 3
    with_heads, plain = (
        lsim.analyze(model, PIXELS, lsim.LogitLens(labels=labels, heads=heads_of_rows))["logit_lens"]
        for heads_of_rows in (heads, None)
    )

    torch.testing.assert_close(with_heads.cross_entropy, plain.cross_entropy)
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*\(2, 3, 16\).*\b32\)"):
        lsim.analyze(model, PIXELS, lsim.LogitLens(labels=labels, heads=ExitHeads(weight[:, :16].expand(2, -1, -1))))


def test_rows_without_a_score_are_not_mixed_rows():
    model = image_model("Dinov2", num_labels=1)
    scores = torch.tensor([0.3, float("nan"), -1.0, 2.0, 0.5])
    scored = ~scores.isnan()

    result = lsim.analyze(model, PIXELS, lsim.TaskMetrics(labels=scores))["task_metrics"]
    alone = lsim.analyze(model, PIXELS[scored], lsim.TaskMetrics(labels=scores[scored]))["task_metrics"]

    torch.testing.assert_close(result.pearson, alone.pearson)
    assert int(result.rows) == 4


def test_max_tokens_leaves_the_last_row_whole():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**MODERN, classifier_pooling="mean", num_labels=3, global_attn_every_n_layers=2)
    model = transformers.ModernBertForSequenceClassification(config).double().eval()
    tokens = torch.randint(3, 50, (4, 6))
    labels = torch.tensor([0, 1, 2, 0])
    result = lsim.analyze(model, lsim.Data(tokens, max_tokens=8), lsim.LogitLens(labels=labels))["logit_lens"]
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(tokens[:2]).logits, labels[:2])

    torch.testing.assert_close(result.cross_entropy[-1], expected)
    assert result.provenance.tokens == 12


def test_a_pooled_row_has_no_later_probability_change():
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.SiglipConfig(
        vision_config=tower | {"image_size": 8, "patch_size": 4}, text_config=tower, num_labels=3
    )
    model = transformers.SiglipForImageClassification(config).double().eval()

    result = lsim.analyze(model, PIXELS, lsim.SkipEffect(keep_first=0))["skip_effect"]

    assert bool(result.later_probability_change.isnan().all() & result.later_probability_change_largest.isnan().all())
    assert bool(result.probability_change.isfinite().all() & result.later[0, 1].isfinite())
