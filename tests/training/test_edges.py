"""Training inside `torch.inference_mode`, batches without a target, and weights that cannot have gradients."""

from __future__ import annotations

import nnsight
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training import train_adapters

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
SHORT = lsim.AlignedTraining(steps=2, lr=1e-3)


def finetuned(model):
    return lsim.finetune_aligned(model, lsim.Data(random_tokens(), batch_size=2), SHORT)


@pytest.mark.heavy("two trainings")
@pytest.mark.parametrize("mode", MODES)
def test_finetune_aligned_gives_the_same_numbers_inside_a_mode_without_gradients(mode):
    plain = tiny_llama()
    inside = tiny_llama()
    expected = finetuned(plain)

    with MODES[mode]():
        tokens = random_tokens()
        result = lsim.finetune_aligned(inside, lsim.Data(tokens, batch_size=2), SHORT)
        assert not torch.is_grad_enabled()

    assert worst(expected, result) == 0
    for (name, a), b in zip(plain.named_parameters(), inside.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not any(parameter.is_inference() for parameter in inside.parameters())


def trained_stitch(model):
    return lsim.stitch(
        model, model, lsim.Data(random_tokens(), batch_size=2), at=(0, 1), training=lsim.stitching.StitchTraining(steps=2)
    )


NEED_GRADIENTS = {
    "finetune_aligned": finetuned,
    "aligned_loss": lambda model: lsim.training.aligned_loss(model, random_tokens()),
    "stitch": trained_stitch,
    "block_jacobians": lambda model: lsim.prompts.block_jacobians(model, random_tokens()[0]),
    "block_coupling": lambda model: lsim.analyze(model, random_tokens(), "block_coupling"),
    "train_adapters": lambda model: train_adapters(nnsight.NNsight(model), random_tokens(), steps=1),
}


@pytest.mark.parametrize("name", NEED_GRADIENTS)
def test_weights_made_under_inference_mode_are_refused_by_name(name):
    with torch.inference_mode():
        model = tiny_llama()
    with pytest.raises(lsim.LayersimError, match=r"LlamaForCausalLM .*torch\.inference_mode"):
        NEED_GRADIENTS[name](model)


def test_weights_made_under_inference_mode_are_enough_where_no_gradient_is_needed():
    with torch.inference_mode():
        model = tiny_llama()
        assert float(lsim.training.aligned_loss(model, random_tokens())) > 0
    usual = tiny_llama()
    prompt = random_tokens(2)

    assert lsim.EarlyExit(model, 0.5).generate(prompt, max_new_tokens=3).tokens[0].tolist() == (
        lsim.EarlyExit(usual, 0.5).generate(prompt, max_new_tokens=3).tokens[0].tolist()
    )

    stitched = [lsim.stitch(m, m, random_tokens(), at=(0, 1), fit="lstsq").penalty for m in (model, usual)]
    assert stitched[0] == stitched[1]


def test_tokens_made_under_inference_mode_give_the_loss_and_its_gradient():
    model = tiny_llama()
    expected = lsim.training.aligned_loss(model, random_tokens())
    with torch.inference_mode():
        tokens = random_tokens()
        inside = float(lsim.training.aligned_loss(model, tokens))
        mask = torch.ones_like(tokens)
    loss = lsim.training.aligned_loss(model, tokens, attention_mask=mask)
    loss.backward()

    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert inside == pytest.approx(expected.item(), abs=1e-6)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_truncate_works_inside_inference_mode():
    model = tiny_llama()
    with torch.inference_mode():
        short = lsim.truncate(model, 2)

    assert short.config.num_hidden_layers == 2
    assert not any(parameter.is_inference() for parameter in short.parameters())


@pytest.mark.parametrize(
    ("tokens", "labels", "mask", "says"),
    [
        (random_tokens(2, 6), torch.full((2, 6), -100), None, "`labels` has no target"),
        (random_tokens(2, 1), None, None, "`tokens` has no next token"),
        (random_tokens(2, 6), None, torch.zeros(2, 6, dtype=torch.int64), "`tokens` has no next token"),
    ],
    ids=["labels all -100", "rows of one token", "nothing attended"],
)
def test_aligned_loss_without_a_target_is_refused_and_not_nan(llama, tokens, labels, mask, says):
    with pytest.raises(lsim.LayersimError, match=says):
        lsim.training.aligned_loss(llama, tokens, labels, attention_mask=mask)


@pytest.mark.parametrize(("objective", "place"), [("aligned", "last"), ("cosine-reg", "first")])
def test_a_batch_without_a_target_leaves_the_trainers_loss_and_weights_finite(objective, place, tmp_path):
    from transformers import TrainingArguments

    losses = []

    class Watched(lsim.training.AlignedTrainer):
        def compute_loss(self, *args, **options):
            loss = super().compute_loss(*args, **options)
            losses.append(loss.item())
            return loss

    model = tiny_llama()
    nothing = [{"input_ids": row.tolist(), "labels": [-100] * 6} for row in random_tokens(1, 6)]
    something = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_tokens(1, 6)]
    rows = nothing + something if place == "first" else something + nothing
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    aligned = lsim.AlignedTraining(objective=objective, schedule="always")

    with pytest.warns(lsim.LayersimWarning, match="are all -100"):
        Watched(model, arguments, train_dataset=rows, aligned=aligned).train()

    assert len(losses) == 2
    assert all(loss == loss for loss in losses)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
