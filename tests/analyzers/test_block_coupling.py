"""Coupling of blocks: planted cases, the null, prompts."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.block_call import BlockCall

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama


def linear_view(matrices: list[np.ndarray], tokens: int = 3) -> View:
    """A view of blocks x + J x with given J, for each token alone."""
    width = len(matrices[0])
    x = [np.random.default_rng(0).normal(size=(tokens, width))]
    for matrix in matrices:
        x.append(x[-1] + x[-1] @ matrix.T)
    stack = torch.tensor(np.array(x))

    def block(matrix):
        return lambda hidden: hidden + hidden @ torch.tensor(matrix.T, dtype=hidden.dtype)

    calls = [BlockCall(block(m), (stack[i][None],), {}, 0, stack[i + 1][None]) for i, m in enumerate(matrices)]
    return view(np.array(x), calls=tuple(calls))


def frames(seed: int, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(2))


@pytest.mark.parametrize("method", ["dense", "krylov"])
def test_blocks_that_share_their_singular_vectors_are_coupled(method):
    u, v = frames(0)
    spectrum = np.geomspace(4, 0.1, 24)
    shared = [u @ np.diag(spectrum * scale) @ v.T for scale in (1.0, 0.5, 2.0)]

    result = from_views(lsim.BlockCoupling(k=6, method=method), [linear_view(shared)])

    assert float(result.values.abs().max()) < 1e-5
    np.testing.assert_allclose(result.singular_values[0], spectrum[:6], rtol=1e-9)

    # With the sign of the right vectors turned, they diagonalise each other as well; but not with positive entries.
    turned = [shared[0], -shared[1]]
    assert float(from_views(lsim.BlockCoupling(k=6, method=method), [linear_view(turned)]).values.abs().max()) < 1e-5

    strict = from_views(lsim.BlockCoupling(k=6, method=method, diagonal="positive"), [linear_view(turned)])
    np.testing.assert_allclose(strict.values[0, 1], 2.0, atol=1e-4)


@pytest.mark.parametrize("method", ["dense", "krylov"])
def test_blocks_of_one_symmetric_basis_are_aligned_and_linear(method):
    u, _ = frames(0)
    spectra = [np.geomspace(4, 0.1, 24) * scale for scale in (1.0, 0.5, 2.0)]

    result = from_views(lsim.BlockCoupling(k=6, method=method), [linear_view([u @ np.diag(s) @ u.T for s in spectra])])

    for name in ("left_alignment", "right_alignment", "cross_alignment"):
        np.testing.assert_allclose(getattr(result, name), 1, atol=1e-6)
    # The blocks are their Jacobians, and each grows the part of its input along a singular vector by 1 + s.
    assert float(result.path_error.max()) < 1e-9
    assert float(result.update_error.max()) < 1e-9
    torch.testing.assert_close(result.left_share, result.right_share, rtol=1e-4, atol=1e-6)
    assert bool((result.right_share[1:, 0] > result.right_share[:-1, 0]).all())


def test_spans_without_a_common_direction_are_not_aligned():
    u, v = frames(1)
    parts = [u[:, at : at + 6] @ np.diag([4.0, 3, 2, 1, 0.5, 0.2]) @ v[:, at : at + 6].T for at in (0, 6)]

    result = from_views(lsim.BlockCoupling(k=6), [linear_view(parts)])

    for name in ("left_alignment", "right_alignment"):
        np.testing.assert_allclose(getattr(result, name), np.eye(2), atol=1e-9)
    assert result.mean("left_alignment") < 1e-9


@pytest.mark.heavy("a simulation")
def test_independent_blocks_are_as_the_null():
    spectrum = np.geomspace(4, 0.5, 24)
    views = []
    for seed in range(40):
        matrices = []
        for layer in range(3):
            u, v = frames(100 * seed + layer)
            matrices.append(u @ np.diag(spectrum) @ v.T)
        views.append(linear_view(matrices))

    result = from_views(lsim.BlockCoupling(k=(5, 2)), views)

    assert abs(result.mean("values") - result.mean("null")) < 0.02
    assert abs(result.mean("null") - np.sqrt(1 - 1 / 5)) < 0.03
    assert abs(float(result.null_by_k[1][0, 1]) - np.sqrt(1 - 1 / 2)) < 0.1
    assert float(result.null.diagonal().abs().max()) == 0


def test_smaller_k_is_nested():
    tokens = random_tokens(3, 12)
    many = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=(8, 3)))["block_coupling"]
    few = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=3))["block_coupling"]

    assert many.ks == (8, 3)
    torch.testing.assert_close(many.by_k[1], few.values, rtol=0, atol=1e-7)
    torch.testing.assert_close(many.by_k[0], many.values, rtol=0, atol=0)
    assert many.singular_values.shape == (3, 8)


def test_without_normalisation_it_is_m():
    data = [residuals(1)[:, :9]]
    jacobians = [oracles.own_jacobian(data[0][layer], layer, 8, 8) for layer in range(3)]

    result = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(data[0])])
    expected = oracles.miscoupling(oracles.coupling_matrix(jacobians[0], jacobians[2], 3), normalize=False)

    assert abs(float(result.values[0, 2]) - expected) < 1e-10
    torch.testing.assert_close(result.coupling, -result.values)

    u, _, vt = np.linalg.svd(jacobians[2])
    first_u, _, _ = np.linalg.svd(jacobians[0])
    np.testing.assert_allclose(result.left_alignment[0, 2], oracles.alignment(first_u[:, :3], u[:, :3]), atol=1e-12)
    np.testing.assert_allclose(result.cross_alignment[0, 2], oracles.alignment(first_u[:, :3], vt[:3].T), atol=1e-12)


def test_positions_are_tokens_of_each_prompt():
    x = residuals(2)[:, :9]
    result = from_views(lsim.BlockCoupling(k=3, tokens=(0, -2)), [view(x)])
    expected = []
    for t in (0, 7):
        jacobians = [oracles.own_jacobian(x[layer], layer, t, t) for layer in range(3)]
        matrix = np.empty((3, 3))
        for row, column in np.ndindex(matrix.shape):
            matrix[row, column] = oracles.miscoupling(oracles.coupling_matrix(jacobians[row], jacobians[column], 3))
        expected.append(matrix)

    np.testing.assert_allclose(result.values, np.mean(expected, 0), atol=1e-9)
    assert (result.lengths, result.length_count.tolist()) == (("8 to 15",), [2.0])
    with pytest.raises(lsim.LayersimError, match=r"`tokens`.* 13 "):
        lsim.analyze(tiny_llama(), random_tokens(2, 12), lsim.BlockCoupling(k=3, tokens=(12,)))


def test_degenerate_jacobians():
    u, v = frames(3)
    # Rank 2, repeated singular values, and nothing at all.
    poor = u[:, :2] @ np.diag([3.0, 3.0]) @ v[:, :2].T
    nothing = np.zeros((24, 24))
    full = u @ np.diag(np.geomspace(2, 0.2, 24)) @ v.T

    for method in ("dense", "krylov"):
        with pytest.warns(lsim.LayersimWarning, match=r"not defined for blocks.0.hook_resid_post, blocks.2.hook_resid_post"):
            result = from_views(lsim.BlockCoupling(k=(5, 2), method=method), [linear_view([poor, full, nothing])])
        np.testing.assert_allclose(result.singular_values[0], [3, 3, 0, 0, 0], atol=1e-6)
        # A basis of fewer than k directions says nothing, a Jacobian of 0 neither; both are in nobody's mean.
        assert result.values.isnan().tolist() == [[True, False, True], [True, False, True], [True, True, True]]
        assert result.by_k[1].isnan().tolist() == [[False, False, True], [False, False, True], [True, True, True]]
        assert result.defined.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
        np.testing.assert_allclose(result.mean(), float(result.coupling[0, 1]))
        np.testing.assert_allclose(result.by_length, [result.mean()])
        expected = oracles.miscoupling(oracles.coupling_matrix(poor, full, 5))
        np.testing.assert_allclose(result.values[0, 1], expected, atol=1e-5)
        # Alignments need k directions of both; a block without an update has no error.
        assert result.left_alignment.isfinite().tolist() == [[False] * 3, [False, True, False], [False] * 3]
        assert result.update_error.isfinite().tolist() == [True, True, False]
        assert result.right_share.isfinite().sum(1).tolist() == [2, 5, 0]


def test_the_deviation_is_of_prompts_with_a_coupling():
    frame = frames(3)
    spectrum = np.geomspace(2, 0.2, 24)
    poor = frame[0][:, :2] @ frame[1][:, :2].T
    pairs = []
    for seed in (4, 5):
        pairs.append([u @ np.diag(spectrum) @ v.T for u, v in (frame, frames(seed))])

    result = from_views(lsim.BlockCoupling(k=5), [linear_view(prompt) for prompt in (*pairs, [poor, pairs[0][1]])])

    assert float(result.defined[1, 0]) == pytest.approx(2 / 3)

    per_prompt = [oracles.miscoupling(oracles.coupling_matrix(second, first, 5)) for first, second in pairs]
    np.testing.assert_allclose(result.std[1, 0], np.std(per_prompt), atol=1e-9)
    assert np.std(per_prompt) > 1e-3


def test_a_single_block_has_nothing_to_couple_with():
    result = lsim.analyze(tiny_llama(layers=1), random_tokens(2, 9), lsim.BlockCoupling(k=4))["block_coupling"]
    assert result.values.shape == (1, 1)
    assert np.isnan(result.mean())
    assert list(result.headline().values()) == [float(result.singular_values.max())]
    assert len(result.by_length) == 0


def test_one_token():
    result = lsim.analyze(tiny_llama(), random_tokens(3, 1), lsim.BlockCoupling(k=4))["block_coupling"]
    assert result.lengths == ("1",)
    assert float(result.whole_rows.max()) == 0


def test_it_runs_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lsim.analyze(tiny_gpt2(), random_tokens(2, 9), lsim.BlockCoupling(k=4))


def test_prompts_are_as_long_as_they_are_whichever_token_is_read():
    rows = [random_tokens(1, n, seed=n)[0] for n in (1, 3, 8)]
    result = lsim.analyze(tiny_llama(), rows, lsim.BlockCoupling(k=4, tokens=(0,)))["block_coupling"]
    assert (result.lengths, result.prompts) == (("1", "2 to 3", "8 to 15"), 3)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_packed_rows_are_no_prompts():
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        lsim.analyze(lsim.demo_model(), lsim.Data(lsim.demo_text()[:2], pack=True), lsim.BlockCoupling())


def test_means_of_each_k():
    result = from_views(lsim.BlockCoupling(k=(5, 3)), [view(residuals(1)[:, :9])])
    off_diagonal = ~torch.eye(3, dtype=torch.bool)

    assert result.mean(k=3) == float((1 - result.by_k[1])[off_diagonal].mean())
    assert result.mean("null_coupling", k=5) == result.mean("null_coupling")
    assert abs(result.mean("null_coupling") - (1 - result.mean("null"))) < 1e-12
    # The mean with the diagonal is that of the paper.
    np.testing.assert_allclose(result.mean(k=3, diagonal=True), float((1 - result.by_k[1]).mean()))
    np.testing.assert_allclose(result.mean(diagonal=True), result.mean() * 2 / 3 + 1 / 3, atol=1e-9)
    with pytest.raises(lsim.LayersimError, match=r"`k` is 5; .*left_alignment"):
        result.mean("left_alignment", k=5)
    with pytest.raises(lsim.LayersimError, match=r"`k` is 7; .* 5 or 3"):
        result.mean(k=7)

    # A larger k adds to the draws of a smaller one.
    alone = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
    torch.testing.assert_close(result.null_by_k[1], alone.null)


@pytest.mark.parametrize("options", [{"k": (5, 5)}, {"k": ()}, {"k": 1}, {"tokens": (1, 1, 5)}, {"tokens": ()}])
def test_numbers_that_are_repeated_or_missing_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(lsim.LayersimError, match=re.escape(f"`{name}` is {value}; ")):
        lsim.BlockCoupling(**options)
