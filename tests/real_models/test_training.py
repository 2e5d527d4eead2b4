"""On real pretrained models: alignment."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from .files import optional_real


def test_alignment_of_a_real_model(tmp_path, wikitext):
    """A short one: early layers gain more than by standard training, and the folder that is written says the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models, shares = {}, {}
    for name, how in {"standard": {"objective": "standard"}, "aligned": {"save_to": tmp_path / "aligned"}}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        training = lsim.AlignedTraining(steps=40, lr=1e-3, warmup=4, **how)
        lsim.finetune_aligned(
            model, lsim.Data(wikitext[:45], tokenizer=tokenizer, batch_size=4, seq_len=128, pack=True), training
        )
        models[name] = model
        found = lsim.analyze(model, lsim.Data(wikitext[45:], tokenizer=tokenizer, pack=True), [lsim.Saturation()])["saturation"]
        shares[name] = float(found.early_share)
    assert shares["aligned"] > shares["standard"] + 0.1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "aligned", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "aligned")(wikitext[0], return_tensors="pt").input_ids[:, :60]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, models["aligned"](tokens).logits)


def test_the_aligned_loss_of_a_real_model_is_the_formula():
    from transformers import AutoModelForCausalLM

    folder = optional_real("models", "stories15M")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, 32000, (2, 20), generator=torch.Generator().manual_seed(0))
    loss = lsim.training.aligned_loss(model, tokens)
    loss.backward()
    head = model.lm_head.weight.grad.double().clone()
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    hidden = wide(tokens, output_hidden_states=True).hidden_states
    expected = 0
    for layer in range(1, 7):
        logits = wide.lm_head(hidden[layer] if layer == 6 else wide.model.norm(hidden[layer]))[:, :-1]
        expected = expected + layer / 21 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs = wide.lm_head.weight.grad
    assert float((head - theirs).norm() / theirs.norm()) < 1e-5
