"""Fixtures of tests/models."""

from __future__ import annotations

import pytest
import torch

from ..tiny_models import random_tokens


@pytest.fixture(scope="session")
def data():
    mask = torch.ones(6, 20, dtype=torch.int64)
    mask[3, 12:] = 0
    mask[4, :5] = 0
    return {"input_ids": random_tokens(6, 20), "attention_mask": mask}
