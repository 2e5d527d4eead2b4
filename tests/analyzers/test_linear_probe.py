"""Linear probes: naive ridge regression, scikit-learn's, planted classes, widths, ties and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.analyzers._moments import ridge_probe, ridge_weights
from tl_layersim.analyzers.linear_probe import LinearProbeResult, control_classes, control_part, held_out

from .. import oracles
from ..inputs.views import from_views, view
from ..models.input_models import VectorModel
from ..models.site_hooks import read_sites
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama
from ..running.options import called

NO_LABEL = -100


def planted(classes: int, per_class: int = 30, width: int = 6, spread: float = 1.0, seed: int = 0):
    """Samples `2 sample width` about class means, each in a row of its own, and their classes in random order."""
    rng = np.random.default_rng(seed)
    means = 2 * rng.normal(size=(2, classes, width))
    label = rng.permutation(np.repeat(np.arange(classes), per_class))
    return means[:, label] + spread * rng.normal(size=(2, len(label), width)), label


def probe_of(x: np.ndarray, label: np.ndarray, **options) -> LinearProbeResult:
    """The probe of samples that are rows of their own."""
    labels = torch.as_tensor(label)
    row = torch.arange(len(label))
    views = [
        view(x[:, part], row=row[part], labels=labels[part]) for part in np.array_split(np.arange(len(label)), 3) if len(part)
    ]
    return from_views(lsim.LinearProbe(labels="data", **options), views)


@pytest.mark.parametrize("classes", [2, 3, 12])
@pytest.mark.parametrize("ridge", [1e-4, 0.01, 10.0])
def test_it_equals_naive_ridge_regression(classes, ridge):
    x, label = planted(classes)
    label[:5] = NO_LABEL
    expected = oracles.oracle_linear_probe(
        [x], [None if y == NO_LABEL else int(y) for y in label], list(range(len(label))), ridge
    )

    result = probe_of(x, label, ridge=ridge)

    for name, value in expected.items():
        np.testing.assert_allclose(getattr(result, name), value, atol=1e-12, err_msg=name)
    assert result.labels == tuple(range(classes))
    assert result.confusion.sum((1, 2)).tolist() == [float(result.test_samples.sum())] * 2


@pytest.mark.parametrize("classes", [2, 5])
def test_it_equals_ridge_of_scikit_learn(classes):
    from sklearn.linear_model import Ridge, RidgeClassifier
    from sklearn.preprocessing import StandardScaler

    x, label = planted(classes, spread=3.0)
    test = np.array(oracles.held_out_rows(len(label)))

    result = probe_of(x, label, ridge=0.05)

    for site, rows in enumerate(x):
        rows = StandardScaler().fit(rows[~test]).transform(rows)
        train = rows[~test]
        # scikit-learn's loss is a sum and not a mean.
        alpha = 0.05 * len(train)
        onehot = (label[:, None] == np.arange(classes)).astype(float)
        scores = Ridge(alpha=alpha).fit(train, onehot[~test]).predict(rows[test])
        assert float(result.accuracy[site]) == np.mean(scores.argmax(1) == label[test])
        # Labels of 1 and -1, a common factor and offset of the scores.
        classifier = RidgeClassifier(alpha=alpha).fit(train, label[~test])
        assert float(result.accuracy[site]) == classifier.score(rows[test], label[test])
        assert float(result.train_accuracy[site]) == classifier.score(train, label[~test])


def test_weights_and_offsets_are_those_of_scikit_learn():
    from sklearn.linear_model import Ridge

    x, label = planted(3)
    rows = torch.as_tensor(x[0])
    onehot = torch.nn.functional.one_hot(torch.as_tensor(label)).double()
    weight, offset = ridge_probe(rows.T @ rows, onehot.T @ rows, onehot.sum(0).long(), 0.1)
    spread = x[0].std(0)
    fitted = Ridge(alpha=0.1 * len(label)).fit(x[0] / spread, onehot.numpy())

    np.testing.assert_allclose(weight, fitted.coef_.T / spread[:, None], atol=1e-12)
    np.testing.assert_allclose(offset, fitted.intercept_, atol=1e-12)


def test_a_dimension_without_spread_has_no_weight():
    """Beside a mean of 1, a variance of 1e-14 is what rounding left."""
    covariance = torch.diag(torch.tensor([4.0, 1e-14]).double())
    mean = torch.tensor([0.0, 1.0]).double()
    weights = ridge_weights(covariance, torch.tensor([[2.0], [1e-7]]).double(), mean, 1.0)

    np.testing.assert_allclose(weights, [[2 / 4 / (1 + 1.0)], [0]], atol=1e-12)


def test_planted_classes_are_found_and_random_labels_are_not():
    x, label = planted(4, per_class=100, spread=0.1)
    assert (probe_of(x, label).accuracy == 1).all()

    guess = probe_of(x, np.random.default_rng(1).permutation(label))
    assert (guess.accuracy < 0.5).all()
    assert (guess.train_accuracy >= guess.majority - 0.1).all()


def test_a_nuisance_dimension_of_any_size_costs_little():
    x, label = planted(3, per_class=100, spread=3.0)
    noise = np.random.default_rng(1).normal(size=(2, len(label), 1))

    alone = probe_of(x, label)
    beside = [probe_of(np.concatenate([x, spread * noise], -1), label) for spread in (1, 100, 1e4)]

    for result in beside:
        assert torch.equal(result.confusion, beside[0].confusion)
        np.testing.assert_allclose(result.accuracy, alone.accuracy, atol=0.05)


def types(count: int = 4000, width: int = 30, kinds: int = 40):
    """Samples `1 sample width` that are a vector of their token type and noise, the types, and a class of each type."""
    rng = np.random.default_rng(0)
    kind = rng.integers(kinds, size=count)
    x = rng.normal(size=(kinds, width))[kind] + 0.1 * rng.normal(size=(count, width))
    return x[None], kind, (kind >= kinds // 2).astype(int)


@pytest.mark.parametrize("control", ["token", "row"])
def test_control_labels_are_drawn_for_each_type_or_row(control):
    x, kind, label = types()
    row = torch.arange(len(kind)) // 4
    sample_view = view(x, kind, row=row, labels=torch.as_tensor(label))

    result = from_views(lsim.LinearProbe(labels="data", control=control), [sample_view])
    plain = from_views(lsim.LinearProbe(labels="data"), [sample_view])

    assert torch.equal(result.confusion, plain.confusion)
    assert plain.selectivity.isnan().all()

    unit = sample_view.tokens if control == "token" else row
    drawn = control_classes(torch.as_tensor(np.bincount(label)))[control_part(sample_view, control, 0)]
    # One class for each unit, whose shares are those of the classes.
    assert len({(int(u), int(y)) for u, y in zip(unit, drawn, strict=True)}) == len(set(unit.tolist()))

    out = np.array(oracles.held_out_rows(int(row.max()) + 1))[row.numpy()]
    scores = oracles.ridge_scores(x[0][~out], drawn.numpy()[~out], x[0], [0, 1], 0.1)
    assert float(result.control_accuracy) == np.mean(scores[out].argmax(1) == drawn.numpy()[out])
    assert torch.equal(result.selectivity, result.accuracy - result.control_accuracy)
    # Types can be learnt by heart, rows that are held out cannot.
    assert (float(result.control_accuracy) > 0.7) == (control == "token")
    assert float(result.control_accuracy) > 0.4
    assert not any("control" in name or "selectivity" in name for name in plain.to_frame())
    assert {"control_accuracy", "selectivity"} <= set(result.to_frame())


def test_control_labels_have_the_shares_of_the_classes():
    x, kind, _ = types(kinds=3000)
    sample_view = view(x, kind, row=torch.arange(len(kind)))
    drawn = torch.bincount(control_classes(torch.tensor([60, 0, 30, 10]))[control_part(sample_view, "token", 3)]) / len(kind)

    np.testing.assert_allclose(drawn, [0.6, 0, 0.3, 0.1], atol=0.05)


def test_offset_and_scale_do_not_matter():
    x, label = planted(3, spread=3.0)
    plain = probe_of(x, label)
    for moved in (1000 * x, x + 1e5, 1e-6 * x - 3e-3, x * np.array([1e-3, 1, 1, 1, 1, 1e3])):
        np.testing.assert_allclose(probe_of(moved, label).confusion, plain.confusion)


def test_a_large_mean_that_hides_the_penalty_is_refused():
    x, label = planted(2)
    with pytest.raises(lsim.LayersimError, match="`ridge` is 1e-09"):
        probe_of(x + 1e6, label, ridge=1e-9)


def test_equal_samples_give_the_most_frequent_class_and_a_warning():
    x, label = planted(2, per_class=10)
    label[:6] = 1
    x[0] = 3.3

    with pytest.warns(lsim.LayersimWarning, match=r"blocks\.0\.hook_resid_pre,"):
        result = probe_of(x, label)

    assert float(result.accuracy[0]) == float(result.majority)
    assert float(result.train_accuracy[0]) == float(result.samples[1] / result.samples.sum())
    assert (result.confusion[0][:, 0] == 0).all()


def test_equal_scores_give_the_lowest_class():
    # Two classes of equal size at one place: their scores are equal everywhere.
    rows = np.arange(40)
    out = np.array(oracles.held_out_rows(40))
    label = np.zeros(40, dtype=int)
    label[rows[~out]] = (np.arange((~out).sum()) + 1) % 2 * 3
    label[rows[~out][0]] = -100 if (~out).sum() % 2 else 3
    label[out] = 3

    with pytest.warns(lsim.LayersimWarning, match="All training samples are equal"):
        result = probe_of(np.full((1, 40, 2), 0.5), label)

    assert result.samples[0] == result.samples[1]
    assert result.confusion[0].tolist() == [[0, 0], [float(out.sum()), 0]]
    assert result.labels == (0, 3)


def test_a_class_without_training_samples_is_counted_and_never_predicted():
    x, label = planted(3, per_class=20)
    label[oracles.held_out_rows(len(label)).index(True)] = 7

    result = probe_of(x, label)

    assert result.labels == (0, 1, 2, 7)
    assert result.samples[-1] == 0
    assert result.test_samples[-1] == 1
    assert (result.confusion[:, :, -1] == 0).all()


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5])
def test_held_out_rows_are_spread_evenly_and_without_a_period(fraction):
    for seed in range(3):
        out = held_out(torch.arange(5000), fraction, seed)
        assert out.tolist() == oracles.held_out_rows(5000, fraction, seed)
        for start in range(0, 5000, 500):
            assert float(out[start : start + 500].double().mean()) == pytest.approx(fraction, abs=0.01)
        # No class of data whose classes alternate is left out.
        for period in (2, 3, 5, 8, 10, 13):
            shares = [float(out[remainder::period].double().mean()) for remainder in range(period)]
            assert max(shares) - min(shares) < 0.06
    assert not torch.equal(held_out(torch.arange(50), fraction, 0), held_out(torch.arange(50), fraction, 1))


def test_rows_from_a_number_on_are_held_out():
    from sklearn.linear_model import Ridge

    assert held_out(torch.tensor([0, 59, 60, 61]), 0.2, 0, 60).tolist() == [False, False, True, True]

    x, label = planted(3, spread=3.0)
    result = probe_of(x, label, ridge=0.05, first_test_row=60)
    assert float(result.samples.sum()) == 60
    assert result.test_samples.tolist() == np.bincount(label[60:]).tolist()
    assert float(result.majority) == np.mean(label[60:] == np.bincount(label[:60]).argmax())
    for site, rows in enumerate(x):
        rows = (rows - rows[:60].mean(0)) / rows[:60].std(0)
        train = rows[:60]
        fitted = Ridge(alpha=0.05 * 60).fit(train, np.eye(3)[label[:60]])
        assert float(result.accuracy[site]) == np.mean(fitted.predict(rows[60:]).argmax(1) == label[60:])
        assert float(result.train_accuracy[site]) == np.mean(fitted.predict(train).argmax(1) == label[:60])


def test_every_position_of_a_row_is_on_one_side():
    model = tiny_llama()
    tokens = random_tokens(20, 9)
    label = torch.arange(20) % 2

    result = lsim.analyze(model, tokens, lsim.LinearProbe(labels=label))["linear_probe"]
    out = sum(oracles.held_out_rows(20))

    assert float(result.test_samples.sum()) == 9 * out
    assert float(result.samples.sum()) == 9 * (20 - out)

    # Long rows continue in further rows of the same number.
    cut = lsim.analyze(model, lsim.Data(tokens, seq_len=4), lsim.LinearProbe(labels=label))["linear_probe"]
    assert torch.equal(cut.test_samples, result.test_samples)


@pytest.mark.light("mean", "all")
@pytest.mark.parametrize("positions", ["last", "mean", "all"])
def test_it_is_that_of_activations_that_the_test_reads(positions):
    model = tiny_llama(dtype=torch.float64)
    rows = [random_tokens(1, 4 + n % 5, seed=n)[0] for n in range(40)]
    label = [int(row[-1]) % 3 for row in rows]

    result = lsim.linear_probe(model, lsim.Data(rows, positions=positions, batch_size=7), lsim.LinearProbe(labels=label))
    states = [hidden_states(model, row) for row in rows]
    pick = {"last": lambda s: s[:, -1:], "mean": lambda s: s.mean(1, keepdims=True), "all": lambda s: s}[positions]
    parts = [pick(state) for state in states]
    numbers = [n for n, part in enumerate(parts) for _ in range(part.shape[1])]
    expected = oracles.oracle_linear_probe([np.concatenate(parts, axis=1)], [label[n] for n in numbers], numbers)

    for name, value in expected.items():
        np.testing.assert_allclose(getattr(result, name), value, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("at", "per_head"), [("z", True), (["mlp_post", "attn_out"], False)])
def test_heads_and_sites_of_different_widths(at, per_head):
    model = tiny_llama(dtype=torch.float64)
    tokens = random_tokens(30, 6)
    label = tokens[:, 2] % 3

    result = lsim.linear_probe(model, tokens, lsim.LinearProbe(labels=label), at=at, per_head=per_head)
    table = lsim.sites(model)
    activations = read_sites(model, table, {"input_ids": tokens})
    rows = [row for row in range(30) for _ in range(6)]

    for site, accuracy, confusion in zip(result.layers, result.accuracy, result.confusion, strict=True):
        stem, _, head = site.removesuffix("]").partition("[")
        x = activations[stem].flatten(0, 1).double().numpy()
        x = np.split(x, 4, axis=1)[int(head)] if head else x
        expected = oracles.oracle_linear_probe([x[None]], [int(label[row]) for row in rows], rows)
        assert float(accuracy) == pytest.approx(float(expected["values"][0])), site
        np.testing.assert_allclose(confusion, expected["confusion"][0])
    assert len({activations[site.partition("[")[0]].shape[-1] for site in result.layers}) == (1 if per_head else 2)


def test_half_precision_activations_are_summed_in_float64():
    x, label = planted(3, per_class=60, spread=0.5)
    half = torch.as_tensor(x).half()

    exact = probe_of(half.double().numpy(), label)
    result = probe_of(half.float().numpy(), label)

    assert torch.equal(result.confusion, exact.confusion)


def test_a_run_resumes_to_the_same_numbers(tmp_path):
    model = tiny_llama()
    tokens = random_tokens(30, 6)
    probe = lsim.LinearProbe(labels=tokens[:, 1] % 2)

    whole = lsim.analyze(model, lsim.Data(tokens, batch_size=4), probe)["linear_probe"]

    class Stops(list):
        """Data that is interrupted in the second pass, when all of it was read once."""

        def __init__(self, rows, after):
            super().__init__(rows)
            self.after = after

        def __iter__(self):
            for number, row in enumerate(super().__iter__()):
                if number == self.after:
                    raise KeyboardInterrupt
                yield row

    path = tmp_path / "probe.checkpoint"

    for after in (9, 22):
        with pytest.raises(KeyboardInterrupt):
            lsim.analyze(model, lsim.Data(Stops(list(tokens), after), batch_size=4), probe, checkpoint=path)

    resumed = lsim.analyze(model, lsim.Data(list(tokens), batch_size=4), probe, checkpoint=path)["linear_probe"]
    assert torch.equal(resumed.confusion, whole.confusion)
    assert torch.equal(resumed.train_accuracy, whole.train_accuracy)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"test_fraction": 0}, "`test_fraction`.* 0"),
        ({"test_fraction": 20}, "`test_fraction`.* 20"),
        ({"ridge": 0}, "`ridge`.* 0"),
        ({"ridge": float("nan")}, "`ridge`.* nan"),
        ({"max_classes": 1}, "`max_classes`.* 1"),
        ({"labels": [0.5, 1.0]}, r"`labels`.* \(2,\)"),
        ({"labels": [[[1]]]}, r"`labels`.* \(1, 1, 1\)"),
        ({"labels": [3, 3, NO_LABEL]}, r"`labels`.*\[3\]"),
    ],
)
def test_options_are_checked_when_they_are_written(options, says):
    with pytest.raises(lsim.LayersimError, match=says):
        lsim.LinearProbe(**options)


def test_what_it_cannot_do_is_refused():
    model = tiny_llama()
    tokens = random_tokens(12, 5)
    halves = torch.arange(12) % 2
    calls = {
        "0 held-out samples": {"analyzers": lsim.LinearProbe(labels=halves, first_test_row=12)},
        r"`labels`.* 0 to 2\b.*max_classes=": {"analyzers": lsim.LinearProbe(max_classes=3)},
        "`max_memory_gb` is 1e-06": {"analyzers": lsim.LinearProbe(labels=halves, max_memory_gb=1e-6)},
        r"`labels`.*\(5,\).* 12\b": {"analyzers": lsim.LinearProbe(labels=halves[:5])},
        "`labels`.* -1 to 0": {"analyzers": lsim.LinearProbe(labels=-halves)},
        "`data` has no labels": {"analyzers": lsim.LinearProbe(labels="data")},
        "`positions` is 'mean'": {"analyzers": lsim.LinearProbe(), "positions": "mean"},
    }

    for says, call in calls.items():
        with pytest.raises(lsim.LayersimError, match=says):
            called(lsim.analyze, model, tokens, **call)
    for says, labels in (
        ("`labels`.* -1 to 0", -halves),
        ("training samples of 1 class ", torch.ones_like(halves)),
        ("0 training samples", torch.full_like(halves, NO_LABEL)),
    ):
        with pytest.raises(lsim.LayersimError, match=says):
            lsim.analyze(model, {"input_ids": tokens, "labels": labels}, lsim.LinearProbe(labels="data"))
    with (
        pytest.raises(lsim.LayersimError, match=r"^LinearProbe "),
        lsim.attach(model, lsim.LinearProbe()),
    ):
        pass


def test_packed_texts_are_refused():
    from ..models.tiny_models import tiny_tokenizer

    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        lsim.analyze(model, lsim.Data(["w3 w4 w5", "w6 w7 w8"], pack=True), lsim.LinearProbe())


def test_one_sample_in_a_batch_and_inputs_without_tokens():
    model = VectorModel()
    x = torch.randn(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    opened = lsim.open_model(model, layers=["steps.0", "steps.1", "steps.2"])
    probe = lsim.LinearProbe(labels=(x[:, 0] > 0).long())

    alone = lsim.linear_probe(opened, lsim.Data({"x": x}, batch_size=1), probe)
    together = lsim.linear_probe(opened, lsim.Data({"x": x}, batch_size=60), probe)

    assert torch.equal(alone.confusion, together.confusion)
    assert alone.accuracy[0] > 0.8


def test_the_figure_has_the_most_frequent_class_as_a_line_and_the_headline_says_what_counts():
    x, label = planted(3)
    result = probe_of(x, label)
    curve, line = result.plot().data

    assert list(curve.y) == result.accuracy.tolist()
    assert set(line.y) == {float(result.majority)}
    assert line.name == f"most frequent class in training: {float(result.majority):.4g}"
    # The vertical axis names the curve.
    assert curve.showlegend is False

    train = int(result.samples.sum())
    test = int(result.test_samples.sum())
    words = f"{train} training and {test} held-out samples, 3 classes (chance:\u00a00.333)"
    assert words in result.plot().layout.title.subtitle.text.replace("<br>", " ")
    assert len(result.plot("train_accuracy").data) == 1

    headline = result.headline()
    assert headline["Accuracy on held-out samples at the embedding"] == float(result.accuracy[0])
    assert headline["Accuracy on held-out samples at the last site"] == float(result.accuracy[-1])
    assert headline["accuracy of the most frequent class"] == float(result.majority)
    assert len(headline) == 4

    table = result.to_frame("confusion")
    assert set(table.columns) >= {"layer", "label", "prediction", "confusion"}


def test_a_view_without_rows_is_not_measured():
    sample_view = view(np.zeros((1, 4, 2)))
    assert isinstance(sample_view, View)
    with pytest.raises(AssertionError):
        lsim.LinearProbe().first_kernel()(sample_view)
