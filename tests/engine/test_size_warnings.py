"""Tokens and dimensions of activations far larger than all others are named at the end of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.norms import activation_sizes

from ..inputs.views import view
from ..models.tiny_models import random_tokens, tiny_llama

# What is warned of is read from the provenance.
pytestmark = pytest.mark.filterwarnings("ignore")
MEASURES = [lsim.CKA(minibatch=64), lsim.EffectiveRank(), lsim.Procrustes(), lsim.Cosine()]


def with_large(first: float = 1.0, dimension: float = 1.0, third: float = 1.0, seed: int = 0):
    """A model whose embeddings have one large dimension, or of which those of two ids are large as a whole."""
    model = tiny_llama(seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] *= dimension
        model.model.embed_tokens.weight[1] *= first
        model.model.embed_tokens.weight[2] *= third
    return model


def rows(count: int = 24) -> torch.Tensor:
    """Rows of which each begins with id 1; id 2 stands at position 7 of a few, and nowhere else."""
    tokens = random_tokens(count, 20).clamp(min=3)
    tokens[:, 0] = 1
    tokens[::12, 7] = 2
    return tokens


def warned(report: lsim.Report) -> dict[str, str]:
    return {name: " ".join(report[name].provenance.warnings) for name in report}


@pytest.mark.parametrize("by", [1, 3, 24])
def test_massive_first_tokens_are_named_once_with_how_many_to_leave_out(by):
    with pytest.warns(lsim.LayersimWarning) as warnings:
        report = lsim.analyze(with_large(first=300.0), lsim.Data(rows(), batch_size=by), MEASURES)
    assert sum("few tokens" in str(warning.message) and "skip_first=1" in str(warning.message) for warning in warnings) == 1

    said = warned(report)
    assert all("skip_first=1" in said[name] for name in ("cka", "effective_rank", "procrustes"))
    # Cosine gives each token the same weight, once the mean is subtracted.
    assert "mean that Cosine subtracts" in said["cosine"]

    again = lsim.analyze(with_large(first=300.0), lsim.Data(rows(), skip_first=1), MEASURES)
    assert not any("tokens decide" in text for text in warned(again).values())


@pytest.mark.light("1-20.0", "24-5.0", "24-300.0")
@pytest.mark.parametrize("first", [1.0, 5.0, 20.0, 300.0])
@pytest.mark.parametrize("by", [1, 24])
def test_cosine_warns_where_first_tokens_move_its_mean(first, by):
    model = with_large(first=first)
    whole = lsim.analyze(model, lsim.Data(rows(100), batch_size=by), lsim.Cosine())["cosine"]
    # The same tokens, of which the mean of all but the first is subtracted.
    mean = lsim.analyze(model, lsim.Data(rows(100), skip_first=1), lsim.Cosine())["cosine"].mean
    right = lsim.analyze(model, rows(100), lsim.Cosine(center=mean))["cosine"]
    moved = (whole.values - right.values).abs().max()
    said = " ".join(whole.provenance.warnings)

    assert ("mean that Cosine subtracts" in said) == ("skip_first=1" in said) == (first >= 20)
    assert (float(moved) > 0.1) == (first >= 20)
    assert "mean that" not in " ".join(right.provenance.warnings)


@pytest.mark.parametrize("place", [0, 1])
def test_the_warning_names_the_largest_activations_and_their_position(place):
    """At the embedding, where the length of each token is known."""
    model = with_large(first=50.0)
    tokens = rows(60).roll(place, dims=1)
    result = lsim.analyze(model, lsim.Data(tokens), lsim.Cosine())["cosine"]
    [said] = [text for text in result.provenance.warnings if "mean that Cosine subtracts" in text]
    x = model.model.embed_tokens.weight[tokens].detach().double()
    length = (x - x.mean((0, 1))).square().sum(-1)
    shift = (x - x.mean((0, 1)))[:, : place + 1].sum((0, 1)).norm() / x[:, place + 1 :, 0].numel()
    later = (length[:, place + 1 :].mean() - shift**2).sqrt()
    ratio = float(length[:, place].mean().sqrt() / later)

    assert f"embedding, those at position {place} of a row are {ratio:.3g} times" in said
    assert f"skip_first={place + 1} " in said


def test_massive_tokens_inside_of_rows_are_not_called_first_ones():
    said = warned(lsim.analyze(with_large(third=300.0), rows(), MEASURES))
    assert "inspect" in said["cka"]
    assert "skip_first" not in said["cka"]


def test_one_large_dimension_is_named():
    said = warned(lsim.analyze(with_large(dimension=40.0), rows(), [*MEASURES, lsim.MutualKNN(k=3, minibatch=64)]))
    assert all("dimension" in said[name] for name in ("cka", "procrustes", "cosine", "mutual_knn"))


def test_nothing_is_said_of_ordinary_activations():
    assert not any("decide" in text for text in warned(lsim.analyze(with_large(), rows(), MEASURES)).values())


def test_the_model_with_large_tokens_is_found_in_a_comparison_and_in_a_grid():
    models = {"a": with_large(), "b": with_large(first=300.0, seed=1)}
    pair = lsim.compare(models["a"], models["b"], rows(), lsim.CKA(minibatch=64))
    grid = lsim.compare_grid(models, rows(), lsim.CKA(minibatch=64))
    for result in (pair, grid):
        assert "skip_first=1" in " ".join(result.provenance.warnings)


def test_the_sums_are_those_of_the_formulas():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 36, 5)) * generator.lognormal(size=(2, 36, 1))
    sums = activation_sizes(view(x, rows=3))
    norm = (x**2).sum(-1).reshape(2, 3, 12)

    for power in (1, 2):
        by_place = np.concatenate([(norm**power)[..., :4].sum(1), (norm**power)[..., 4:].sum((1, 2))[:, None]], 1)
        np.testing.assert_allclose(sums[f"0 norm^{2 * power}"], by_place)
    np.testing.assert_array_equal(sums["0 tokens"], [3, 3, 3, 3, 24])

    share = (x**2 / (x**2).sum(-1, keepdims=True)).reshape(2, 3, 12, 5).mean(2)
    variance = x.reshape(2, 3, 12, 5)[:, :, 4:].var(2)
    for name, shares in (("power", share), ("variance", variance)):
        np.testing.assert_allclose(sums[f"0 all {name}"], shares.sum((1, 2)))
        np.testing.assert_allclose(sums[f"0 largest {name}"], shares.max(2).sum(1))
