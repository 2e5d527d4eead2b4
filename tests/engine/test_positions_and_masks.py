"""Positions that pooling takes, and masks that a loss heeds: off by one, or ignored, they would change numbers silently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View

from .. import oracles
from ..inputs.views import from_views, residuals
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called
from ..training.helpers import bert


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
@pytest.mark.parametrize("estimator", ["minibatch", "exact"])
@pytest.mark.filterwarnings("ignore:CKA rests on")
def test_cka_of_rows_takes_the_token_that_it_is_told_to(pool, estimator):
    """Rows of different lengths; no two tokens of a row alike."""
    lengths = [3, 1, 5, 2, 4, 6, 2]
    x = residuals(1, tokens=sum(lengths))
    row = np.repeat(np.arange(len(lengths)), lengths)
    at = np.concatenate([np.arange(n) for n in lengths])
    view = View(torch.as_tensor(x), torch.as_tensor(oracles.tokens_of(len(row))), torch.as_tensor(row), torch.as_tensor(at))
    result = from_views(lsim.CKA(level="sequence", pool=pool, estimator=estimator), [view])
    take = {"first": lambda z: z[:, 0], "last": lambda z: z[:, -1], "mean": lambda z: z.mean(1)}[pool]
    pooled = np.stack([take(x[:, row == n]) for n in range(len(lengths))], axis=1)
    expected = oracles.oracle_cka([pooled - pooled.mean(1, keepdims=True)])["values"]

    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    assert result.samples == len(lengths)


@pytest.mark.light("right")
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_that_is_masked_in_the_model_counts_on_request(side):
    model = bert()
    tokens = random_tokens(6, 9)
    mask = torch.arange(9) < torch.tensor([9, 5, 7, 3, 5, 4])[:, None]
    mask = mask if side == "right" else mask.flip(1)
    with torch.no_grad():
        states = model(tokens, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    expected = oracles.oracle_cosine([torch.stack(states).flatten(1, 2).double().numpy()])["values"]
    data = {"input_ids": tokens, "attention_mask": mask.long()}
    results = [
        lsim.analyze(model, lsim.Data(data, batch_size=n, positions="padded"), lsim.Cosine())["cosine"] for n in (1, 2, 16)
    ]

    for result in results:
        np.testing.assert_allclose(result.values, expected, atol=1e-5)
        assert (result.provenance.tokens, result.provenance.data) == (54, results[0].provenance.data)

    alone = lsim.analyze(model, lsim.Data(data, positions="all"), lsim.Cosine())["cosine"]
    assert alone.provenance.tokens == 33
    if side == "right":
        assert alone.provenance.data != results[0].provenance.data


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_aligned_loss_heeds_the_attention_mask(kind):
    """Padded rows have the loss of the rows by themselves, whatever stands in the padding; on the left the positions shift."""
    model = tiny_llama() if kind == "llama" else bert()
    rows = random_tokens(2, 9)
    mask = torch.ones_like(rows)
    if kind == "llama":
        mask[0, :4] = 0
        labels = None
        alone = [rows[:1, 4:], rows[1:]]
        counts = [4, 8]
        parts = [lsim.training.aligned_loss(model, row) for row in alone]
    else:
        mask[0, 5:] = 0
        labels = torch.tensor([1, 2])
        alone = [rows[:1, :5], rows[1:]]
        counts = [1, 1]
        parts = [lsim.training.aligned_loss(model, row, labels[n : n + 1]) for n, row in enumerate(alone)]
    options = {}
    if kind == "llama":
        options = {"inputs": {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}}
    loss = called(lsim.training.aligned_loss, model, rows, labels, attention_mask=mask, **options)
    expected = sum(n * float(part.detach()) for n, part in zip(counts, parts, strict=True)) / sum(counts)

    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)

    ignored = lsim.training.aligned_loss(model, rows, labels)
    assert float(ignored.detach()) != pytest.approx(expected, rel=1e-3)
