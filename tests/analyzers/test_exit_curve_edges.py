"""Exit curves without targets, of heads without next tokens, and with an agreement of exactly 95 %."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL

from ..tiny_models import random_tokens
from ..views import from_views, residuals, view


@pytest.mark.parametrize("analyzer", [lsim.ExitCurve, lsim.LogitLens])
def test_nothing_is_said_where_no_position_has_a_target(analyzer):
    x = residuals(0, tokens=10)
    with pytest.raises(lsim.LayersimError, match="positions with a target"):
        from_views(analyzer(labels="data"), [view(x, labels=torch.full((10,), NO_LABEL))])
    one = torch.full((10,), NO_LABEL)
    one[3] = 7
    assert from_views(analyzer(labels="data"), [view(x, labels=one)]).targets == 1


@pytest.mark.parametrize("analyzer", [lsim.ExitCurve, lsim.LogitLens])
def test_a_classifier_has_no_next_token(analyzer):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=100, pad_token_id=2
    )
    model = LlamaForSequenceClassification(config).eval()
    with pytest.raises(lsim.LayersimError, match="next token"):
        lsim.analyze(model, list(random_tokens(2, 6)), analyzer())


def test_an_agreement_of_exactly_95_percent_is_enough_for_the_headline():
    found = from_views(lsim.ExitCurve(thresholds=(0.5,)), [view(residuals(0))])
    exact = dataclasses.replace(found, agreement=torch.tensor([0.95], dtype=torch.float64))
    assert exact.headline()["threshold with 95 % agreement"] == 0.5
    below = dataclasses.replace(found, agreement=torch.tensor([0.9499], dtype=torch.float64))
    assert below.headline() == {"agreement at threshold 0.5": 0.9499}
