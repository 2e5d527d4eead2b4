"""The aligned loss and its training for models with every kind of head, against the model's own forward pass."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training import train_adapters

from ..models.head_models import CASES, block_outputs, replaced
from ..models.wrapped_models import nnsight
from ..running.options import called

LABELS = torch.tensor([0, 2, 1, 1, 0])
WEIGHTS = torch.tensor([1, 2, 3], dtype=torch.float64) / 6
CE = torch.nn.functional.cross_entropy
KINDS = ("distilbert", "deberta-v2", "modernbert mean", "deit with teacher", "dinov2", "clip", "beit", "llama")


def live_logits(model, paths, inputs) -> torch.Tensor:
    """`row layer class` with gradients: the model's logits with each block's output in place of the last one's."""
    seen, last = [], model.get_submodule(paths[-1])
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda _m, _a, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        for path in paths
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    logits = []
    for x in seen:
        handle = last.register_forward_hook(lambda _m, _a, output, x=x: replaced(output, x))
        logits.append(model(**inputs).logits)
        handle.remove()
    return torch.stack(logits, 1)


def naive_losses(case, model) -> torch.Tensor:
    """Cross-entropy of each layer."""
    logits = torch.cat([live_logits(model, case.paths, row) for row in case.rows()])
    return torch.stack([CE(logits[:, layer], LABELS) for layer in range(3)])


def naive_loss(case, model) -> torch.Tensor:
    return naive_losses(case, model) @ WEIGHTS


@pytest.mark.light("distilbert", "llama")
@pytest.mark.parametrize("name", KINDS)
def test_the_aligned_loss_and_its_gradient(name):
    case, data = CASES[name], CASES[name].data()
    model, own = case.build(), case.build()
    tokens = data.get("pixel_values", data.get("input_ids"))
    loss = called(lsim.training.aligned_loss, model, tokens, LABELS, attention_mask=data.get("attention_mask"), **case.options)
    expected = naive_loss(case, own)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    for (path, found), other in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(
            torch.zeros_like(found) if found.grad is None else found.grad,
            torch.zeros_like(other) if other.grad is None else other.grad,
            rtol=1e-7,
            atol=1e-10,
            msg=path,
        )


@pytest.mark.light("modernbert mean-aligned-weights0")
@pytest.mark.parametrize(("objective", "weights"), [("aligned", WEIGHTS), ("standard", torch.tensor([0, 0, 1.0]).double())])
@pytest.mark.parametrize("name", ["modernbert mean", "dinov2"])
def test_a_step_lowers_the_loss_that_the_lens_measures(name, objective, weights):
    case = CASES[name]
    model, data = case.build(), case.data(labels=LABELS)
    settings = lsim.AlignedTraining(steps=1, lr=1e-4, warmup=0, objective=objective, schedule="always")
    before = naive_losses(case, model).detach()
    result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=5), settings, eval_data=data)
    after = naive_losses(case, model).detach()
    assert after @ weights < before @ weights
    torch.testing.assert_close(result.values[0], before, rtol=1e-9, atol=0)
    torch.testing.assert_close(result.values[-1], after, rtol=1e-9, atol=0)
    lens = lsim.analyze(model, data, lsim.LogitLens(labels="data"))["logit_lens"]
    torch.testing.assert_close(lens.cross_entropy, after, rtol=1e-9, atol=0)


@pytest.mark.parametrize("over", ["targets", "attended"])
def test_the_cosine_regulariser_beside_the_loss_of_pooled_rows(over):
    case, data = CASES["modernbert mean"], CASES["modernbert mean"].data(labels=LABELS)
    settings = lsim.AlignedTraining(steps=1, lr=1e-4, warmup=0, objective="cosine-reg", beta=0.5, cosine_over=over)
    result = lsim.finetune_aligned(case.build(), lsim.Data(data, batch_size=5), settings, eval_data=data)
    model = case.build()
    rows = [torch.stack(block_outputs(model, case.paths, row))[:, 0] for row in case.rows()]
    # The head reads the mean of a row.
    x = torch.cat([row.mean(1, keepdim=True) for row in rows] if over == "targets" else rows, 1)
    away = [(1 - torch.cosine_similarity(x[layer], x[-1], -1)).mean() for layer in range(2)]
    expected = naive_losses(case, model)[-1].detach() + 0.5 * (away[0] * WEIGHTS[0] + away[1] * WEIGHTS[1])
    torch.testing.assert_close(result.loss[0], expected, rtol=1e-12, atol=0)


def test_a_head_of_its_own_for_each_layer_reads_pooled_rows():
    case = CASES["dinov2"]
    model, data = case.build(), case.data(labels=LABELS)
    settings = lsim.AlignedTraining(steps=1, lr=1e-4, warmup=0, objective="multi-head")
    result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=5), settings, eval_data=data)
    # The heads begin as copies of the model's.
    torch.testing.assert_close(result.values[0], naive_losses(case, case.build()).detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["modernbert mean", "distilbert"])
def test_adapters_of_a_traced_classifier(name):
    case = CASES[name]
    data = case.data(labels=LABELS)
    adapters = train_adapters(nnsight(case.build()), lsim.Data(data, batch_size=5), steps=2, lr=1e-3, rank=2, eval_data=data)
    torch.testing.assert_close(adapters.values[0], naive_losses(case, case.build()).detach(), rtol=1e-8, atol=0)
    assert adapters.aligned("after") < adapters.aligned("before")
