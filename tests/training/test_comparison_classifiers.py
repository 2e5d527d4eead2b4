"""evaluate_layers of classifiers: cosines and collapse at the position that the head reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.head_models import CASES, block_outputs
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import bert


def data(rows: int = 12, length: int = 7) -> tuple[list[dict], torch.Tensor]:
    tokens = random_tokens(rows, length, seed=4)
    return [{"input_ids": row.tolist(), "label": i % 3} for i, row in enumerate(tokens)], tokens


def at_position(model, blocks, tokens: torch.Tensor, position: int) -> np.ndarray:
    """`layer row d_model` at one position, by hooks of the test's own."""
    hidden: list[torch.Tensor] = []

    def first(x):
        return x[0] if isinstance(x, tuple) else x

    handles = [blocks[0].register_forward_pre_hook(lambda m, a: hidden.append(a[0]))]
    handles += [block.register_forward_hook(lambda m, a, o: hidden.append(first(o))) for block in blocks]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(hidden)[:, :, position].double().numpy()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("center", ["none", "dataset"])
def test_the_cosine_to_the_last_layer_of_a_bert_classifier_is_of_cls(center):
    rows, tokens = data()
    model = bert()

    result = lsim.evaluate_layers(model, bert(), rows, center=center)
    x = at_position(model, model.bert.encoder.layer, tokens, 0)
    # Another first token in each row, so that [CLS] differs at the embedding too.
    expected = oracles.oracle_cosine([x], center=center)

    np.testing.assert_allclose(result["layers"].cosine_to_last[0], expected["values"][:, -1], atol=1e-5)
    np.testing.assert_allclose(result["cosine_before"].values, expected["values"], atol=1e-5)

    every = lsim.analyze(model, lsim.Data(rows, positions="all"), lsim.Cosine(center=center))["cosine"]
    assert np.abs(every.values[:, -1].numpy() - expected["values"][:, -1]).max() > 0.01

    labels = [row["label"] for row in rows]
    collapse = oracles.oracle_neural_collapse([x], labels, 3)
    np.testing.assert_allclose(result["layers"].nc1[0], collapse["values"], rtol=1e-3)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_collapse_of_a_head_of_rows_is_that_of_its_vectors():
    case = CASES["dinov2"]
    labels = torch.tensor([0, 1, 0, 1, 0])

    result = lsim.evaluate_layers(case.build(), case.build(1), case.data(labels=labels))["layers"]

    for number in range(2):
        model = case.build(number)
        x = [torch.cat(block_outputs(model, case.paths, row)) for row in case.rows()]
        vectors = torch.stack([torch.cat([row[:, 0], row[:, 1:].mean(1)], -1) for row in x], 1).numpy()
        expected = oracles.oracle_neural_collapse([vectors], labels.tolist(), 2)["values"]
        np.testing.assert_allclose(result.nc1[number][1:], expected, rtol=1e-7)
        logits = torch.cat([model(**row).logits for row in case.rows()]).detach()
        np.testing.assert_allclose(result.values[number][-1], torch.nn.functional.cross_entropy(logits, labels), rtol=1e-9)


@pytest.mark.heavy("a comparison of trainings")
def test_the_cosine_to_the_last_layer_of_a_llama_classifier_is_of_the_last_token():
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels = 3
    config.pad_token_id = 2
    model = LlamaForSequenceClassification(config).eval()
    rows, tokens = data()

    result = lsim.evaluate_layers(model, model, rows, center="none")["layers"]
    x = at_position(model, model.model.layers, tokens, -1)

    np.testing.assert_allclose(result.cosine_to_last[0], oracles.oracle_cosine([x], center="none")["values"][:, -1], atol=1e-5)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_task_metrics_of_both_classifiers_are_side_by_side():
    from sklearn.metrics import f1_score, matthews_corrcoef

    rows, tokens = data()
    model = bert()
    after = bert()
    with torch.no_grad():
        after.classifier.weight.neg_()

    result = lsim.evaluate_layers(model, after, rows)["layers"]
    labels = [row["label"] for row in rows]

    for number, model_side in enumerate((model, after)):
        with torch.no_grad():
            predicted = model_side(tokens).logits.argmax(-1)
        assert float(result.f1[number, -1]) == pytest.approx(f1_score(labels, predicted, average="macro"))
        assert float(result.mcc[number, -1]) == pytest.approx(matthews_corrcoef(labels, predicted))
        alone = lsim.analyze(model_side, rows, lsim.TaskMetrics(labels="data"))["task_metrics"]
        assert torch.equal(result.f1[number], alone.f1)
    assert len(result.plot("f1").data) == 2
    assert "before: macro F1 of the last layer" in result.headline()

    of_tokens = lsim.evaluate_layers(tiny_llama(), tiny_llama(), tokens)["layers"]
    assert bool(of_tokens.f1.isnan().all())
    assert bool(of_tokens.mcc.isnan().all())
    assert "before: macro F1 of the last layer" not in of_tokens.headline()


def test_data_of_one_class_has_no_collapse_and_other_errors_are_raised(monkeypatch):
    rows, _ = data()
    with pytest.warns(lsim.LayersimWarning) as issued:
        result = lsim.evaluate_layers(bert(), bert(), [row | {"label": 0} for row in rows])["layers"]

    assert bool(result.nc1.isnan().all())
    assert sum("NC1" in str(warning.message) for warning in issued) == 2

    def fails(self, sums, run):
        raise lsim.LayersimError("`model` is of another class.")

    monkeypatch.setattr(lsim.NeuralCollapse, "compute", fails)
    with pytest.raises(lsim.LayersimError, match="`model`"):
        lsim.evaluate_layers(bert(), bert(), rows)
