"""Contributions of sublayers: sequential and parallel blocks, known vectors, vectors that are zero, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.analyzers.contribution import sublayer_sites
from tl_layersim.core import LayersimError, LayersimWarning

from .. import oracles
from ..inputs.views import from_views, residuals, view, with_sublayers, worst
from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("layers", [2, 4])
def test_sequential_and_parallel_blocks_equal_the_oracle(parallel, layers):
    # More tokens than one chunk.
    data = [residuals(i, layers=layers, tokens=n) for i, n in enumerate((300, 1))]
    result = from_views(lsim.Contribution(), [with_sublayers(view(x), x, parallel) for x in data])

    for name, expected in oracles.oracle_contribution(data, parallel).items():
        np.testing.assert_allclose(getattr(result, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert result.layers[0] == "blocks.0.hook_resid_pre"
    assert len(result.layers) == layers


def view_of_vectors(attention: list[float], mlp: list[float], start: list[float]) -> View:
    """One token of one sequential block."""
    before, added, mlp_added = (torch.tensor(vector, dtype=torch.float64) for vector in (start, attention, mlp))
    sites = {
        "blocks.0.hook_mlp_out": mlp_added,
        "blocks.0.hook_resid_post": before + added + mlp_added,
        "blocks.0.hook_attn_out": added,
        "blocks.0.hook_resid_pre": before,
        "blocks.0.hook_resid_mid": before + added,
    }
    x = torch.stack(list(sites.values()))[:, None]
    return View(x, torch.zeros(1).long(), torch.zeros(1).long(), torch.zeros(1).long(), sites=tuple(sites))


def test_known_vectors():
    # Attention adds a new direction of the stream's length; the MLP takes half of the stream away again.
    result = from_views(lsim.Contribution(), [view_of_vectors([0.0, 2.0], [-1.0, -1.0], [2.0, 0.0])])
    assert result.sublayers == ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out")
    torch.testing.assert_close(result.relative_norm, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(result.cosine, torch.tensor([0.0, -1.0]).double())
    torch.testing.assert_close(result.cosine_to_final, torch.tensor([2**-0.5, -1.0]).double())


def test_two_stacks_have_final_streams_of_their_own():
    first = residuals(0, layers=3)
    two = residuals(1, layers=4)
    parts = [with_sublayers(view(first), first, stack="encoder."), with_sublayers(view(two), two, stack="decoder.")]
    joined = replace(parts[0], activations=torch.cat([p.activations for p in parts]), sites=parts[0].sites + parts[1].sites)

    result = from_views(lsim.Contribution(), [joined])

    assert [name.split(".")[0] for name in result.sublayers] == ["encoder"] * 4 + ["decoder"] * 6

    expected = [oracles.oracle_contribution([x])["cosine_to_final"] for x in (first, two)]
    np.testing.assert_allclose(result.cosine_to_final, np.concatenate(expected), rtol=1e-9)


def test_names_of_other_sites_are_left_out():
    names = ["blocks.10.hook_mlp_out", "blocks.2.hook_mlp_out", "blocks.2.hook_attn_out", "blocks.2.attn.hook_z", "ln_final"]
    assert sublayer_sites(names) == ("blocks.2.hook_attn_out", "blocks.2.hook_mlp_out", "blocks.10.hook_mlp_out")


def test_vectors_that_are_zero_are_omitted_with_a_warning():
    views = [view_of_vectors([0.0, 2.0], [0.0, 0.0], [2.0, 0.0]), view_of_vectors([1.0, 0.0], [1.0, 0.0], [0.0, 0.0])]
    places = r"blocks\.0\.hook_attn_out: 1 of 2, blocks\.0\.hook_mlp_out: 1 of 2"

    with pytest.warns(LayersimWarning, match=f"cosine is not defined.*{places}"):
        result = from_views(lsim.Contribution(), views)

    torch.testing.assert_close(result.relative_norm, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(result.cosine, torch.tensor([0.0, 1.0]).double())

    with pytest.warns(LayersimWarning, match="cosine is not defined"):
        alone = from_views(lsim.Contribution(), views[1:])
    assert bool(alone.relative_norm[0].isnan() & alone.cosine[0].isnan())
    assert len(alone.headline()) == 2


def outputs_by_hooks(model, row: torch.Tensor, attention: list, mlp: list) -> list[tuple[torch.Tensor, ...]]:
    """For each sublayer its output, the stream to which it is added and the final stream, by hooks of the test's own."""
    blocks = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
    captured: dict[torch.nn.Module, torch.Tensor] = {}

    def keep(module, args, kwargs, output):
        captured[module] = (output[0] if isinstance(output, tuple) else output)[0].double()

    def keep_input(module, args, kwargs):
        captured[module, "in"] = (args[0] if args else kwargs["hidden_states"])[0].double()

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in (*blocks, *attention, *mlp)]
    handles += [block.register_forward_pre_hook(keep_input, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        model(row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    final = captured[blocks[-1]]
    parts = []
    for block, attention_part, two in zip(blocks, attention, mlp, strict=True):
        before = captured[block, "in"]
        parallel = bool(getattr(model.config, "use_parallel_residual", False))
        parts += [
            (captured[attention_part], before, final),
            (captured[two], before if parallel else before + captured[attention_part], final),
        ]
        torch.testing.assert_close(before + captured[attention_part] + captured[two], captured[block], rtol=0.02, atol=0.02)
    return parts


SUBLAYERS = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "neox": ("attention", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "bfloat16": ("self_attn", "mlp"),
}


def built(name: str):
    if name == "bfloat16":
        return tiny_llama(dtype=torch.bfloat16)
    return {"llama": tiny_llama, "gpt2": tiny_gpt2}.get(name, lambda: family(name))()


@pytest.mark.parametrize("name", SUBLAYERS)
def test_contributions_equal_those_of_hooks(name):
    model = built(name)
    rows = [random_tokens(1, n, seed=n)[0] for n in (14, 9, 1)]
    blocks = model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h
    attention_path, mlp_path = SUBLAYERS[name]
    attention = [block.get_submodule(attention_path) for block in blocks]
    mlp = [block.get_submodule(mlp_path) for block in blocks]
    tables = [outputs_by_hooks(model, row, attention, mlp) for row in rows]

    result = lsim.analyze(model, rows, [lsim.Cosine(), lsim.Contribution()], at="resid_post")["contribution"]
    # In bfloat16 the stream between attention and MLP is rounded, and batches round unlike single rows.
    rtol, atol = (0.02, 0.01) if name == "bfloat16" else (1e-4, 1e-5)

    for number in range(2 * len(blocks)):
        a = torch.cat([table[number][0] for table in tables])
        h = torch.cat([table[number][1] for table in tables])
        end = torch.cat([table[number][2] for table in tables])
        expected = {
            "relative_norm": a.norm(dim=-1) / h.norm(dim=-1),
            "cosine": torch.cosine_similarity(a, h, -1),
            "cosine_to_final": torch.cosine_similarity(a, end, -1),
        }
        for field, values in expected.items():
            torch.testing.assert_close(getattr(result, field)[number], values.mean(), rtol=rtol, atol=atol)
    assert result.sublayers == tuple(f"blocks.{i}.hook_{kind}_out" for i in range(3) for kind in ("attn", "mlp"))

    alone = lsim.analyze(model, lsim.Data(rows, batch_size=1), lsim.Contribution(), at="attn_out")["contribution"]
    assert worst(result, alone) < (0.05 if name == "bfloat16" else 1e-5)


def test_one_block():
    model = tiny_llama(layers=1)
    rows = random_tokens(2, 8)

    result = lsim.analyze(model, rows, lsim.Contribution())["contribution"]

    assert result.sublayers == ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out")
    assert result.layers == ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post")
    assert all("first half" in name for name in result.headline())


def test_post_norm_models_are_refused():
    with pytest.raises(LayersimError, match="no residual branch"):
        lsim.analyze(family("bert"), random_tokens(2, 8), lsim.Contribution())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_figures_have_a_line_for_attention_and_one_for_the_mlp():
    x = residuals(0)
    result = from_views(lsim.Contribution(), [with_sublayers(view(x), x)])
    figure = result.plot()

    assert [trace.name for trace in figure.data] == ["Attention", "MLP"]
    np.testing.assert_allclose(figure.data[1].y, result.relative_norm[1::2])
    assert list(figure.data[0].x) == [0, 1, 2]
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2"]
    assert figure.layout.xaxis.title.text == "Block"

    table = result.to_frame()
    assert list(table.columns)[:2] == ["sublayer", "relative_norm"]

    headline = result.headline()
    # Of three blocks, the middle one belongs to the first half.
    first = headline["relative norm, first half of the blocks"]
    assert first == pytest.approx(np.median(result.values[:4]))

    # The MLP of the first block often multiplies the norm.
    wide = replace(result, values=torch.tensor([0.4, 16.0, 0.3, 0.3, 0.2, 0.4]).double()).plot()
    assert (figure.layout.yaxis.type, wide.layout.yaxis.type) == (None, "log")
    assert len(headline) == 4
