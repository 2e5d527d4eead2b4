"""`Similarity`: a function of the user on minibatches, against loops; its null, intervals, identity, and what is refused."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, samples, worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama


def biased_cka(x: np.ndarray, y: np.ndarray) -> float:
    """As users write it: in place, on the arrays that the function receives."""
    x -= x.mean(0)
    y -= y.mean(0)
    return float(np.sum((x.T @ y) ** 2) / np.sqrt(np.sum((x.T @ x) ** 2) * np.sum((y.T @ y) ** 2)))


def mean_square(x: np.ndarray, y: np.ndarray) -> float:
    return float((x * x).mean())


def texts(count: int, length: int = 6) -> list[torch.Tensor]:
    return list(random_tokens(count, length))


def test_it_equals_its_oracle():
    """Minibatches of several sizes, weighted by their samples; three samples are too few."""
    data = [residuals(seed, layers=3, tokens=n) for seed, n in enumerate((12, 20, 3))]
    result = from_views(lsim.Similarity(oracles.kernel_alignment), [samples(x) for x in data])

    np.testing.assert_allclose(result.values, oracles.oracle_similarity(data)["values"], rtol=1e-12)
    assert (result.samples, result.minibatches, result.texts) == (32, 2, 16)


def test_two_models_of_other_widths():
    x = residuals(0, layers=2, tokens=9)
    y = residuals(1, layers=3, tokens=9, width=5)

    sums = Sums.of(reduce({"k": lsim.Similarity(oracles.kernel_alignment).kernel(Sums())}, samples(x), samples(y))[1]["k"])
    result = lsim.Similarity(oracles.kernel_alignment).compute(sums, layer_run(2, 3))

    np.testing.assert_allclose(result.values, oracles.oracle_similarity([x], [y])["values"], rtol=1e-12)


def test_the_function_receives_float64_arrays_of_each_width():
    shapes = set()

    def noting(x, y):
        assert isinstance(x, np.ndarray)
        assert x.dtype == y.dtype == np.float64
        shapes.update({x.shape, y.shape})
        return 0.0

    model = tiny_llama()
    widths = {model.config.hidden_size, model.config.intermediate_size}
    at = ["blocks.0.hook_resid_post", "blocks.0.mlp.hook_post"]

    lsim.analyze(model, texts(8), lsim.Similarity(noting, minibatch=16), at=at)

    # Narrower sites are padded in a batch, not here.
    assert shapes == {(16, width) for width in widths}
    assert len(widths) == 2


def test_a_function_may_change_its_arrays():
    data = [residuals(seed, layers=3, tokens=12) for seed in range(2)]
    result = from_views(lsim.Similarity(biased_cka), [samples(x) for x in data])
    expected = [oracles.oracle_cka([x], biased=True)["values"] for x in data]

    np.testing.assert_allclose(result.values, np.mean(expected, 0), atol=1e-12)


def test_analyze_with_intervals_and_null_beside_the_analyzer_of_the_package():
    """The mean of ratios of biased CKA is `CKA(estimator="biased", average="cka")` on the same minibatches."""
    data = lsim.Data(texts(64), batch_size=16)
    by_function = lsim.Similarity(biased_cka, level="sequence", minibatch=16, permutations=19)
    by_package = lsim.CKA(estimator="biased", average="cka", level="sequence", minibatch=16)

    report = lsim.analyze(tiny_llama(dtype=torch.float64), data, [by_function, by_package], intervals=True)
    result = report["similarity"]
    expected = report["cka"]

    torch.testing.assert_close(result.values, expected.values, atol=1e-9, rtol=0)
    # The ends of intervals of CKA are bounded by 1, those of a function are not.
    torch.testing.assert_close(result.interval("values").error, expected.interval("values").error, atol=1e-9, rtol=0)
    assert result.permutations == 19
    assert torch.equal(result.p_values.isnan(), torch.zeros_like(result.values, dtype=torch.bool))
    assert bool(result.calibrated.isnan().all() and result.max_calibrated.isnan())
    # A symmetric function has one p-value for two sites.
    assert torch.equal(result.p_values, result.p_values.T)
    assert "p-value of the maximum over pairs of layers" in result.headline()


def test_compare_and_its_exchanged_order():
    data = texts(16)
    analyzer = lsim.Similarity(oracles.kernel_alignment, level="sequence")

    there = lsim.compare(tiny_llama(), tiny_gpt2(), data, analyzer)
    back = lsim.compare(tiny_gpt2(), tiny_llama(), data, analyzer)

    assert there.values.shape == back.values.T.shape
    # The function is not symmetric.
    assert float((there.values - back.values.T).abs().max()) > 1e-3


def test_values_above_one_keep_their_intervals():
    data = lsim.Data(texts(64), batch_size=16)
    report = lsim.analyze(tiny_llama(), data, lsim.Similarity(lambda x, y: 5 + biased_cka(x, y), minibatch=16), intervals=True)
    value, low, high, _ = report["similarity"].interval("values")

    assert bool((low[0, 1] < value[0, 1]) & (value[0, 1] < high[0, 1]))
    assert float(high[0, 1]) > 5


def test_a_pair_that_is_undefined_in_one_permutation_has_no_null():
    def undefined_if_exchanged(x, y):
        # The layers of a random walk are near each other in the true pairing alone.
        return 1.0 if np.linalg.norm(x - y) < np.linalg.norm(x - y[::-1]) else math.nan

    result = from_views(lsim.Similarity(undefined_if_exchanged, permutations=19), [samples(residuals(0, layers=2, tokens=12))])

    assert torch.equal(result.values, torch.ones(2, 2, dtype=torch.float64))
    assert bool(result.p_values.isnan().all())


def test_nan_of_a_minibatch_is_nan():
    result = from_views(
        lsim.Similarity(lambda x, y: math.nan if len(x) == 12 else 1.0), [samples(residuals(tokens=n)) for n in (12, 20)]
    )
    assert bool(result.values.isnan().all())


@pytest.mark.parametrize(
    ("value", "text"), [(None, "None"), ("much", "much"), (np.ones(2), r"\[1"), (math.inf, "inf"), (torch.ones(2), "2")]
)
def test_what_is_no_number_is_refused(value, text):
    with pytest.raises(lsim.LayersimError, match=f"`function`.*{text}"):
        from_views(lsim.Similarity(lambda x, y: value), [samples(residuals(0, tokens=12))])
    with pytest.raises(lsim.LayersimError, match="`function`"):
        lsim.Similarity("cosine")


def test_numbers_of_numpy_and_torch_are_numbers():
    for value in (np.float32(0.5), torch.tensor(0.5), np.array(0.5), 1):
        result = from_views(lsim.Similarity(lambda x, y, value=value: value), [samples(residuals(0, tokens=12))])
        assert float(result.values[0, 0]) == float(value)


def test_the_options_digest_the_code_and_the_values_of_a_function():
    def scaled(factor):
        return lambda x, y: factor * biased_cka(x, y)

    texts_of_functions = [lsim.Similarity(scaled(factor)).options()["function"] for factor in (1, 1, 2)]

    assert texts_of_functions[0] == texts_of_functions[1] != texts_of_functions[2]
    assert lsim.Similarity(lambda x, y: 1).options() != lsim.Similarity(lambda x, y: 2).options()


class Callable:
    def __call__(self, x, y):
        return 1.0


def test_a_checkpoint_goes_on_with_equal_code_only(tmp_path):
    path = tmp_path / "run.safetensors"
    data = texts(16)

    def analyzed(factor):
        return lsim.analyze(tiny_llama(), data, lsim.Similarity(lambda x, y: factor * mean_square(x, y)), checkpoint=path)

    first = analyzed(1)["similarity"]

    assert worst(analyzed(1)["similarity"], first) == 0
    with pytest.raises(lsim.LayersimError, match="function"):
        analyzed(2)


@pytest.mark.parametrize("function", [Callable(), functools.partial(Callable()), np.vdot])
def test_objects_without_a_digest_have_no_checkpoint(function, tmp_path):
    analyzer = lsim.Similarity(function)
    with pytest.raises(lsim.LayersimError, match=r"`checkpoint`.*`function`"):
        lsim.analyze(tiny_llama(), texts(8), analyzer, checkpoint=tmp_path / "run.safetensors")
    with pytest.raises(lsim.LayersimError, match=r"`save_to`.*`function`"):
        lsim.analyze(tiny_llama(), texts(8), analyzer, shard=(0, 2), save_to=tmp_path / "shard.safetensors")
    with pytest.raises(lsim.LayersimError, match=r"`checkpoint`.*`function`"):
        lsim.sweep({"a": tiny_llama}, texts(8), analyzer, checkpoint=tmp_path / "sweep")


def test_no_name_selects_it():
    with pytest.raises(lsim.LayersimError, match="similarity"):
        lsim.analyze(tiny_llama(), texts(8), "similarity")
