"""Task metrics: scikit-learn and SciPy on predictions that the test stores, regression heads, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.input_models import image_vit, pair_bert, pair_data, pixels
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import bridge, nnsight
from ..running.options import called

ROWS = 24


def data(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return pair_data(rows)


def head_outputs(model, inputs) -> np.ndarray:
    """`layer row output`: the model's own pooler and classifier on [CLS] of every block's output, row by row."""
    tables = []
    for row in range(len(inputs["input_ids"])):
        kept = inputs["attention_mask"][row].bool()
        own = {name: values[row][kept][None] for name, values in inputs.items() if name != "attention_mask"}
        with torch.no_grad():
            states = model(**own, output_hidden_states=True).hidden_states[1:]
            tables.append(torch.stack([model.classifier(model.bert.pooler(state))[0] for state in states]))
    return torch.stack(tables, dim=1).numpy()


@pytest.mark.light("2")
@pytest.mark.parametrize("classes", [2, 3])
def test_it_is_scikit_learn_on_stored_predictions(classes):
    from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, matthews_corrcoef

    model, inputs = pair_bert(labels=classes), data()
    # Classes of different sizes, so that a mean over classes is not one over rows.
    label = (torch.arange(ROWS) % 7).clamp(max=classes - 1)
    found = lsim.analyze(model, lsim.Data(inputs, batch_size=7), lsim.TaskMetrics(labels=label))["task_metrics"]
    predicted = head_outputs(model, inputs).argmax(-1)
    for layer, said in enumerate(predicted):
        assert float(found.accuracy[layer]) == pytest.approx(accuracy_score(label, said))
        np.testing.assert_array_equal(found.confusion[layer], confusion_matrix(label, said, labels=range(classes)))
        assert float(found.f1[layer]) == pytest.approx(f1_score(label, said, average="macro"))
        assert float(found.mcc[layer]) == pytest.approx(matthews_corrcoef(label, said))
        np.testing.assert_allclose(found.f1_by_class[:, layer], f1_score(label, said, average=None))
        if classes == 2:
            assert float(found.f1_by_class[1, layer]) == pytest.approx(f1_score(label, said))
    assert len({tuple(said) for said in predicted}) > 1
    last = f1_score(label, predicted[-1], average=None)
    assert last[0] != last[1]
    assert found.headline().get("F1 of class 1 at the last layer") == (pytest.approx(last[1]) if classes == 2 else None)


def test_labels_of_the_data_and_the_logit_lens_agree():
    model, inputs = pair_bert(), data()
    report = lsim.analyze(
        model,
        inputs | {"labels": torch.arange(ROWS) % 3},
        [lsim.LogitLens(labels="data"), lsim.TaskMetrics(labels="data")],
    )
    assert torch.equal(report["task_metrics"].accuracy, report["logit_lens"].accuracy)


def test_rows_without_a_label_are_left_out():
    model, inputs = pair_bert(), data()
    label = torch.arange(ROWS) % 3
    label[::2] = -100
    found = lsim.analyze(model, inputs, lsim.TaskMetrics(labels=label))["task_metrics"]
    some = {name: values[1::2] for name, values in inputs.items()}
    alone = lsim.analyze(model, some, lsim.TaskMetrics(labels=label[1::2]))["task_metrics"]
    assert torch.equal(found.confusion, alone.confusion)
    assert found.confusion[0].sum() == ROWS / 2


@pytest.mark.parametrize("labels", [[0] * 12, [2] * 12])
def test_one_class_alone_has_no_correlation(labels):
    x = residuals(tokens=12)
    found = from_views(lsim.TaskMetrics(labels="data"), [view(x, labels=torch.tensor(labels))])
    expected = oracles.oracle_task_metrics([x], labels)
    np.testing.assert_allclose(found.f1, expected["values"])
    assert (found.mcc == 0).all()
    assert np.isnan(found.f1_by_class[7, 0])


def test_perfect_predictions_have_every_metric_at_one():
    x = residuals(tokens=30)
    said = [row[-1]["said"] for row in oracles.lens_by_token([x], [None] * 30)]
    found = from_views(lsim.TaskMetrics(labels="data"), [view(x, labels=torch.tensor(said))])
    assert (found.f1[-1], found.mcc[-1], found.accuracy[-1]) == (1, 1, 1)


@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_norm_is_that_of_the_logit_lens(norm):
    model, tokens = tiny_llama(), random_tokens(6, 9)
    report = lsim.analyze(model, tokens, [lsim.TaskMetrics(norm=norm), lsim.LogitLens(norm=norm)])
    assert torch.equal(report["task_metrics"].accuracy, report["logit_lens"].accuracy)


def test_images_and_classes_of_tokens():
    images, label = pixels(12), torch.arange(12) % 3
    model = image_vit()
    found = lsim.analyze(model, images, [lsim.TaskMetrics(labels=label), lsim.LogitLens(labels=label)])
    with torch.no_grad():
        predicted = model(images).logits.argmax(-1)
    expected = oracles.classification_metrics(label.tolist(), predicted.tolist(), 3)
    np.testing.assert_allclose(found["task_metrics"].f1_by_class[:, -1], expected[0])
    assert float(found["task_metrics"].mcc[-1]) == pytest.approx(expected[2])
    assert found["task_metrics"].confusion.shape == (3, 3, 3)


@pytest.mark.light("nnsight")
@pytest.mark.parametrize("make", [lambda m: nnsight(m), lambda m: bridge(m)], ids=["nnsight", "bridge"])
def test_other_sources_give_one_answer(make):
    tokens = random_tokens(6, 9)
    here = lsim.analyze(tiny_llama(), tokens, "task_metrics")["task_metrics"]
    there = lsim.analyze(make(tiny_llama()), tokens, "task_metrics")["task_metrics"]
    assert (here.confusion - there.confusion).abs().sum() <= 2


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("classes", [1, 3])
def test_a_simulated_server_gives_one_answer(classes):
    labels = torch.rand(ROWS) if classes == 1 else torch.arange(ROWS) % 3
    here, there = (
        called(lsim.analyze, model, data(), lsim.TaskMetrics(labels=labels), **options)["task_metrics"]
        for model, options in (
            (pair_bert(labels=classes), {}),
            (nnsight(pair_bert(labels=classes)), {"remote": "local"}),
        )
    )
    for name in here.tensor_fields():
        np.testing.assert_allclose(getattr(there, name), getattr(here, name), atol=1e-9, err_msg=name)


@pytest.mark.light("7")
@pytest.mark.parametrize("batch_size", [1, 7, ROWS])
def test_correlations_of_a_regression_head_are_those_of_scipy(batch_size):
    from scipy.stats import pearsonr, spearmanr

    model, inputs = pair_bert(labels=1), data()
    scores = np.random.default_rng(0).normal(size=ROWS)
    scores[3:6] = scores[3]
    scores[10] = np.nan
    found = lsim.analyze(model, lsim.Data(inputs, batch_size=batch_size), lsim.TaskMetrics(labels=scores))["task_metrics"]
    known = ~np.isnan(scores)
    for layer, said in enumerate(head_outputs(model, inputs)[..., 0]):
        assert float(found.spearman[layer]) == pytest.approx(spearmanr(said[known], scores[known]).statistic)
        assert float(found.pearson[layer]) == pytest.approx(pearsonr(said[known], scores[known]).statistic)
    assert found.rows == ROWS - 1
    # Scores of rows that the data does not have.
    with pytest.warns(lsim.LayersimWarning, match="labels"):
        more = lsim.analyze(model, inputs, lsim.TaskMetrics(labels=np.append(scores, [5.0, -5.0])))["task_metrics"]
    torch.testing.assert_close(more.pearson, found.pearson)
    assert more.rows == ROWS - 1
    assert found.headline()["Spearman correlation of the last layer"] == float(found.spearman[-1])


def test_a_regression_result_is_a_file_and_a_figure(tmp_path):
    found = lsim.analyze(pair_bert(labels=1), data(), lsim.TaskMetrics(labels=torch.rand(ROWS)))["task_metrics"]
    again = lsim.load(found.save(tmp_path / "metrics.safetensors"))
    assert torch.equal(again.values, found.values)
    assert torch.equal(again.pearson, found.pearson)
    for picture in found.pictures:
        assert found.plot(picture.name).data


def test_equal_predictions_have_no_correlation():
    model = pair_bert(labels=1)
    with torch.no_grad():
        # All positions are equal after the last block.
        model.bert.encoder.layer[-1].output.LayerNorm.weight.zero_()
    with pytest.warns(lsim.LayersimWarning, match=r"NaN at blocks\.2\.hook_resid_post"):
        found = lsim.analyze(model, data(), lsim.TaskMetrics(labels=torch.rand(ROWS)))["task_metrics"]
    assert found.spearman.isnan().tolist() == found.pearson.isnan().tolist() == [False, False, True]
    assert found.headline() == {}


REFUSED = {
    r"head has one output.*labels\.float\(\)": (1, {"labels": torch.zeros(ROWS, dtype=torch.long)}, {}),
    r"3 outputs.*labels\.long\(\)": (3, {"labels": torch.rand(ROWS)}, {}),
    "`labels`.* 1 .* 24 ": (1, {"labels": torch.ones(ROWS)}, {}),
    r"correlation .*\b2\b.* 1\.": (1, {"labels": torch.tensor([1.0] + [torch.nan] * (ROWS - 1))}, {}),
    r"makes one prediction per row": (1, {"labels": torch.rand(ROWS)}, {"seq_len": 6}),
    r"`labels`.*\(19,\).* 24\b": (1, {"labels": torch.rand(ROWS - 5)}, {}),
    "classifies whole rows": (3, {}, {}),
    "`max_memory_gb` is 1e-09": (3, {"labels": torch.arange(ROWS) % 3, "max_memory_gb": 1e-9}, {}),
    r"`labels`.* 0 to 3\b.* 0 to 2\b": (3, {"labels": torch.arange(ROWS) % 4}, {}),
    r"TaskMetrics .*\b1\b.* 0\.": (3, {"labels": torch.full((ROWS,), -100)}, {}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_it_cannot_do_is_refused(says):
    classes, options, reading = REFUSED[says]
    with pytest.raises(lsim.LayersimError, match=says):
        called(lsim.analyze, pair_bert(labels=classes), data(), lsim.TaskMetrics(**options), **reading)


def test_a_large_vocabulary_is_refused_before_the_run():
    with pytest.raises(lsim.LayersimError, match=r"0\.00072 GB; `max_memory_gb` is 0\.0007"):
        # Three tables of 3 x 10000 numbers of 8 bytes are 0.00072 GB.
        lsim.analyze(tiny_llama(), random_tokens(), lsim.TaskMetrics(max_memory_gb=7e-4))
    assert lsim.analyze(tiny_llama(), random_tokens(), lsim.TaskMetrics(max_memory_gb=8e-4))
    with pytest.raises(lsim.LayersimError, match=r"`labels`.*\(3, 2\)"):
        lsim.TaskMetrics(labels=torch.rand(3, 2))
    with pytest.raises(lsim.LayersimError, match="must be 'next_token', 'data'"):
        lsim.TaskMetrics(labels="classes")
