"""Stitched models on rows with padding on the left."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama

LENGTHS = (9, 5, 7)


def left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(2, len(rows), max(LENGTHS), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -len(row) :] = row
        mask[i, -len(row) :] = 1
    return ids, mask


def rwkv():
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return RwkvForCausalLM(RwkvConfig(vocab_size=100, context_length=64, **sizes)).eval()


def stitched(front, back):
    return lsim.stitch(front, back, random_tokens(8, 10), at=(1, 1), adapter="affine", fit="lstsq").model


ROWS = [random_tokens(1, length, seed=length)[0] for length in LENGTHS]


@pytest.mark.light("gpt2")
@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize(
    ("front", "back"),
    [
        (tiny_gpt2, tiny_gpt2),
        (tiny_gpt2, tiny_llama),
        (tiny_llama, tiny_gpt2),
        (lambda: family("bloom"), lambda: family("opt")),
    ],
    ids=["gpt2", "gpt2 to llama", "llama to gpt2", "bloom to opt"],
)
def test_a_row_has_the_logits_of_the_row_alone(front, back):
    model = stitched(front(), back())
    ids, mask = left(ROWS)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        for i, row in enumerate(ROWS):
            assert torch.allclose(logits[i, -len(row) :], model(row[None]).logits[0], atol=1e-4)

    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)

    for i, row in enumerate(ROWS):
        alone = model.generate(row[None], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
        assert generated[i, -4:].tolist() == alone[0, -4:].tolist()


@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize("at_front", [True, False])
def test_models_that_run_through_padding_are_refused(at_front):
    model = stitched(rwkv(), tiny_llama()) if at_front else stitched(tiny_llama(), rwkv())
    ids, mask = left(ROWS)

    with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.*left"), torch.no_grad():
        model(ids, attention_mask=mask)
    right = ids.flip(1)
    ahead = mask.flip(1)
    with torch.no_grad():
        logits = model(right, attention_mask=ahead).logits
        assert torch.allclose(logits[1, :5], model(ROWS[1].flip(0)[None]).logits[0], atol=1e-4)
