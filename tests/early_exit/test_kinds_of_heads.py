"""Early exit and truncated copies of models with every kind of head."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.head_models import CASES, layer_logits
from ..running.options import called

# Rules with thresholds at which rows leave after different blocks.
RULES = {"max-prob": 0.5, "cosine": 0.3, "patience": 2}
KINDS = ("distilbert", "deberta", "modernbert mean", "deit with teacher", "dinov2", "clip", "beit", "llama")


def inputs_of(case):
    data = case.data()
    return data.get("pixel_values", data.get("input_ids")), data.get("attention_mask")


@pytest.mark.light("distilbert", "modernbert mean", "clip", "llama")
@pytest.mark.parametrize("name", KINDS)
def test_rows_exit_with_the_logits_of_their_layer(name):
    case = CASES[name]
    model = case.build()
    depths = set()
    by_layer = torch.stack([torch.cat(layer_logits(model, case.paths, row)) for row in case.rows()])
    never = called(lsim.EarlyExit, model, threshold=1.0, at="all", **case.options).logits(*inputs_of(case))

    torch.testing.assert_close(never.logits, by_layer[:, -1], rtol=1e-9, atol=1e-12)
    assert never.exits.tolist() == [3] * 5

    for rule, threshold in RULES.items():
        early = called(lsim.EarlyExit, model, rule=rule, threshold=threshold, at="all", **case.options)
        output = early.logits(*inputs_of(case))
        torch.testing.assert_close(output.logits, by_layer[torch.arange(5), output.exits - 1], rtol=1e-9, atol=1e-12)
        depths |= set(output.exits.tolist())
        if rule == "max-prob":
            sure = by_layer.softmax(-1).amax(-1) > threshold
            assert output.exits.tolist() == [next((n + 1 for n in (0, 1) if row[n]), 3) for row in sure]

    assert len(depths) > 1


@pytest.mark.light("distilbert", "deit with teacher", "llama")
@pytest.mark.parametrize("name", [name for name in KINDS if not CASES[name].named])
def test_a_truncated_copy_has_the_logits_of_the_lens(name, tmp_path):
    case = CASES[name]
    model = case.build()
    short = lsim.truncate(model, 2, save_to=tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=next(model.parameters()).dtype).eval()

    # The stages of a backbone, which DINOv2 and BEiT name.
    for name in ("stage_names", "out_features"):
        assert getattr(short.config, name, None) == getattr(loaded.config, name, None)

    for row in case.rows():
        expected = layer_logits(model, case.paths, row)[1]
        with torch.no_grad():
            torch.testing.assert_close(short(**row).logits, expected, rtol=1e-9, atol=1e-12)
            # DeBERTa builds a buffer in float32 when it is loaded.
            torch.testing.assert_close(loaded(**row).logits, expected, rtol=1e-5, atol=1e-6)
