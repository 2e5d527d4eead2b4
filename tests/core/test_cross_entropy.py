"""One cross-entropy: what stitches, trainings and adapters report is what LogitLens reports, at large vocabularies too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.core.cross_entropy import confidence, cross_entropy, cross_entropy_slopes

from ..models.tiny_models import random_tokens

VOCABULARY = 151_936


@pytest.fixture(scope="module")
def wide():
    """A model with as many token ids as Qwen's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(2))


def naive(logits: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Row by row, in float64."""
    losses = []
    for row, answer in zip(logits.astype(np.float64), right, strict=True):
        losses.append(np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[answer])
    return np.array(losses)


def lens_losses(model, data) -> torch.Tensor:
    return lsim.analyze(model, data, lsim.LogitLens())["logit_lens"].cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_a_cross_entropy_is_that_of_float64_arithmetic(dtype, size):
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(6, VOCABULARY, generator=generator)).to(dtype)
    right = torch.randint(0, VOCABULARY, (6,), generator=generator)
    logits[0, 5:9] = -torch.inf
    exact = naive(logits.double().numpy(), right.numpy())
    before = logits.clone()

    np.testing.assert_allclose(cross_entropy(logits, right), exact, rtol=1e-12)
    assert torch.equal(logits, before)

    top = np.sort(np.exp(logits.double().numpy() - logits.double().numpy().max(-1, keepdims=True)), -1)
    top /= top.sum(-1, keepdims=True)
    np.testing.assert_allclose(confidence(logits), top[:, -1], rtol=1e-12)
    np.testing.assert_allclose(confidence(logits, margin=True), top[:, -1] - top[:, -2], rtol=1e-9)

    if dtype != torch.bfloat16:
        wide = logits.double().requires_grad_()
        share = torch.linspace(0.1, 1, 6).to(dtype)
        (torch.nn.functional.cross_entropy(wide, right, reduction="none") * share).sum().backward()
        losses, slopes = cross_entropy_slopes(logits.requires_grad_(), right, share)
        np.testing.assert_allclose(losses, exact, rtol=1e-7)
        np.testing.assert_allclose(slopes.detach(), wide.grad, atol=1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.heavy("a stitch")
def test_a_stitch_has_the_loss_of_the_logit_lens(wide, tokens):
    stitched = lsim.stitch(wide, wide, tokens, at=(0, 0), adapter="identity", eval_data=tokens)
    lens = float(lens_losses(wide, tokens)[-1])
    assert stitched.loss == pytest.approx(lens, abs=1e-7)
    assert stitched.back_loss == pytest.approx(lens, abs=1e-7)


@pytest.mark.heavy("a training")
def test_the_aligned_loss_is_that_of_the_logit_lens(wide, tokens):
    expected = float(lens_losses(wide, tokens).mean())
    # A number of float32: 12 nats to 1e-6.
    assert float(lsim.training.aligned_loss(wide, tokens, weights="uniform").detach()) == pytest.approx(expected, abs=2e-6)
    with torch.no_grad():
        assert float(lsim.training.aligned_loss(wide, tokens, weights="uniform")) == pytest.approx(expected, abs=2e-6)


@pytest.mark.heavy("a training")
def test_what_a_training_is_judged_by_is_the_logit_lens(wide, tokens):
    import copy

    settings = lsim.AlignedTraining(steps=1, lr=1e-9, warmup=0)
    training_result = lsim.finetune_aligned(
        copy.deepcopy(wide), lsim.Data(tokens, batch_size=4), eval_data=tokens, training=settings
    )
    np.testing.assert_allclose(training_result.values[0], lens_losses(wide, tokens), atol=1e-6)


def test_a_head_with_a_soft_cap_has_the_losses_of_the_logit_lens_too():
    from ..training.helpers import gemma2

    model = gemma2()
    rows = random_tokens(4, 10)
    expected = float(lens_losses(model, rows).mean())
    assert float(lsim.training.aligned_loss(model, rows, weights="uniform").detach()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sloped", [False, True])
def test_adapters_on_a_server_are_judged_by_the_same_cross_entropy(wide, sloped):
    from tl_layersim.remote.low_rank_adapters import summed_cross_entropy

    x = torch.randn(9, 16)
    targets = torch.randint(0, VOCABULARY, (9,))
    head = Unembed(None, (wide.lm_head,), "every", 1.0, None, torch.float32, None)
    loss, slope = summed_cross_entropy(head, x, targets, sloped)
    exact = naive(wide.lm_head(x).detach().numpy(), targets.numpy()).sum()
    assert float(loss) == pytest.approx(exact, rel=1e-7 if sloped else 1e-12)
    assert (slope is not None) == sloped


def test_there_is_no_other_cross_entropy_in_the_package():
    """F.cross_entropy adds up a vocabulary in float32."""
    for path in Path(lsim.__file__).parent.rglob("*.py"):
        assert "functional.cross_entropy(" not in path.read_text(), path
