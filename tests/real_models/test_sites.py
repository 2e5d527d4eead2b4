"""On real pretrained models: cosine and CKA at sites inside blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.site_hooks import read_sites
from ..models.wrapped_models import bridge
from .helpers import load

pytestmark = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")


@pytest.mark.parametrize("name", ["stories15M", "smollm2"])
@pytest.mark.parametrize("place", ["attn_out", "mlp_out", "z per head"])
def test_cosine_and_cka_equal_their_oracles(name, place):
    model = load(name)
    tokens = model.tokenizer("Once upon a time there was a little girl who", return_tensors="pt")["input_ids"][:, :8]
    tokens, family = torch.cat([tokens.roll(shift, 1) for shift in range(4)]), place.split()[0]
    table = lsim.sites(model)
    table = table[table.family == family]
    # The first, one in the middle and the last: oracles take their time.
    chosen = [table.name.iloc[i] for i in (0, len(table) // 2, -1)]
    heads = int(table.heads.iloc[0])
    sites = [f"{site}[{head}]" for site in chosen for head in range(0, heads, 3)] if heads else chosen
    found = lsim.analyze(model, tokens, [lsim.Cosine(), lsim.CKA()], at=sites)
    seen = read_sites(model, table, {"input_ids": tokens})
    samples = []
    for site in sites:
        stem, _, head = site.removesuffix("]").partition("[")
        whole = seen[stem].flatten(0, 1).double().numpy()
        samples.append(np.split(whole, heads, axis=1)[int(head)] if head else whole)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = oracles.oracle_cosine([np.stack(samples)])
    assert found["cka"].layers == tuple(sites)
    np.testing.assert_allclose(found["cosine"].values, cosine["values"], atol=2e-6)
    np.testing.assert_allclose(found["cosine"].std, cosine["std"], atol=2e-5)
    # Massive activations make the biased terms large beside their difference.
    np.testing.assert_allclose(found["cka"].values, oracles.oracle_cka([np.stack(samples)], rows=8)["values"], atol=2e-5)


@pytest.mark.parametrize("name", ["stories15M", "smollm2"])
def test_a_bridge_reads_the_same_sites(name):
    model = load(name)
    tokens = model.tokenizer("Once upon a time there was a little girl who", return_tensors="pt")["input_ids"]
    at = ["z", "attn_out", "mlp_out", "resid_mid"]
    here = lsim.analyze(model, tokens, lsim.CKA(unit="token"), at=at)["cka"]
    there = lsim.analyze(bridge(load(name)), tokens, lsim.CKA(unit="token"), at=at)["cka"]
    assert here.layers == there.layers
    np.testing.assert_allclose(there.values, here.values, atol=5e-5)
