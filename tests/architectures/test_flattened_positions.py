"""Modules that get rows and positions flattened into one axis, as the MLP of OPT does."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import family, random_tokens
from ..models.wrapped_models import nnsight


@pytest.mark.parametrize("at", ["mlp_post", "mlp_out", "resid_mid"])
@pytest.mark.parametrize("wrap", [lambda model: model, nnsight], ids=["module", "nnsight"])
def test_flattened_positions_are_those_of_their_rows(wrap, at):
    model = family("opt")
    tokens = random_tokens(4, 11)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = mask[3, 4:] = 0
    outputs = []
    for block in model.model.decoder.layers:
        module = block.final_layer_norm if at == "resid_mid" else block.fc2
        module.register_forward_hook(lambda _module, args, output: outputs.append(output if at == "mlp_out" else args[0]))
    with torch.no_grad():
        model(tokens, attention_mask=mask)

    assert outputs[0].dim() == 2

    vectors = torch.stack(outputs)[:, mask.flatten().bool()].double()
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    expected = torch.einsum("atd,btd->ab", unit, unit) / unit.shape[1]
    report = lsim.analyze(wrap(model), {"input_ids": tokens, "attention_mask": mask}, [lsim.Cosine(center="none")], at=at)

    torch.testing.assert_close(report["cosine"].values, expected, rtol=0, atol=1e-6)
