"""On real pretrained models: coupling of blocks."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from .files import optional_real


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_trained_blocks_couple_more_than_random_ones(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(model.config).eval()
    fresh.tokenizer = model.tokenizer
    texts = [
        "Once upon a time there was a little girl",
        "The dog ran to the park and saw a big",
        "Tom was sad because he lost his",
    ]
    trained, random = (lsim.analyze(m, texts, lsim.BlockCoupling(k=10))["block_coupling"] for m in (model, fresh))
    assert trained.mean() > random.mean() + 0.01
    # Without training, blocks know nothing of each other.
    assert abs(random.mean("values") - random.mean("null")) < 0.01


def test_coupling_of_a_real_model_is_that_of_the_formula():
    from transformers import AutoModelForCausalLM

    from .. import oracles
    from ..jacobians.helpers import calls_of, naive

    model = AutoModelForCausalLM.from_pretrained(optional_real("models", "stories260K"), dtype=torch.float32).eval()
    tokens = torch.tensor([[1, 403, 407, 261, 378, 432, 285]])
    found = lsim.analyze(model, tokens, lsim.BlockCoupling(k=10))["block_coupling"]
    jacobians = [naive(call, 0, 6, 6).numpy() for call in calls_of(model, lambda: model(tokens, use_cache=False))]
    expected = [[oracles.miscoupling(oracles.coupling_matrix(a, b, 10)) for b in jacobians] for a in jacobians]
    torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)
