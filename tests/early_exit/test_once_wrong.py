"""What was once wrong with early exit."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit import frequent_tokens

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama


class TestWhatWasOnceWrong:
    """Each was found by somebody who tried to break it."""

    @pytest.mark.parametrize("rule", ["max-prob", "margin", "patience", "cosine"])
    def test_costs_of_several_rows_are_of_several_rows(self, rule, monkeypatch):
        from tl_layersim.early_exit.exit_decisions import ExitCheck

        row_counts = []
        original = ExitCheck.__call__
        monkeypatch.setattr(
            ExitCheck, "__call__", lambda self, x, *arguments: row_counts.append(len(x)) or original(self, x, *arguments)
        )
        costs = lsim.early_exit.ExitCosts.measure(tiny_llama(), batch=8, rule=rule, repeats=3, context=4)
        assert set(row_counts) == {8}
        assert costs.batch == 8

    @pytest.mark.parametrize(
        ("layers", "repeats", "words"),
        [(3, 2, "`repeats`.* 2"), (1, 15, "`model`.* 1 block"), (3, 62, "`repeats` is 62.* 61 .* 64")],
    )
    def test_what_cannot_be_timed_is_refused(self, layers, repeats, words):
        with pytest.raises(lsim.LayersimError, match=words):
            lsim.early_exit.ExitCosts.measure(tiny_llama(layers), repeats=repeats)

    def test_rows_draw_their_own(self):
        early = lsim.EarlyExit(tiny_llama(), 1.0)
        a, b = random_tokens(2, 5).split(1)
        how = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": ()}
        beside = [early.generate(torch.cat([first_row, b]), seed=5, **how).tokens[1] for first_row in (a, b)]

        assert torch.equal(beside[0], beside[1])

        twice = early.generate(torch.cat([a, a]), seed=5, **how).tokens
        assert not torch.equal(twice[0], twice[1])
        assert not torch.equal(twice[1], early.generate(a, seed=6, **how).tokens[0])

    def test_without_a_seed_torchs_own_counts(self):
        early = lsim.EarlyExit(tiny_llama(), 1.0)
        draws = []
        for _ in range(2):
            torch.manual_seed(3)
            drawn = early.generate(random_tokens(1, 5), max_new_tokens=10, do_sample=True, eos_token_id=()).tokens[0]
            draws.append((drawn.tolist(), float(torch.rand(1))))

        assert draws[0] == draws[1]

    def test_truncate_leaves_lists_that_are_no_lists_of_blocks(self):
        model = tiny_llama()
        model.config.eos_token_id = [2, 5, 7]
        assert lsim.truncate(model, 2).config.eos_token_id == [2, 5, 7]

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_hook_of_the_users_own_is_applied_once(self):
        model = tiny_llama(layers=4)
        tokens = random_tokens(1, 6)
        early = lsim.EarlyExit(model, 0.032, at=(0, 2))
        push = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 0.2
        for block in (0, 2):
            model.model.layers[block].register_forward_hook(lambda _m, _a, out: out + push)

        assert len(model.model.layers[0]._forward_hooks) == 1

        generated = early.generate(tokens, max_new_tokens=30, eos_token_id=())
        assert len(model.model.layers[0]._forward_hooks) == 1
        assert len(set(generated.exits[0].tolist())) > 1

        text = tokens
        unembed = early.unembed
        for token, depth in zip(generated.tokens[0], generated.exits[0], strict=True):
            outputs = {}
            handles = [
                block.register_forward_hook(lambda _m, _a, out, i=i, outputs=outputs: outputs.update({i: out[0, -1]}))
                for i, block in enumerate(model.model.layers, 1)
            ]
            with torch.no_grad():
                model(text, use_cache=False)
                logits = unembed(outputs[int(depth)][None])[0]
            for handle in handles:
                handle.remove()
            best = logits.topk(2).values
            assert int(logits.argmax()) == int(token) or float(best[0] - best[1]) < 1e-4
            text = torch.cat([text, token[None, None]], 1)

    def test_a_head_that_was_exchanged_is_refused(self):
        model = tiny_llama()
        early = lsim.EarlyExit(model, 1.0)
        model.lm_head = torch.nn.Linear(32, 100, bias=False)

        for call in (lambda: early.generate(random_tokens(1, 4)), lambda: early.logits(random_tokens(1, 4))):
            with pytest.raises(lsim.LayersimError, match=r"head.* was replaced"):
                call()

    def test_a_curve_of_other_weights_is_told(self):
        curve = lsim.analyze(tiny_llama(seed=1), random_tokens(), lsim.ExitCurve())["exit_curve"]
        costs = lsim.early_exit.ExitCosts(block=1, check=0.1, head=0.1, blocks=3)
        with pytest.warns(lsim.LayersimWarning, match="`curve`.* other weights"):
            early = lsim.EarlyExit(tiny_llama(), 0.5, curve=curve, costs=costs)
        assert "max-prob > 0.5" in repr(early)

    def test_classes_are_not_capped_as_words_are(self):
        from transformers import Gemma2Config, Gemma2ForSequenceClassification

        torch.manual_seed(0)
        config = Gemma2Config(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, head_dim=8,
            vocab_size=100, max_position_embeddings=64, num_labels=3, pad_token_id=0, final_logit_softcapping=3.0,
        )  # fmt: skip
        model = Gemma2ForSequenceClassification(config).eval()
        with torch.no_grad():
            model.score.weight.mul_(30)
        tokens = random_tokens(4, 6)
        logits = lsim.EarlyExit(model, 1.0).logits(tokens).logits
        with torch.no_grad():
            expected = model(tokens).logits
        assert float(expected.abs().max()) > 1.5
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("call", "says"),
        [
            (lambda m: lsim.EarlyExit(m, float("nan"), rule="patience"), "`threshold`.*nan"),
            (lambda m: lsim.EarlyExit(m, 0.5, shortlist={5, 6}), "`shortlist`.*{5, 6}"),
            (lambda m: lsim.EarlyExit(m, 0.5, shortlist=[True, False]), "`shortlist`.*True"),
            (lambda m: frequent_tokens(m, random_tokens(), -1), "`size`.*-1"),
            (lambda m: lsim.truncate(m, True), "`n_layers`.*True"),
            (lambda m: lsim.EarlyExit(m, 1.0).logits(random_tokens(1, 70)), "`tokens`.*70"),
            (lambda m: lsim.EarlyExit(m, 1.0).generate(random_tokens(1, 60), max_new_tokens=6), "`prompt`.*60"),
        ],
    )
    def test_refusals_name_the_argument(self, call, says):
        with pytest.raises(lsim.LayersimError, match=says):
            call(tiny_gpt2())

    def test_the_last_token_is_not_read(self):
        model = tiny_gpt2()
        tokens = random_tokens(1, 60)
        generated = lsim.EarlyExit(model, 1.0).generate(tokens, max_new_tokens=5, eos_token_id=())
        expected = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert generated.tokens[0].tolist() == expected[0, 60:].tolist()
