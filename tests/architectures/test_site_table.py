"""`lsim.sites`: the table of what a model has."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures import find_points, find_stacks

from ..models.tiny_models import tiny_gpt2, tiny_llama
from ..sources.tiny_transformer_lens import bridge_of
from .site_cases import MODELS, model_of


def test_a_row_says_what_is_read_and_where():
    table = lsim.sites(tiny_gpt2())
    assert list(table.columns) == ["name", "family", "block", "module", "heads"]
    rows = {row.name_: row for row in table.rename(columns={"name": "name_"}).itertuples()}
    assert len(rows) == len(table) == 3 * 12 + 1
    query = rows["blocks.1.attn.hook_q"]
    assert (query.family, query.block, query.heads) == ("q", 1, 4)
    assert query.module == "transformer.h.1.attn.c_attn (part of the output)"
    assert rows["blocks.2.hook_resid_mid"].module == "transformer.h.2.ln_2 (input)"
    final = rows["ln_final.hook_normalized"]
    assert final.module == "transformer.ln_f (output)"
    assert table.block.isna().sum() == 1


@pytest.mark.light("llama", "gemma2", "gptj", "bloom from norms", "electra", "modernbert", "swin", "detr")
@pytest.mark.parametrize("key", MODELS)
def test_every_name_in_the_table_selects_its_site(key):
    model = model_of(key)
    blocks = find_stacks(model, None)
    for row in lsim.sites(model).to_dict("records"):
        [point] = find_points(model, blocks, row["name"])
        assert row["module"].startswith(f"{point.module} (")
        if row["heads"]:
            assert len(find_points(model, blocks, row["name"], True)) == row["heads"]


def test_the_table_of_every_kind_of_model():
    model = tiny_llama()
    names = list(lsim.sites(model).name)
    assert list(lsim.sites(bridge_of(model)).name) == names
    nnsight = pytest.importorskip("nnsight")
    assert list(lsim.sites(nnsight.NNsight(model)).name) == names
    assert list(lsim.sites(lsim.open_model(model, layers=["model.layers.2"])).block.dropna().unique()) == [2]


def test_models_that_are_none_are_refused():
    with pytest.raises(lsim.LayersimError, match="`model` is "):
        lsim.sites("gpt2")
    with pytest.raises(lsim.LayersimError, match="layers of Linear are not known"):
        lsim.sites(torch.nn.Linear(2, 2))
