"""On real pretrained models: stitching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import hidden_states
from ..running.options import called
from .helpers import load


def test_stitching_real_models(wikitext):
    """What a stitch must give where the answer is known, and that half of the float64 work by hand says the same."""
    from ..stitching.helpers import rotated

    front, back = load("stories260K"), load("stories279K-xs")
    options = {"seq_len": 64, "max_tokens": 6000}
    for layer in ("blocks.0.hook_resid_pre", *range(len(front.model.layers))):
        assert called(lsim.stitch, front, front, wikitext[:4], at=(layer, layer), adapter="identity", **options).penalty == 0.0
    turned, basis = rotated(front)
    turned.tokenizer = front.tokenizer
    plain = called(lsim.stitch, front, turned, wikitext, at=(2, 2), adapter="identity", **options)
    found = called(lsim.stitch, front, turned, wikitext, at=(2, 2), adapter="linear", fit="lstsq", **options)
    assert plain.penalty > 1
    assert abs(found.penalty) < 1e-3
    np.testing.assert_allclose(found.weight, basis, atol=1e-3)

    # Two models of independent runs: a map brings most of it over, and more of the better model.
    grid = called(lsim.stitch_grid, {"a": front, "b": back}, wikitext, layers=[2], fit="lstsq", **options)
    apart = called(lsim.stitch_grid, {"a": front, "b": back}, wikitext, layers=[2], adapter="identity", **options)
    assert float(grid.penalty[0, 1, 0]) < 0.5 * float(apart.penalty[0, 1, 0])

    one = called(lsim.stitch, front, back, wikitext, at=(2, 1), adapter="affine", fit="lstsq", **options)
    tokens = front.tokenizer(wikitext[-1], return_tensors="pt")["input_ids"][:, :64]
    assert int(tokens[0, 0]) == front.tokenizer.bos_token_id != int(tokens[0, 1])
    judged = lsim.stitch(front, back, tokens, at=(2, 1), adapter=one.adapter)
    back = back.double()
    x = one.weight @ torch.as_tensor(hidden_states(front.double(), tokens[0])[3]).T + one.bias[:, None]
    handle = back.model.layers[2].register_forward_pre_hook(lambda _m, args: (x.T[None], *args[1:]))
    with torch.no_grad():
        logits = back(tokens).logits[0, :-1]
    handle.remove()
    by_hand = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    assert judged.loss == pytest.approx(float(by_hand), abs=2e-5)
