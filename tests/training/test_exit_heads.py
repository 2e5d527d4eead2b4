"""Heads of layers that a training makes: the lens reads what the training evaluated, in language models and classifiers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import CE, SHORT, bert, vit, with_words

OWN_HEADS = replace(SHORT, objective="multi-head", steps=4, warmup=0)


def phi():
    """A language model whose head has a bias."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    config = PhiConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100)
    return PhiForCausalLM(config).eval()


def images(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator), "labels": torch.arange(count) % 4}


def classified(count: int, seed: int = 0) -> list[dict]:
    """Rows of several lengths, so that some are padded."""
    rows = [random_tokens(1, 5 + i % 4, seed=seed + i)[0].clamp(min=3).tolist() for i in range(count)]
    return [{"input_ids": row, "label": i % 3} for i, row in enumerate(rows)]


@pytest.mark.light("llama-final", "vit-final")
@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize(
    ("make", "data", "eval_data", "labels"),
    [
        (tiny_llama, random_tokens(10, 8), random_tokens(5, 8, seed=7), "next_token"),
        (tiny_gpt2, random_tokens(10, 8), random_tokens(5, 8, seed=7), "next_token"),
        (phi, random_tokens(10, 8), random_tokens(5, 8, seed=7), "next_token"),
        (bert, classified(12), classified(9, 50), "data"),
        (vit, images(12), images(9, 1), "data"),
    ],
    ids=["llama", "gpt2", "phi", "bert", "vit"],
)
def test_the_lens_reads_what_the_training_evaluated(make, data, eval_data, labels, norm):
    model = make().double() if make is not vit else make()
    result = lsim.finetune_aligned(model, lsim.Data(data, batch_size=4), replace(OWN_HEADS, norm=norm), eval_data=eval_data)
    heads = result.heads

    assert len(heads) == 2
    assert heads.norm == norm

    lens = lsim.analyze(model, eval_data, lsim.LogitLens(norm=norm, labels=labels, heads=heads))["logit_lens"]
    torch.testing.assert_close(lens.values, result.values[-1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lens.accuracy, result.accuracy[-1], rtol=1e-12, atol=0)

    shared = lsim.analyze(model, eval_data, lsim.LogitLens(norm=norm, labels=labels))["logit_lens"]
    assert float((shared.values - lens.values)[:-1].abs().min()) > 1e-5
    assert (heads.bias is not None) == (make in (phi, bert, vit))


def test_bfloat16():
    model = tiny_llama(dtype=torch.bfloat16)
    held_out = random_tokens(6, 9, seed=7)

    result = lsim.finetune_aligned(model, lsim.Data(random_tokens(10, 8), batch_size=4), OWN_HEADS, eval_data=held_out)

    assert result.heads.weight.dtype == torch.bfloat16

    lens = lsim.analyze(model, held_out, lsim.LogitLens(heads=result.heads))["logit_lens"]
    torch.testing.assert_close(lens.values, result.values[-1], rtol=1e-2, atol=1e-2)


def test_each_head_has_a_bias_of_its_own():
    """Weights and biases follow the gradient of the layer's own cross-entropy."""
    model = phi().double()
    tokens = random_tokens(4, 8)
    begin = phi().double()
    training = replace(OWN_HEADS, steps=1, lr=1e-3, weight_decay=0.0, clip=1e9)

    heads = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=4), training, eval_data=tokens).heads
    hidden = begin(tokens, output_hidden_states=True).hidden_states

    for layer in (1, 2):
        weight, bias = (p.detach().clone().requires_grad_() for p in (begin.lm_head.weight, begin.lm_head.bias))
        x = begin.model.final_layernorm(hidden[layer]).detach()
        CE((x @ weight.T + bias)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        # The first step of AdamW is the sign of the gradient, where this is well above epsilon.
        for trained, start in ((heads.weight, weight), (heads.bias, bias)):
            clear = start.grad.abs() > 1e-4
            assert bool(clear.any())
            assert torch.allclose((trained[layer - 1] - start)[clear], -1e-3 * start.grad.sign()[clear], rtol=1e-2)


def test_the_pooler_is_shared_and_trained():
    model = bert()
    before = model.bert.pooler.dense.weight.detach().clone()

    result = lsim.finetune_aligned(model, lsim.Data(classified(12), batch_size=4), OWN_HEADS, eval_data=classified(6, 50))

    assert not torch.equal(before, model.bert.pooler.dense.weight)
    assert result.heads.weight.shape == (2, 3, 32)
    assert result.heads.bias.shape == (2, 3)


def test_heads_belong_to_the_trained_weights(tmp_path):
    tokens = random_tokens(10, 8)
    model = with_words(tiny_llama())
    training = replace(OWN_HEADS, save_to=tmp_path / "m")

    result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=4), training)
    heads = ExitHeads.load(tmp_path / "m" / "heads.safetensors")

    assert (heads.digest, heads.weights_hash) == (result.heads.digest, result.heads.weights_hash)

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    lens = lsim.LogitLens(heads=heads)
    assert torch.equal(
        lsim.analyze(loaded, tokens, lens)["logit_lens"].values, lsim.analyze(model, tokens, lens)["logit_lens"].values
    )
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*LlamaForCausalLM.*ExitHeads\(heads.weight"):
        lsim.analyze(tiny_llama(), tokens, lens)
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*LlamaForCausalLM"):
        lsim.EarlyExit(tiny_llama(), heads=heads)
    lsim.EarlyExit(loaded, heads=tmp_path / "m" / "heads.safetensors")
    freed = ExitHeads(heads.weight, heads.bias, norm=heads.norm)
    lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=freed))


def test_lora_heads_belong_to_the_merged_weights():
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    tokens = random_tokens(10, 8)
    training = replace(OWN_HEADS, lora=peft.LoraConfig(r=2, target_modules="all-linear"))
    heads = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=4), training).heads
    lsim.analyze(model, tokens, lsim.LogitLens(heads=heads))


def test_a_result_without_heads_says_so(tmp_path):
    tokens = random_tokens(10, 8)
    shared = lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=4), SHORT)
    with_heads = lsim.finetune_aligned(tiny_llama(), lsim.Data(tokens, batch_size=4), OWN_HEADS)

    for result in (shared, lsim.load(with_heads.save(tmp_path / "result.safetensors"))):
        with pytest.raises(lsim.LayersimError, match=r"objective='multi-head'.*ExitHeads\.load"):
            _ = result.heads


def test_a_head_that_does_not_end_in_a_linear_layer_is_refused():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100)
    data = {"input_ids": random_tokens(4, 6), "labels": random_tokens(4, 6, seed=1)}

    with pytest.raises(lsim.LayersimError, match=r"`objective`.*multi-head"):
        lsim.finetune_aligned(BertForMaskedLM(config).eval(), data, OWN_HEADS, labels="data")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_multi_exit_model_beside_an_aligned_one():
    tokens = random_tokens(12, 9)
    multi = tiny_llama()
    aligned = tiny_llama(seed=1)
    multi.tokenizer = aligned.tokenizer = tiny_tokenizer()

    heads = lsim.finetune_aligned(multi, lsim.Data(tokens, batch_size=4), replace(OWN_HEADS, norm="none")).heads
    report = lsim.evaluate_layers(
        multi,
        aligned,
        tokens,
        names=("own heads", "aligned"),
        heads=(heads, None),
        threshold=0.37,
        continuations=lsim.training.Continuations(["w5 w6 w7"], new_tokens=6),
    )
    result = report["layers"]
    expected = lsim.analyze(
        multi,
        tokens,
        [
            lsim.LogitLens(norm="none", heads=heads),
            lsim.Saturation(norm="none", heads=heads),
            lsim.ExitCurve(thresholds=0.37, norm="none", heads=heads),
        ],
    )
    shared = lsim.analyze(aligned, tokens, lsim.LogitLens())["logit_lens"]

    torch.testing.assert_close(result.accuracy, torch.stack([expected["logit_lens"].accuracy, shared.accuracy]))
    assert float(result.early_share[0]) == float(expected["saturation"].early_share)
    assert float(result.speedup[0]) == expected["exit_curve"].at(0.37).speedup
    assert float(result.effective_depth[0]) == expected["logit_lens"].effective_depth(0.1)
    assert result.provenance.options["heads"] == [str(heads), None]
    assert result.provenance.options["norm"] == ["none", "final"]
    assert report["generation"].values.shape == (2, 3)
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*LlamaForCausalLM"):
        lsim.evaluate_layers(multi, aligned, tokens, heads=(None, heads))
