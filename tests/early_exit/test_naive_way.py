"""Early exit against the naive way: all of the text through the model each time."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.early_exit.early_exit import EarlyExit

from ..models.tiny_models import VOCABULARY, family, random_tokens
from .helpers import RULES, deep, naive_generate, ragged


class TestAgainstTheNaiveWay:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("rule", RULES)
    def test_tokens_and_exits(self, rule):
        model = deep()
        at = (0, 2, 3)
        settings = RULES[rule]
        early = EarlyExit(model, rule=rule, at=at, **settings)
        lengths = [7, 3, 9, 5]
        tokens, mask = ragged(lengths)
        expected = [
            naive_generate(model, tokens[i, 9 - n :], 20, at, rule, settings["threshold"]) for i, n in enumerate(lengths)
        ]

        assert len({layer for _, exits in expected for layer in exits}) >= 3

        together = early.generate(tokens, attention_mask=mask, max_new_tokens=20, eos_token_id=())
        for i, (said, exits) in enumerate(expected):
            alone = early.generate(tokens[i, 9 - lengths[i] :], max_new_tokens=20, eos_token_id=())
            for generated, row in ((together, i), (alone, 0)):
                assert generated.tokens[row].tolist() == said
                assert generated.exits[row].tolist() == exits
        # Rows left on their own: at some step at different depths.
        assert any(len(set(step)) > 1 for step in zip(*(exits for _, exits in expected), strict=True))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_every_layer(self):
        model = deep(1)
        row = random_tokens(1, 5)[0]
        early = EarlyExit(model, 0.4, at="all")
        assert early.at == tuple(range(5))

        generated = early.generate(row, max_new_tokens=25, eos_token_id=())
        said, exits = naive_generate(model, row, 25, early.at, "max-prob", 0.4)
        assert (generated.tokens[0].tolist(), generated.exits[0].tolist()) == (said, exits)
        assert len(set(exits)) >= 3

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_right_padding_is_the_same(self):
        early = EarlyExit(deep(), 0.4, at=(1, 3))
        left, right = (ragged([4, 9, 6], side) for side in ("left", "right"))
        a, b = (
            early.generate(tokens, attention_mask=mask, max_new_tokens=9, eos_token_id=()) for tokens, mask in (left, right)
        )

        assert [x.tolist() for x in a.tokens + a.exits] == [x.tolist() for x in b.tokens + b.exits]

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("name", ["gemma3", "qwen2", "bloom"])
    def test_windows_and_positions_of_tokens_that_waited(self, name):
        # A window is 4 wide, and tokens wait for longer than that.
        model = family(name)
        tokens, mask = ragged([6, 9])
        first = EarlyExit(model, 0.0, at=(1,)).logits(tokens, mask).logits[mask.bool()].softmax(-1).amax(-1)
        early = EarlyExit(model, float(first.quantile(0.503)), at=(1,))
        generated = early.generate(tokens, attention_mask=mask, max_new_tokens=40, eos_token_id=())
        for i, n in enumerate((6, 9)):
            text = torch.cat([tokens[i, 9 - n :], generated.tokens[i]])
            for step in (generated.exits[i] == 3).nonzero()[:, 0].tolist():
                with torch.no_grad():
                    logits = model(text[None, : n + step], use_cache=False).logits[0, -1]
                assert int(logits.argmax()) == int(generated.tokens[i][step])
        waits = "".join(str(layer) for layer in torch.cat(generated.exits).tolist())

        assert "22223" in waits, waits

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_shortlist(self):
        model = deep()
        row = random_tokens(1, 5)[0]
        short = torch.arange(0, VOCABULARY, 3)
        early = EarlyExit(model, 0.6, at=(0, 2, 3), shortlist=short.tolist())
        generated = early.generate(row, max_new_tokens=25, eos_token_id=())
        said, exits = naive_generate(model, row, 25, (0, 2, 3), "max-prob", 0.6, short)

        assert (generated.tokens[0].tolist(), generated.exits[0].tolist()) == (said, exits)
        assert len(set(exits)) >= 2
        assert any(token not in short for token in said)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_exits_are_those_of_the_exit_curve(self, demo):
        texts = lsim.demo_text()[:2]
        curve = lsim.analyze(demo, lsim.Data(texts, seq_len=64), [lsim.ExitCurve(thresholds=(0.6,))])["exit_curve"]
        early = EarlyExit(demo, 0.6, at="all")
        counts = torch.zeros(8)
        for batch in Batches(lsim.Data(texts, batch_size=4, seq_len=64), early.split_model.model):
            exits = early.logits(batch.tokens, batch.attention).exits
            counts += torch.bincount(exits[exits > 0] - 1, minlength=8)

        assert counts.tolist() == curve.exits[0].tolist()
