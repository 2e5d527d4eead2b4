"""What runs, and what does not, when rows exit."""

from __future__ import annotations

import copy

import pytest

from tl_layersim.early_exit.early_exit import EarlyExit

from ..models.tiny_models import random_tokens, tiny_tokenizer
from .helpers import deep, naive_generate, ragged


def untouched(model):
    modules = model.named_modules()
    return [(name, len(m._forward_hooks), len(m._forward_pre_hooks), m.training, sorted(vars(m))) for name, m in modules]


class TestWhatRuns:
    def test_blocks_above_an_exit_do_not_run(self):
        model = deep()
        calls = [0] * 6
        originals = [block.mlp.forward for block in model.model.layers]

        def counted(number, forward):
            def call(x):
                calls[number] += 1
                return forward(x)

            return call

        for number, block in enumerate(model.model.layers):
            block.mlp.forward = counted(number, originals[number])
        always = EarlyExit(model, 0.0, at=(1,))
        calls[:] = [0] * 6
        generated = always.generate(random_tokens(2, 5), max_new_tokens=10, eos_token_id=())
        assert calls == [10, 10, 0, 0, 0, 0]
        assert generated.block_calls == sum(calls)
        assert generated.share_of_blocks == pytest.approx(2 / 6)
        assert generated.block_tokens == 2 * 2 * (5 + 9)
        assert generated.full_block_tokens == 6 * 2 * (5 + 9)
        assert generated.mean_exit == 2
        some = EarlyExit(model, 0.4, at=(2,))
        calls[:] = [0] * 6
        generated = some.generate(random_tokens(1, 5), max_new_tokens=20, eos_token_id=())
        deep_steps = int((generated.exits[0] == 6).sum())
        assert 0 < deep_steps < 20
        assert calls == [20] * 3 + [deep_steps] * 3
        assert generated.checks == 20
        calls[:] = [0] * 6
        of_text = always.logits(random_tokens(3, 5))
        assert calls == [1, 1, 0, 0, 0, 0]
        assert of_text.share_of_block_tokens == pytest.approx(1 / 3)

    # The second model runs its upper blocks only after a row has ended.
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize(("seed", "row", "ended"), [(0, 1, 4), (2, 2, 0)])
    def test_rows_end_on_their_own(self, seed, row, ended):
        model = deep(seed)
        tokens, mask = ragged([5, 8, 6, 7])
        free = EarlyExit(model, 0.4, at=(2,)).generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=())
        eos = int(free.tokens[row][ended])

        generated = EarlyExit(model, 0.4, at=(2,)).generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=eos)

        for i, n in enumerate((5, 8, 6, 7)):
            said, exits = naive_generate(model, tokens[i, 8 - n :], 16, (2,), "max-prob", 0.4, eos=eos)
            assert (generated.tokens[i].tolist(), generated.exits[i].tolist()) == (said, exits)
        assert len(generated.tokens[row]) <= ended + 1
        assert len({len(row) for row in generated.tokens}) > 1

    def test_the_models_own_end(self):
        model = deep()
        model.tokenizer = tiny_tokenizer()
        early = EarlyExit(model, 0.4, at=(2,))
        free = early.generate("w5 w6 w7", max_new_tokens=12, eos_token_id=())
        words = free.texts[0].split()
        model.generation_config.eos_token_id = [int(free.tokens[0][2])]
        first = free.tokens[0].tolist().index(int(free.tokens[0][2]))

        assert len(early.generate("w5 w6 w7", max_new_tokens=12).tokens[0]) == first + 1

        several = early.generate(["w5 w6 w7", "w9"], max_new_tokens=4, eos_token_id=())
        assert several.texts[0].split() == words[:4]

    def test_nothing_is_left_behind(self, monkeypatch):
        model = deep().train()
        before = untouched(model)
        config = copy.deepcopy(model.config.to_dict())
        grads = [p.requires_grad for p in model.parameters()]
        early = EarlyExit(model, 0.4, at=(1, 3))
        early.generate(random_tokens(2, 5), max_new_tokens=6)
        early.logits(random_tokens(2, 5))
        assert untouched(model) == before
        calls = []

        def breaks(*args, **kwargs):
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("broken")
            return forward(*args, **kwargs)

        forward = model.model.layers[5].mlp.forward
        monkeypatch.setattr(type(model.model.layers[5].mlp), "forward", lambda self, x: breaks(x))
        with pytest.raises(RuntimeError, match="broken"):
            early.generate(random_tokens(2, 5), max_new_tokens=30, eos_token_id=())
        monkeypatch.undo()
        assert untouched(model) == before
        assert model.config.to_dict() == config
        assert [p.requires_grad for p in model.parameters()] == grads
