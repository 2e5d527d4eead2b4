"""Padding on either side: logits, exits and losses of rows in a batch are those of the rows alone."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim

from ..models.tiny_models import FAMILIES, family

LENGTHS = (11, 7, 9, 3)
ROWS = [torch.randint(5, 97, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
PLAIN = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
# Models that count absolute positions, and models that carry a state along the row.
MORE = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "gpt neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
    "gpt bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "biogpt": ("BioGptForCausalLM", SIZES | {"intermediate_size": 48, "max_position_embeddings": 64}),
    "ctrl": ("CTRLLMHeadModel", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "dff": 48}),
    "xglm": ("XGLMForCausalLM", {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48}),
    "bert decoder": ("BertLMHeadModel", SIZES | {"intermediate_size": 48, "is_decoder": True}),
    "codegen": ("CodeGenForCausalLM", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 64}),
    "rwkv": ("RwkvForCausalLM", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3}),
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}),
}


def model_of(name: str):
    if name in MORE:
        head, settings = MORE[name]
        cls = getattr(transformers, head)
        torch.manual_seed(0)
        model = cls(cls.config_class(**PLAIN | settings)).eval()
    else:
        model = family(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def padded(side: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((len(ROWS), max(LENGTHS)), pad)
    mask = torch.zeros(len(ROWS), max(LENGTHS), dtype=torch.long)
    for i, row in enumerate(ROWS):
        at = slice(max(LENGTHS) - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, at] = row
        mask[i, at] = 1
    return ids, mask


def next_token_losses(logits: list[torch.Tensor]) -> float:
    pairs = zip(logits, ROWS, strict=True)
    losses = [torch.nn.functional.cross_entropy(row_logits[:-1], row[1:], reduction="sum") for row_logits, row in pairs]
    return float(torch.stack(losses).sum()) / sum(len(row) - 1 for row in ROWS)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_the_side_of_padding_changes_nothing(name):
    model = model_of(name)
    with torch.no_grad():
        alone = [model(row[None]).logits[0] for row in ROWS]
    size = torch.cat(alone).abs().max()
    plain = lsim.EarlyExit(model, 1.0)
    early = lsim.EarlyExit(model, 0.03, at="all")
    own_exits = torch.cat([early.logits(row[None]).exits[0] for row in ROWS])

    for side in ("left", "right"):
        ids, mask = padded(side)
        real = mask.bool()
        output = plain.logits(ids, mask)
        exits = early.logits(ids, mask).exits
        assert float((output.logits[real] - torch.cat(alone)).abs().max()) < 1e-4 * size, side
        assert not bool(output.logits[~real].any())
        assert torch.equal(exits[real], own_exits), side
        assert not bool(exits[~real].any())
        curve = lsim.analyze(model, {"input_ids": ids, "attention_mask": mask}, lsim.ExitCurve(thresholds=(0.03,)))[
            "exit_curve"
        ]
        blocks = curve.exits.shape[1]
        assert own_exits.bincount(minlength=blocks + 1)[1:].tolist() == curve.exits[0].long().tolist()
        loss = lsim.training.aligned_loss(model, ids, attention_mask=mask, weights=[0] * (blocks - 1) + [1])
        assert float(loss) == pytest.approx(next_token_losses(alone), rel=1e-5), side


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "rwkv", "llama"])
def test_gradients_and_given_labels_do_not_depend_on_the_side(name):
    model = model_of(name)
    gradients = []
    for side in ("left", "right"):
        ids, mask = padded(side)
        labels = torch.full_like(ids, -100)
        labels[mask.bool()] = torch.cat(ROWS).flip(0)
        model.zero_grad()
        lsim.training.aligned_loss(model, ids, labels, attention_mask=mask).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    assert torch.allclose(*gradients, atol=1e-5 * float(gradients[1].abs().max()))


@pytest.mark.filterwarnings("ignore")
def test_classifiers_read_the_last_token_whatever_pads_the_row():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, num_labels=3, **PLAIN)
    model = transformers.GPT2ForSequenceClassification(config).eval()
    with torch.no_grad():
        alone = torch.cat([model(row[None]).logits for row in ROWS])

    early = lsim.EarlyExit(model, 1.0)

    for side in ("left", "right"):
        for pad in (0, 9):
            logits = early.logits(*padded(side, pad)).logits
            assert torch.allclose(logits, alone, atol=1e-5), (side, pad)
