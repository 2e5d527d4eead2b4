"""Linear probes of models on a server: sums there, fits here."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens
from ..running.options import called
from .helpers import here


@pytest.mark.parametrize("options", [{"positions": "mean"}, {"at": "z", "per_head": True}])
def test_a_model_on_a_server_gives_the_answer_of_one_here(small, options):
    tokens = random_tokens(30, 6)
    how = {"probe": lsim.LinearProbe(labels=tokens[:, -1] % 3), "batch_size": 8, **options}
    far = called(lsim.linear_probe, small.model(), tokens, remote=small.url, **how)
    near = called(lsim.linear_probe, here(small, "llama"), tokens, **how)
    assert torch.equal(far.confusion, near.confusion)
    assert torch.equal(far.train_accuracy, near.train_accuracy)
    assert far.layers == near.layers


def test_held_out_data_of_its_own_on_a_server(small):
    tokens = random_tokens(30, 6)
    labels = tokens[:, -1] % 2
    train, test = ({"input_ids": tokens[part], "labels": labels[part]} for part in (slice(20), slice(20, None)))
    data = lsim.Data(train, positions="last")
    far = lsim.linear_probe(lsim.open_model(small.model(), remote=small.url), data, test_data=test)
    near = lsim.linear_probe(here(small, "llama"), data, test_data=test)
    assert torch.equal(far.confusion, near.confusion)
