"""`linear_probe`: held-out data of its own, logistic regression, labels of every kind, sources and refusals."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.engine import fit_linear_probes

from .. import oracles
from ..models.input_models import image_vit, pair_bert, pair_data, pixels
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge, nnsight
from ..running.options import called

ROWS, TEST = 30, 12
PROBES = {"ridge": lsim.LinearProbe, "logistic": lsim.LogisticProbe}


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(ROWS + TEST, 6)


@pytest.fixture(scope="module")
def classes(tokens):
    return tokens[:, 3] % 3


def same(a, b) -> None:
    for name in a.tensor_fields():
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.labels == b.labels


def last_states(model, tokens) -> np.ndarray:
    return np.stack([hidden_states(model, row)[:, -1] for row in tokens], axis=1)


def test_it_is_the_analyzer(llama, tokens, classes):
    options = {"positions": "last", "batch_size": 7, "at": "mlp_out"}
    found = called(
        lsim.linear_probe, llama, tokens, lsim.LinearProbe(labels=classes, test_fraction=0.4, ridge=0.3, seed=2), **options
    )
    probe = lsim.LinearProbe(labels=classes, ridge=0.3, seed=2, test_fraction=0.4)
    same(found, called(lsim.analyze, llama, tokens, probe, **options)["linear_probe"])
    assert found.provenance.options["ridge"] == 0.3
    assert found.provenance.seed == 2


def texts(rows: torch.Tensor) -> list[str]:
    return [" ".join(f"w{token}" for token in row.tolist()) for row in rows]


def examples(rows: torch.Tensor, labels: torch.Tensor):
    return ({"input_ids": row.tolist(), "label": int(y)} for row, y in zip(rows, labels, strict=True))


KINDS = {
    "a tensor": lambda rows, labels: {"input_ids": rows, "labels": labels},
    "rows of different lengths": lambda rows, labels: {"input_ids": rows.tolist(), "label": labels.tolist()},
    "a generator": examples,
    "a mapping": lambda rows, labels: {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": labels},
    "examples": lambda rows, labels: list(examples(rows, labels)),
    "texts": lambda rows, labels: {"text": texts(rows), "label": labels.tolist()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_data_of_its_own(kind, tokens, classes):
    model = tiny_llama(dtype=torch.float64)
    model.tokenizer = tiny_tokenizer()
    data, test = (KINDS[kind](tokens[part], classes[part]) for part in (slice(0, ROWS), slice(ROWS, None)))
    read = lsim.Data(data, positions="last", batch_size=8, prepend_bos=False)
    found = lsim.linear_probe(model, read, test_data=test)
    x, classes = last_states(model, tokens), classes.tolist()
    scores = [oracles.ridge_scores(layer[:ROWS], np.array(classes[:ROWS]), layer, [0, 1, 2], 0.1) for layer in x]
    expected = [np.mean(score[ROWS:].argmax(1) == classes[ROWS:]) for score in scores]
    np.testing.assert_allclose(found.accuracy, expected)
    np.testing.assert_allclose(found.train_accuracy, [np.mean(s[:ROWS].argmax(1) == classes[:ROWS]) for s in scores])
    assert found.test_samples.sum() == TEST
    assert found.samples.tolist() == [classes[:ROWS].count(c) for c in range(3)]


def test_data_sets_and_images_are_held_out_data_too():
    import datasets

    model, label = pair_bert(), [0, 1, 1, 0, 1, 0]
    rows = [{name: values[n].tolist() for name, values in pair_data().items()} | {"label": label[n]} for n in range(6)]
    whole = lsim.linear_probe(model, lsim.Data(rows[:4], positions="mean"), test_data=rows[4:])
    sets = (datasets.Dataset.from_list(part) for part in (rows[:4], rows[4:]))
    same(lsim.linear_probe(model, lsim.Data(next(sets), positions="mean"), test_data=next(sets)), whole)
    data, test = ({"pixel_values": pixels(6)[part], "labels": label[part]} for part in (slice(4), slice(4, None)))
    found = lsim.linear_probe(image_vit(), lsim.Data(data, positions="mean"), test_data=test)
    assert found.test_samples.sum() == 2


def test_labels_by_position_of_both_parts(llama, tokens):
    labels = tokens % 2
    labels[:, 2] = -100
    data = {"input_ids": tokens[:ROWS], "labels": labels[:ROWS]}
    found = lsim.linear_probe(llama, data, test_data={"input_ids": tokens[ROWS:, :5], "labels": labels[ROWS:, :5]})
    assert found.test_samples.sum() == TEST * 4
    assert found.samples.sum() == ROWS * 5
    # The embedding holds the token.
    assert found.accuracy[0] > 0.6


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_logistic_regression_is_that_of_scikit_learn(penalty, tokens, classes):
    from sklearn.linear_model import LogisticRegression

    model = tiny_llama(dtype=torch.float64)
    found = lsim.linear_probe(
        model, lsim.Data(tokens, positions="last", batch_size=5), lsim.LogisticProbe(labels=classes, C=penalty)
    )
    out = np.array(oracles.held_out_rows(len(tokens)))
    for site, x in enumerate(last_states(model, tokens)):
        x = (x - x[~out].mean(0)) / x[~out].std(0)
        fitted = LogisticRegression(C=penalty, max_iter=1000).fit(x[~out], classes.numpy()[~out])
        assert float(found.accuracy[site]) == fitted.score(x[out], classes.numpy()[out])
        assert float(found.train_accuracy[site]) == fitted.score(x[~out], classes.numpy()[~out])
    assert found.method == "logistic"
    assert found.provenance.options["C"] == penalty
    ridge = lsim.linear_probe(model, lsim.Data(tokens, positions="last"), lsim.LinearProbe(labels=classes))
    for name in ("samples", "test_samples", "majority"):
        assert torch.equal(getattr(found, name), getattr(ridge, name))


@pytest.mark.parametrize("options", [{"at": "z", "per_head": True}, {"at": ["mlp_post", "attn_out"]}])
def test_logistic_regression_at_heads_and_sites_of_different_widths(options, llama, tokens):
    label = tokens[:, -1] % 2
    found = called(lsim.linear_probe, llama, tokens, lsim.LogisticProbe(labels=label), positions="last", **options)
    for number in (0, len(found.layers) - 1):
        alone = lsim.linear_probe(
            llama, lsim.Data(tokens, positions="last"), lsim.LogisticProbe(labels=label), at=[found.layers[number]]
        )
        assert alone.accuracy[0] == found.accuracy[number]


def test_a_fit_that_does_not_converge_is_named(llama, tokens, classes):
    with pytest.warns(lsim.LayersimWarning, match=r"stopped at max_iter=2 before it converged, at blocks\.0\.hook_resid_pre"):
        lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), lsim.LogisticProbe(labels=classes, C=1e4, max_iter=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "LinearProbe is evaluated on")
        lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), lsim.LogisticProbe(labels=classes))


def test_equal_samples_are_named_by_logistic_regression_too(llama, tokens, classes):
    equal = tokens.clone()
    equal[:, 0] = 5
    for method in ("ridge", "logistic"):
        with pytest.warns(lsim.LayersimWarning, match=r"blocks\.0\.hook_resid_pre"):
            found = lsim.linear_probe(llama, lsim.Data(equal, positions="first"), PROBES[method](labels=classes))
        np.testing.assert_allclose(found.accuracy, float(found.majority))


@pytest.mark.covering
@pytest.mark.parametrize("method", ["ridge", "logistic"])
@pytest.mark.parametrize("make", [lambda: bridge(tiny_llama()), lambda: nnsight(tiny_llama())], ids=["bridge", "nnsight"])
def test_other_sources_give_one_answer(make, method, llama, tokens):
    probe, data = PROBES[method](labels=tokens[:, -1] % 2), lsim.Data(tokens, positions="last")
    found = lsim.linear_probe(make(), data, probe)
    np.testing.assert_allclose(found.confusion, lsim.linear_probe(llama, data, probe).confusion)


LOGISTIC = lsim.LogisticProbe(labels=[0, 1] * ((ROWS + TEST) // 2))
REFUSED = {
    '`labels`.*`test_data`.*labels="data"': {"test_data": [[3, 4]]},
    "LogisticProbe.*remote=True": {"probe": LOGISTIC, "remote": True},
    "LogisticProbe.*`checkpoint`": {"probe": LOGISTIC, "checkpoint": "x"},
    "`max_memory_gb`.*1e-07": {"probe": replace(LOGISTIC, max_memory_gb=1e-7)},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_it_cannot_do_is_refused(says, llama, tokens, classes):
    with pytest.raises(lsim.LayersimError, match=says):
        called(lsim.linear_probe, llama, tokens, **{"probe": lsim.LinearProbe(labels=classes)} | REFUSED[says])


CALLS = {
    "analyze": lsim.analyze,
    "analyze with a checkpoint": lambda *arguments: lsim.analyze(*arguments, checkpoint="x"),
    "estimate": lambda model, _, probe: lsim.estimate(model, probe),
    "attach": lambda model, _, probe: lsim.attach(model, probe),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_logistic_regression_is_no_analyzer_of_sums(call, llama, tokens):
    with pytest.raises(lsim.LayersimError, match=r"`analyzers`.*LogisticProbe.*linear_probe"):
        call(llama, lsim.Data(tokens, positions="last"), LOGISTIC)


def test_several_processes_are_refused_by_logistic_regression(llama, tokens, monkeypatch):
    monkeypatch.setattr(fit_linear_probes, "rank_and_size", lambda: (0, 2))
    with pytest.raises(lsim.LayersimError, match=r"LogisticProbe.*2 processes"):
        lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), LOGISTIC)


def test_a_probe_holds_no_data_of_a_run(llama, tokens):
    probe = lsim.LogisticProbe(labels=tokens[:, -1] % 2)
    before = dict(vars(probe))

    first = lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), probe)
    again = lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), probe)

    assert vars(probe) == before
    assert torch.equal(first.confusion, again.confusion)


@pytest.mark.parametrize("method", ["ridge", "logistic"])
def test_intervals_are_of_the_held_out_rows_of_each_block(method, llama):
    tokens = random_tokens(160, 5)
    label = (tokens[:, -1] + tokens[:, -2]) % 2
    found = lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), PROBES[method](labels=label), intervals=True)
    low, high = found.interval()[1:3]
    assert (high > low).all()
    # The blocks are 20 of 8 rows; without one, accuracies are of the rows that are left.
    out = np.array(oracles.held_out_rows(160))
    left = [float(one.test_samples.sum()) for one in found.replicates]
    assert left == [float(out.sum() - out[start : start + 8].sum()) for start in range(0, 160, 8)]


def test_selectivity_of_logistic_regression(llama, tokens, classes):
    found = {
        name: lsim.linear_probe(llama, tokens, probe(labels=tokens % 2, control="token")) for name, probe in PROBES.items()
    }
    for one in found.values():
        assert one.selectivity.isfinite().all()
    assert float(found["logistic"].control_accuracy[0]) > 0.5


def test_a_control_task_by_token_needs_tokens(llama, tokens, classes):
    with pytest.raises(lsim.LayersimError, match=r"`control`.*'token'"):
        lsim.linear_probe(llama, lsim.Data(tokens, positions="mean"), lsim.LinearProbe(labels=classes, control="token"))


@pytest.mark.light("ridge")
@pytest.mark.parametrize("method", ["ridge", "logistic"])
def test_few_samples_and_rows_are_warned_of(method, llama):
    def warned(rows: int) -> list[bool]:
        tokens = random_tokens(rows, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = lsim.linear_probe(llama, lsim.Data(tokens, positions="last"), PROBES[method](labels=tokens[:, -1] % 2))
        return [any(word in one for one in found.provenance.warnings) for word in ("32 dimensions", "held-out text")]

    assert warned(20) == [True, True]
    assert warned(60) == [False, True]
    assert warned(160) == [False, False]
