"""Early exit against the model's own generation, and sampling."""

from __future__ import annotations

import pytest
import torch

from tl_layersim.early_exit.early_exit import EarlyExit

from ..models.tiny_models import VOCABULARY, family, random_tokens, tiny_gpt2
from ..real_models.files import optional_real
from .helpers import deep, layers_of, ragged

CAUSAL = ("llama", "qwen2", "gemma2", "gemma3", "neox", "falcon", "opt", "bloom", "mpt", "gptj", "phi")


class TestWholeModel:
    """At threshold 1, token by token."""

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("name", CAUSAL)
    def test_equals_the_models_own_generation(self, name):
        model = family(name)
        early = EarlyExit(model, 1.0, at=(0, 1))
        for lengths in ([9], [9, 4, 7]):
            tokens, mask = ragged(lengths)
            expected = model.generate(
                tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            generated = early.generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=())
            assert torch.stack(generated.tokens).tolist() == expected[:, 9:].tolist()
            assert set(torch.cat(generated.exits).tolist()) == {3}
            assert generated.checks == 0

    def test_gpt2(self):
        model = tiny_gpt2()
        tokens, mask = ragged([3, 8])
        expected = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )

        generated = EarlyExit(model, 1).generate(tokens, attention_mask=mask, max_new_tokens=12, eos_token_id=())

        assert torch.stack(generated.tokens).tolist() == expected[:, 8:].tolist()

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype):
        model = deep().to(dtype)
        tokens = random_tokens(1, 6)
        expected = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        generated = EarlyExit(model, 1.0, at=(1,)).generate(tokens, max_new_tokens=8, eos_token_id=())

        assert generated.tokens[0].tolist() == expected[0, 6:].tolist()

        early = EarlyExit(model, 0.4, at=(0, 1, 3)).generate(tokens, max_new_tokens=20, eos_token_id=())
        assert {1, 6} <= set(early.exits[0].tolist())

        text = torch.cat([tokens[0], early.tokens[0]])[None]
        with torch.no_grad():
            logits = model(text[:, :-1]).logits[0, 5:].float()
        gap = logits.amax(-1) - logits.gather(1, text[0, 6:, None])[:, 0]

        # What the last block says is the model's own first choice, but for ties of half precision.
        assert float(gap[early.exits[0] == 6].max()) < (0.2 if dtype != torch.float64 else 1e-9)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_real_model(self):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(optional_real("models", "stories15M"), dtype=torch.float32).eval()
        tokens, mask = ragged([6, 11])
        expected = model.generate(
            tokens, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        # Checks are made, and hardly anything passes them.
        early = EarlyExit(model, 0.9999999, at=(2,))
        generated = early.generate(tokens, attention_mask=mask, max_new_tokens=24, eos_token_id=())
        assert torch.stack(generated.tokens).tolist() == expected[:, 11:].tolist()
        assert generated.checks


class TestSampling:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_seeds(self):
        early = EarlyExit(deep(), 0.4, at=(2,))
        tokens = random_tokens(3, 5)
        options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": ()}
        a, b, c = (early.generate(tokens, seed=seed, **options) for seed in (7, 7, 8))

        assert [x.tolist() for x in a.tokens] == [x.tolist() for x in b.tokens]
        assert [x.tolist() for x in a.tokens] != [x.tolist() for x in c.tokens]
        # A row draws the same alone.
        assert early.generate(tokens[:1], seed=7, **options).tokens[0].tolist() == a.tokens[0].tolist()

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_distribution(self):
        model = deep()
        row = random_tokens(1, 5)[0]
        stream_of, lens = layers_of(model)
        early = EarlyExit(model, 0.0, at=(2,))
        logits = lens([h[0, -1] for h in stream_of(input_ids=row[None])][3]).double()
        p = (logits / 2.0).softmax(-1)
        # The smallest set with probability 0.7.
        order = p.argsort(descending=True)
        inside = order[: int((p[order].cumsum(0) < 0.7).sum()) + 1]
        probabilities = torch.zeros(VOCABULARY, dtype=torch.float64)
        probabilities[inside] = p[inside] / p[inside].sum()
        count = 400
        generated = early.generate(
            row.expand(count, -1), max_new_tokens=1, do_sample=True, temperature=2.0, top_p=0.7, seed=0, eos_token_id=()
        )
        share = torch.bincount(torch.cat(generated.tokens), minlength=VOCABULARY).double() / count

        assert float(share[probabilities == 0].sum()) == 0
        assert ((share - probabilities).abs() <= 5 * (probabilities * (1 - probabilities) / count).sqrt() + 1e-9).all()
