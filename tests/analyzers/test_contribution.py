"""Contributions of sublayers: sequential and parallel blocks, known vectors, vectors that are zero, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers._contribution_kernel import contribution_kernel, sublayer_sites
from tl_layersim.core import LayersimError, LayersimWarning, Sums
from tl_layersim.models import View

from .. import oracles
from ..tiny_models import family, random_tokens
from ..views import from_views, provenance, residuals, sites_run, view, with_sublayers


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("layers", [2, 4])
def test_sequential_and_parallel_blocks_equal_the_oracle(parallel, layers):
    # More tokens than one chunk.
    data = [residuals(i, layers=layers, tokens=n) for i, n in enumerate((300, 1))]
    found = from_views(lsim.Contribution(), [with_sublayers(view(x), x, parallel) for x in data])
    for name, expected in oracles.oracle_contribution(data, parallel).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert found.layers[0] == "blocks.0.hook_resid_pre"
    assert len(found.layers) == layers


def known(attention: list[float], mlp: list[float], start: list[float]) -> View:
    """One token of one sequential block."""
    before, added, more = (torch.tensor(vector, dtype=torch.float64) for vector in (start, attention, mlp))
    sites = {
        "blocks.0.hook_mlp_out": more,
        "blocks.0.hook_resid_post": before + added + more,
        "blocks.0.hook_attn_out": added,
        "blocks.0.hook_resid_pre": before,
        "blocks.0.hook_resid_mid": before + added,
    }
    x = torch.stack(list(sites.values()))[:, None]
    return View(x, torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).long(), sites=tuple(sites))


def test_known_vectors():
    # Attention adds a new direction of the stream's length; the MLP takes half of the stream away again.
    found = from_views(lsim.Contribution(), [known([0.0, 2.0], [-1.0, -1.0], [2.0, 0.0])])
    assert found.sublayers == ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out")
    torch.testing.assert_close(found.relative_norm, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(found.cosine, torch.tensor([0.0, -1.0]).double())
    torch.testing.assert_close(found.cosine_to_final, torch.tensor([2**-0.5, -1.0]).double())
    assert float(found.cosine_std.abs().max()) == 0


def test_two_stacks_have_final_streams_of_their_own():
    one, two = residuals(0, layers=3), residuals(1, layers=4)
    parts = [with_sublayers(view(one), one, stack="encoder."), with_sublayers(view(two), two, stack="decoder.")]
    both = replace(parts[0], activations=torch.cat([p.activations for p in parts]), sites=parts[0].sites + parts[1].sites)
    found = from_views(lsim.Contribution(), [both])
    assert [name.split(".")[0] for name in found.sublayers] == ["encoder"] * 4 + ["decoder"] * 6
    expected = [oracles.oracle_contribution([x])["cosine_to_final"] for x in (one, two)]
    np.testing.assert_allclose(found.cosine_to_final, np.concatenate(expected), rtol=1e-9)


def test_names_of_other_sites_are_left_out():
    names = ["blocks.10.hook_mlp_out", "blocks.2.hook_mlp_out", "blocks.2.hook_attn_out", "blocks.2.attn.hook_z", "ln_final"]
    assert sublayer_sites(names) == ("blocks.2.hook_attn_out", "blocks.2.hook_mlp_out", "blocks.10.hook_mlp_out")


def test_vectors_that_are_zero_are_omitted_with_a_warning():
    views = [known([0.0, 2.0], [0.0, 0.0], [2.0, 0.0]), known([1.0, 0.0], [1.0, 0.0], [0.0, 0.0])]
    places = r"blocks\.0\.hook_attn_out: 1 of 2, blocks\.0\.hook_mlp_out: 1 of 2"
    with pytest.warns(LayersimWarning, match=f"have no cosine.*{places}"):
        found = from_views(lsim.Contribution(), views)
    torch.testing.assert_close(found.relative_norm, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(found.cosine, torch.tensor([0.0, 1.0]).double())
    with pytest.warns(LayersimWarning, match="have no cosine"):
        alone = from_views(lsim.Contribution(), views[1:])
    assert bool(alone.relative_norm[0].isnan() & alone.cosine[0].isnan())
    assert len(alone.headline()) == 2


def test_outputs_that_do_not_add_up_are_refused():
    x = residuals(0)
    one = with_sublayers(view(x), x)
    wrong = one.activations.clone()
    wrong[one.sites.index("blocks.1.hook_mlp_out")] *= 2
    with pytest.raises(LayersimError, match=r"do not add up(.|\n)*blocks\.1: \d+%"):
        from_views(lsim.Contribution(), [replace(one, activations=wrong)])


def test_rounding_of_a_stream_in_half_precision_is_no_gap():
    # A long stream in bfloat16, to which little is added: most of the update is lost in rounding.
    x = np.cumsum(np.concatenate([residuals(0)[:1] + 100, np.diff(residuals(0), axis=0) / 20]), axis=0)
    one = with_sublayers(view(x), x)
    rounded = replace(one, activations=one.activations.bfloat16().float())
    sums = Sums.of(contribution_kernel(rounded))
    run = sites_run(one.sites)
    with pytest.raises(LayersimError, match="do not add up"):
        lsim.Contribution().compute(sums, run)
    half = replace(run, provenance=provenance(dtype="torch.bfloat16"))
    found = lsim.Contribution().compute(sums, half)
    expected = oracles.oracle_contribution([x])["values"]
    np.testing.assert_allclose(found.values, expected, rtol=0.01)


def test_a_source_without_sublayers_is_refused():
    with pytest.raises(LayersimError, match="which this source does not read"):
        from_views(lsim.Contribution(), [view(residuals(0))])


def test_post_norm_models_are_refused():
    with pytest.raises(LayersimError, match="no residual branch"):
        lsim.analyze(family("bert"), random_tokens(2, 8), lsim.Contribution())


def test_figures_have_a_line_for_attention_and_one_for_the_mlp():
    x = residuals(0)
    found = from_views(lsim.Contribution(), [with_sublayers(view(x), x)])
    figure = found.plot()
    assert [trace.name for trace in figure.data] == ["Attention", "MLP"]
    np.testing.assert_allclose(figure.data[1].y, found.relative_norm[1::2])
    assert list(figure.data[0].x) == [0, 1, 2]
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2"]
    assert figure.layout.xaxis.title.text == "Block"
    table = found.to_frame()
    assert list(table.columns)[:2] == ["sublayer", "relative_norm"]
    headline = found.headline()
    # Of three blocks, the middle one belongs to the first half.
    first = headline["norm of sublayer outputs over norm of the stream, first half of the blocks"]
    assert first == pytest.approx(float(found.values[:4].mean()))
    assert len(headline) == 4
