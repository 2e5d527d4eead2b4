"""Untrained twins, regressed-out inputs, and the reliability of comparisons."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.core import Sums
from tl_layersim.sources import untrained

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, samples
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama
from ..oracles.rsa import condensed, ranks
from ..running.options import called


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


class TestUntrained:
    def test_a_twin_has_the_architecture_and_weights_of_its_seed(self, model):
        state = torch.random.get_rng_state()
        first, repeated, other_seed = (untrained(model, seed) for seed in (3, 3, 4))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert type(first) is type(model)
        assert not first.training

        for name, value in first.state_dict().items():
            assert torch.equal(value, repeated.state_dict()[name])
            if value.dim() > 1:
                assert not torch.equal(value, other_seed.state_dict()[name])
                assert not torch.equal(value, model.state_dict()[name])

    def test_dtype_and_tokenizer_are_those_of_the_model(self):
        model = tiny_llama(dtype=torch.bfloat16)
        model.tokenizer = object()
        twin = untrained(model)
        assert twin.tokenizer is model.tokenizer
        assert {value.dtype for value in twin.parameters()} == {torch.bfloat16}

    def test_a_module_without_a_configuration_is_refused(self):
        with pytest.raises(lsim.LayersimError, match="Linear"):
            untrained(torch.nn.Linear(2, 2))

    def test_a_model_of_other_weights_than_its_configuration_is_refused(self):
        model = tiny_llama()
        model.config.vocab_size += 1
        with pytest.raises(lsim.LayersimError, match="embed_tokens"):
            untrained(model)


class TestBaseline:
    @pytest.mark.heavy("many untrained twins with intervals")
    @pytest.mark.filterwarnings("ignore:Intervals of")
    def test_twins_are_measured_on_the_same_data(self, model):
        rows = random_tokens(20, 20)
        report = lsim.analyze(model, rows, [lsim.CKA(), lsim.LogitLens()], baseline="untrained", intervals=True)
        for name in ("cka", "logit_lens"):
            for seed, twin in enumerate(report[name].untrained):
                alone = lsim.analyze(untrained(model, seed), rows, [name])[name]
                torch.testing.assert_close(twin.values, alone.values, rtol=0, atol=0)
        assert len(report["cka"].untrained) == 3

        table = report["cka"].to_frame()
        mean = torch.stack([twin.values for twin in report["cka"].untrained]).mean(0)
        np.testing.assert_allclose(table["values_untrained"], mean.flatten())
        np.testing.assert_allclose(report["cka"].plot("untrained values").data[0].z, mean)

        accuracies = report.to_frame().query("analyzer == 'logit_lens' and field == 'accuracy'")["untrained"]
        expected = torch.stack([twin.accuracy for twin in report["logit_lens"].untrained]).mean(0)
        np.testing.assert_allclose(accuracies, expected)

        lines = report["logit_lens"].plot("cross_entropy").data
        twins = torch.stack([twin.cross_entropy for twin in report["logit_lens"].untrained])
        assert any(np.allclose(np.array(line.y, dtype=float), twins.mean(0)) for line in lines if len(line.y) == len(twins[0]))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_file_keeps_them(self, model, tmp_path):
        report = lsim.analyze(model, random_tokens(8, 20), [lsim.CKA()], baseline="untrained")
        loaded = lsim.load(report.save(tmp_path / "r.safetensors"))
        for result, loaded_result in zip(report["cka"].untrained, loaded["cka"].untrained, strict=True):
            assert torch.equal(result.values, loaded_result.values)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_pairs_of_twins_are_of_different_seeds(self, model):
        rows = random_tokens(8, 20)
        result = lsim.compare(model, model, rows, lsim.CKA(), baseline="untrained")
        expected = lsim.compare(untrained(model, 2), untrained(model, 3), rows, lsim.CKA())
        torch.testing.assert_close(result.untrained[1].values, expected.values, rtol=0, atol=0)
        assert result.distance() < 1e-3 < min(twin.distance() for twin in result.untrained)

    @pytest.mark.heavy("many models")
    def test_a_grid_has_the_distances_of_twins(self, model):
        rows = random_tokens(8, 20)
        grid = lsim.compare_grid({"a": model, "b": tiny_llama(seed=1)}, rows, lsim.CKA(), baseline="untrained")
        assert len(grid.untrained) == len(grid["a", "b"].untrained) == 3
        assert float(grid.untrained[0].values[0, 1]) == pytest.approx(grid["a", "b"].untrained[0].distance())
        assert "distance_untrained" in grid.to_frame()

    @pytest.mark.parametrize("more", [{"blocking": False, "remote": True}, {"shard": (0, 2), "save_to": "x.safetensors"}])
    def test_runs_elsewhere_are_refused(self, model, more):
        with pytest.raises(lsim.LayersimError, match="|".join(more)):
            called(lsim.analyze, model, random_tokens(8, 20), [lsim.CKA()], baseline="untrained", **more)

    def test_data_that_can_be_read_once_is_refused(self, model):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*tuple_iterator.*`baseline="):
            lsim.analyze(model, iter(random_tokens(8, 20)), [lsim.CKA()], baseline="untrained")


def regressed(k: np.ndarray, k0: np.ndarray) -> np.ndarray:
    """The entries of a matrix after those of another are regressed out, without intercept."""
    return k - k0 * np.sum(k * k0) / np.sum(k0 * k0)


def u_centred(k: np.ndarray) -> np.ndarray:
    n = len(k)
    k = k - np.diag(k.diagonal())
    out = k - k.sum(0) / (n - 2) - k.sum(1)[:, None] / (n - 2) + k.sum() / (n - 1) / (n - 2)
    return out - np.diag(out.diagonal())


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b) / np.sqrt(np.sum(a * a) * np.sum(b * b)))


class TestDeconfound:
    def test_gram_matrices_of_the_embedding_are_regressed_out_of_those_of_each_layer(self):
        x = residuals(0, tokens=40)
        result = from_views(lsim.CKA(deconfound="input"), [samples(x)])
        grams = [u_centred((z - z.mean(0)) @ (z - z.mean(0)).T) for z in x]
        residual_grams = [regressed(k, grams[0]) for k in grams[1:]]
        expected = [[correlation(a, b) for b in residual_grams] for a in residual_grams]

        np.testing.assert_allclose(result.values[1:, 1:], expected, atol=1e-9)
        assert bool(result.values[0].isnan().all() and result.values[:, 0].isnan().all())

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_each_model_has_an_embedding_of_its_own(self):
        a = tiny_llama()
        b = tiny_llama(layers=2, seed=1)
        rows = list(random_tokens(20, 16))
        result = lsim.compare(a, b, rows, lsim.CKA(deconfound="input", level="sequence", pool="last"))
        sides = [np.stack([hidden_states(model, row)[:, -1].astype(np.float64) for row in rows], 1) for model in (a, b)]
        grams = [[u_centred((z - z.mean(0)) @ (z - z.mean(0)).T) for z in side] for side in sides]
        residual_grams = [[regressed(k, model_grams[0]) for k in model_grams[1:]] for model_grams in grams]
        expected = [[correlation(k, m) for m in residual_grams[1]] for k in residual_grams[0]]

        np.testing.assert_allclose(result.values[1:, 1:], expected, atol=1e-4)

    def test_rsa_is_a_partial_correlation(self):
        x = residuals(0, layers=3, tokens=30)
        plain = torch.as_tensor(oracles.oracle_rsa([x])["values"])
        r01 = plain[0, 1]
        r02 = plain[0, 2]
        r12 = plain[1, 2]
        similarity = from_views(lsim.RSA(deconfound="input"), [samples(x)]).values[1, 2]

        assert float(similarity) == pytest.approx(float((r12 - r01 * r02) / ((1 - r01**2) * (1 - r02**2)).sqrt()), abs=1e-9)

        # Of two models, each with an embedding of its own.
        y = residuals(1, layers=2, tokens=30, width=5) + x[:2, :, :5]
        analyzer = lsim.RSA(deconfound="input")
        sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, samples(x), samples(y))[1]["k"])
        similarity = analyzer.compute(sums, layer_run(3, 2)).values[2, 1]
        # Ranks of 435 pairs, centred.
        sides = [[ranks(condensed(z, "correlation")) - 218 for z in side] for side in (x, y)]
        expected = correlation(*(regressed(side[-1], side[0]) for side in sides))

        assert float(similarity) == pytest.approx(expected, abs=1e-9)

    def test_layers_that_share_their_inputs_alone_have_nothing_left(self):
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(200, 6))
        x = np.stack([inputs, inputs + 0.5 * rng.normal(size=(200, 6)), inputs + 0.5 * rng.normal(size=(200, 6))])

        plain, deconfounded = (from_views(lsim.CKA(deconfound=d, permutations=99), [samples(x)]) for d in (None, "input"))

        assert float(plain.values[1, 2]) > 0.5
        assert abs(float(deconfounded.values[1, 2])) < 0.05
        assert float(deconfounded.p_values[1, 2]) > 0.05 >= float(plain.p_values[1, 2])

    def test_sites_without_the_embedding_are_refused(self):
        with pytest.raises(lsim.LayersimError, match="deconfound"):
            lsim.analyze(tiny_llama(), random_tokens(8, 20), lsim.CKA(deconfound="input"), at="attn_out")
        with pytest.raises(lsim.LayersimError, match="deconfound"):
            lsim.CKA(deconfound="input", estimator="exact")


@pytest.mark.filterwarnings("ignore:Intervals of")
def test_the_reliability_of_a_comparison_is_that_of_two_halves():
    a = tiny_llama()
    b = tiny_llama(seed=1)
    rows = random_tokens(64, 20)
    result = lsim.compare(a, b, rows, lsim.CKA(), intervals=True)
    # Pools of 16 rows, of which the first and the third are one half.
    order = [*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]
    halves = [lsim.compare(a, b, rows[numbers], lsim.CKA()).values.flatten().numpy() for numbers in order]
    correlation_of_halves = np.corrcoef(halves)[0, 1]

    assert float(result.split_half) == pytest.approx(2 * correlation_of_halves / (1 + correlation_of_halves), abs=1e-6)
    assert float(result.noise_ceiling) == pytest.approx(float(result.split_half) ** 0.5)
    assert bool(lsim.compare(a, b, rows, lsim.CKA()).split_half.isnan())

    grid = lsim.compare_grid({"a": a, "b": b}, rows, lsim.CKA(), intervals=True)
    assert float(grid["a", "b"].split_half) == pytest.approx(float(result.split_half), abs=1e-6)
