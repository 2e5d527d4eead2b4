"""Neural collapse: planted classes, the oracle, levels and pools, what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.neural_collapse import NeuralCollapseResult

from .. import oracles
from ..inputs.views import from_views, view, worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..training.helpers import bert, vit


def planted(spread: float, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Four classes of ten, their means fixed; samples around them."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(3, 4, 8)) * 5
    label = np.repeat(np.arange(4), 10)
    x = means[:, label] + spread * rng.normal(size=(3, 40, 8))
    return x, torch.as_tensor(label)


def collapse_of(x, label, **options) -> NeuralCollapseResult:
    return from_views(lsim.NeuralCollapse(labels="data", level="token", **options), [view(x, labels=label)])


def test_it_falls_as_classes_gather():
    values = [collapse_of(*planted(spread)).nc1 for spread in (2.0, 1.0, 0.1, 0.0)]
    for wide, tight in itertools.pairwise(values):
        assert (wide > tight).all()
    np.testing.assert_allclose(values[-1], 0, atol=1e-12)
    # Half the spread is a quarter of the covariance.
    np.testing.assert_allclose(values[0] / values[1], 4, rtol=0.35)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_it_equals_its_oracle_with_labels_and_the_most_frequent_classes(classes):
    x, label = planted(1.0)
    label[3:7] = 2
    label[0] = -100
    expected = oracles.oracle_neural_collapse([x], [None if y < 0 else int(y) for y in label], classes)

    result = collapse_of(x, label, classes=classes)

    for name, value in expected.items():
        np.testing.assert_allclose(getattr(result, name), value, rtol=1e-8, atol=1e-12, err_msg=name)

    by_id = collapse_of(x, label, classes=result.labels)
    assert worst(result, by_id) == 0


def test_a_simplex_that_the_classifier_has_too():
    """Equal norms, cosines of -1 / 3, and the rows of the classifier along the class means."""
    simplex = np.eye(4) - 0.25
    x = (3 * simplex)[np.repeat(np.arange(4), 10)] + 5
    x = np.stack([x, x @ np.diag([1, 1, 1, -1])])
    label = torch.as_tensor(np.repeat(np.arange(4), 10))
    weight = torch.as_tensor(np.concatenate([0.1 * simplex + 7, np.ones((2, 4))]))

    result = from_views(lsim.NeuralCollapse(labels="data", level="token", classifier=weight), [view(x, labels=label)])

    np.testing.assert_allclose(result.nc2, 0, atol=1e-12)
    np.testing.assert_allclose(result.equinorm, 0, atol=1e-12)
    np.testing.assert_allclose(result.nc3[0], 0, atol=1e-12)
    assert result.nc3[1] > 0.5
    assert bool(collapse_of(x, label).nc3.isnan().all())


def test_nc3_equals_its_oracle():
    x, label = planted(1.0)
    weight = np.random.default_rng(3).normal(size=(6, 8))
    expected = oracles.oracle_neural_collapse([x], label.tolist(), weight=weight)

    result = collapse_of(x, label, classifier=torch.as_tensor(weight))

    np.testing.assert_allclose(result.nc3, expected["nc3"], rtol=1e-10)
    with pytest.raises(lsim.LayersimError, match=r"`classifier` has 3 rows.* 3\b"):
        collapse_of(x, label, classifier=torch.as_tensor(weight[:3]))
    with pytest.raises(lsim.LayersimError, match=r"`classifier` has shape \(6, 8\).* 32"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.NeuralCollapse(classifier=torch.as_tensor(weight)))


def test_more_classes_than_dimensions():
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(12), 6)
    x = rng.normal(size=(2, 12, 4))[:, label] * 3 + rng.normal(size=(2, 72, 4))
    expected = oracles.oracle_neural_collapse([x], label.tolist(), 12)

    np.testing.assert_allclose(collapse_of(x, torch.as_tensor(label), classes=12).nc1, expected["values"], rtol=1e-8)


def test_it_does_not_change_with_rotation_scale_and_offset():
    x, label = planted(1.0)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(8, 8)))[0]
    np.testing.assert_allclose(collapse_of(x, label).nc1, collapse_of(3 * x @ rotation + 20, label).nc1, rtol=1e-6)


@pytest.mark.parametrize("pool", ["last", "first", "mean"])
def test_rows_as_samples(pool):
    model = tiny_llama()
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7, 6, 8, 4)]
    label = torch.tensor([0, 1, 0, 1, 1, 0])

    result = lsim.analyze(model, rows, lsim.NeuralCollapse(labels=label, pool=pool))["neural_collapse"]
    from ..models.tiny_models import hidden_states

    pick = {"last": lambda s: s[:, -1], "first": lambda s: s[:, 0], "mean": lambda s: s.mean(1)}[pool]
    x = np.stack([pick(hidden_states(model, row)) for row in rows], axis=1)
    expected = oracles.oracle_neural_collapse([x], label.tolist())

    # Float32 activations under a pseudo-inverse; where the first token is the whole sample, what enters block 0 is words.
    np.testing.assert_allclose(result.nc1, expected["values"], rtol=1e-3)
    assert result.samples.tolist() == [3, 3]


def test_the_first_look_runs_no_model():
    model = tiny_llama()
    forwards = []
    model.model.layers[0].register_forward_hook(lambda *_: forwards.append(1))

    lsim.analyze(model, lsim.Data(random_tokens(8, 20), batch_size=4), lsim.Cosine(center="none"))
    of_one_pass = len(forwards)
    forwards.clear()
    result = lsim.analyze(model, lsim.Data(random_tokens(8, 20), batch_size=4), lsim.NeuralCollapse(classes=5))[
        "neural_collapse"
    ]

    assert len(forwards) == of_one_pass

    following = random_tokens(8, 20)[:, 1:].flatten().tolist()
    order = sorted(set(following), key=lambda t: (-following.count(t), t))[:5]
    assert result.labels == tuple(order)
    assert result.samples.tolist() == [following.count(t) for t in order]


def test_what_it_cannot_do_is_refused():
    model = tiny_llama()
    tokens = random_tokens(4, 20)

    for classes in (1, (), (1,), (2, 2)):
        with pytest.raises(lsim.LayersimError, match="`classes`"):
            lsim.NeuralCollapse(classes=classes)
    with pytest.raises(lsim.LayersimError, match=r"`classifier`.* 8 .*finite"):
        lsim.NeuralCollapse(classifier=torch.full((2, 4), torch.nan))
    with pytest.raises(lsim.LayersimError, match=r"\b0 .*\b3\b.*\b7\b"):
        lsim.analyze(model, tokens.clamp(min=5), lsim.NeuralCollapse(classes=(3, 7)))
    with pytest.raises(lsim.LayersimError, match="`max_memory_gb`"):
        lsim.analyze(model, tokens, lsim.NeuralCollapse(max_memory_gb=1e-6))
    with (
        pytest.raises(lsim.LayersimError, match=r"^NeuralCollapse .*NeuralCollapse\(classes=\(id"),
        lsim.attach(model, lsim.NeuralCollapse()),
    ):
        pass

    ids = tuple(tokens[:, 1:].flatten().unique()[:6].tolist())
    once = lsim.analyze(model, iter(tokens), lsim.NeuralCollapse(classes=ids))
    with torch.no_grad(), lsim.attach(model, lsim.NeuralCollapse(classes=ids)) as probe:
        model(tokens)
    assert worst(probe.results()["neural_collapse"], once["neural_collapse"]) < 1e-9


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
@pytest.mark.parametrize("width", [3, 8, 64])
def test_a_common_offset_says_nothing(offset, width):
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(4), 20)
    x = rng.normal(size=(2, 4, width))[:, label] * 2 + 0.5 * rng.normal(size=(2, 80, width))
    expected = oracles.oracle_neural_collapse([x], label.tolist(), 4)

    result = collapse_of(x + offset * rng.normal(size=width), torch.as_tensor(label))

    np.testing.assert_allclose(result.nc1, expected["values"], rtol=1e-3 if offset > 1e4 else 1e-6)


def test_classes_with_one_mean_have_no_collapse():
    collapsed = np.ones((2, 20, 8)) * np.array([1.0, 7.3])[:, None, None]
    with pytest.warns(lsim.LayersimWarning, match="NC1 is not defined"):
        result = collapse_of(collapsed, torch.arange(20) % 2)

    assert result.nc1.isnan().all()
    assert (result.between == 0).all()


def whole_rows_of(model, blocks, inputs):
    """`layer row pos d_model`: the stream of rows of one length."""
    captured = []

    def keep(_module, _args, out):
        captured.append(out[0] if isinstance(out, tuple) else out)

    handles = [blocks[0].register_forward_pre_hook(lambda _m, args: captured.append(args[0]))]
    handles += [
        b.register_forward_hook(lambda _m, _a, out: captured.append(out[0] if isinstance(out, tuple) else out)) for b in blocks
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return torch.stack(captured).double().numpy()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:NC1 is not defined", "ignore:Cosines of tokens")
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_the_default_sample_is_what_the_head_reads_of_a_row(kind):
    label = [0, 1, 0, 1, 2, 2, 0, 1]
    if kind == "vit":
        model = vit().double()
        data = {"pixel_values": torch.randn(8, 3, 8, 8, dtype=torch.float64), "labels": torch.tensor(label)}
        x = whole_rows_of(model, model.vit.layers, {"pixel_values": data["pixel_values"]})
    else:
        model = bert().double()
        data = {"input_ids": random_tokens(8, 9), "labels": torch.tensor(label)}
        x = whole_rows_of(model, model.bert.encoder.layer, {"input_ids": data["input_ids"]})

    def nc1(positions=None, beside=(), **options):
        analyzers = [*beside, lsim.NeuralCollapse(labels="data", classes=3, **options)]
        result = lsim.analyze(model, lsim.Data(data, batch_size=3, positions=positions), analyzers)["neural_collapse"]
        return result.values.numpy(), result.provenance.options

    def expected(samples):
        return oracles.oracle_neural_collapse([samples], label, 3)["values"]

    default, options = nc1()

    np.testing.assert_allclose(default[1:], expected(x[1:, :, 0]), rtol=1e-6)
    assert (options["pool"], options["positions"]) == ("head", "first")
    # Beside analyzers of single positions no rule is needed.
    assert np.array_equal(nc1(beside=[lsim.Cosine(center="none")])[0], default, equal_nan=True)
    assert np.array_equal(nc1(positions="all")[0], default, equal_nan=True)
    # A rule that leaves out what the head reads, and a choice of the user's, are kept.
    for asked, samples in (({"pool": "last"}, x[1:, :, -1]), ({"positions": "last"}, x[1:, :, -1])):
        values, options = nc1(**asked)
        np.testing.assert_allclose(values[1:], expected(samples), rtol=1e-6)
        assert options["pool"] == "last"

    values, _ = nc1(positions="mean")
    np.testing.assert_allclose(values[1:], expected(x[1:].mean(2)), rtol=1e-6)
    with pytest.raises(lsim.LayersimError, match="`skip_first` is 1"):
        lsim.analyze(model, lsim.Data(data, skip_first=1), lsim.NeuralCollapse(labels="data", classes=3))
    with pytest.raises(lsim.LayersimError, match="`positions` must be given: NeuralCollapse reads whole rows"):
        nc1(beside=[lsim.Cosine(center="none")], pool="mean")


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:NC1 is not defined")
def test_the_default_sample_at_other_sites_and_of_other_models():
    tokens = random_tokens(8, 9)
    label = torch.tensor([0, 1] * 4)
    data = {"input_ids": tokens, "labels": label}

    at_mlp = [
        lsim.analyze(bert(), data, lsim.NeuralCollapse(labels="data", pool=pool), at="mlp_out")["neural_collapse"]
        for pool in (None, "first", "last")
    ]

    assert at_mlp[0].provenance.options["pool"] == "first"
    assert torch.equal(at_mlp[0].values, at_mlp[1].values)
    assert not torch.equal(at_mlp[0].values, at_mlp[2].values)
    for labels, level, pool in (("data", "sequence", "last"), ("next_token", "token", None)):
        result = lsim.analyze(tiny_llama(), data, lsim.NeuralCollapse(labels=labels, level=level))["neural_collapse"]
        assert result.provenance.options["pool"] == pool
