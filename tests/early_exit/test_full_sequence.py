"""Logits of whole sequences with exits."""

from __future__ import annotations

import itertools

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit.early_exit import EarlyExit

from ..models.tiny_models import random_tokens
from .helpers import RULES, classifier, deep, layers_of, naive_exit, ragged


class TestLogits:
    @pytest.mark.light("max-prob", "cosine")
    @pytest.mark.parametrize("rule", RULES)
    def test_language_models(self, rule):
        model = deep()
        at = (0, 2, 3)
        settings = RULES[rule]
        tokens, mask = ragged([9, 4, 7], "right")
        output = EarlyExit(model, rule=rule, at=at, **settings).logits(tokens, mask)
        stream_of, lens = layers_of(model)
        states = stream_of(input_ids=tokens, attention_mask=mask)
        depths = set()
        for i, j in itertools.product(range(3), range(9)):
            if not mask[i, j]:
                assert output.exits[i, j] == 0
                assert not output.logits[i, j].any()
                continue
            logits, layer = naive_exit([h[i, j] for h in states], lens, at, rule, settings["threshold"])
            assert int(output.exits[i, j]) == layer
            assert torch.allclose(output.logits[i, j], logits, atol=1e-4, rtol=1e-4)
            depths.add(layer)

        assert len(depths) >= 3

    def test_positions_behind_the_last_unsure_one_do_not_run(self):
        model = deep()
        early = EarlyExit(model, 0.4, at=(2,))
        tokens = random_tokens(1, 20)
        output = early.logits(tokens)
        last = int((output.exits[0] == 6).nonzero().max()) + 1

        assert output.block_tokens == 3 * 20 + 3 * last

    @pytest.mark.light("bert", "masked")
    @pytest.mark.parametrize("name", ["bert", "vit", "llama", "masked"])
    def test_classifiers(self, name):
        model, inputs, mask = classifier(name)
        kind = "pixel_values" if name == "vit" else "input_ids"
        extra = {} if mask is None else {"attention_mask": mask}
        base = model.base_model
        blocks = base.layers if hasattr(base, "layers") else base.encoder.layer
        states = []
        handles = [b.register_forward_hook(lambda _m, _a, o: states.append(o if torch.is_tensor(o) else o[0])) for b in blocks]
        with torch.no_grad():
            logits_of_model = model(**{kind: inputs}, **extra).logits
        for handle in handles:
            handle.remove()

        def lens(h):
            if name == "bert":
                return model.classifier(base.pooler(h))
            if name == "masked":
                return model.cls(h)
            if name == "vit":
                return model.classifier(base.layernorm(h)[:, 0])
            last = torch.full((len(h),), h.shape[1] - 1) if mask is None else mask.sum(1) - 1
            return model.score(base.norm(h))[torch.arange(len(h)), last]

        with torch.no_grad():
            every = torch.stack([lens(h) for h in states])
        tops = every.double().softmax(-1).amax(-1)
        asked = torch.ones_like(tops[0], dtype=torch.bool) if name != "masked" or mask is None else mask.bool()
        # Between two that occur.
        threshold = float(tops[0][asked].quantile(0.503))
        output = EarlyExit(model, threshold, at=(0, 1)).logits(inputs, mask)
        sure = tops > threshold
        sure[-1] = True
        layer = sure.int().argmax(0)
        assert torch.equal(output.exits[asked], layer[asked] + 1)
        assert len(set(output.exits[asked].tolist())) >= 2
        logits_at_exit = every.gather(0, layer[None, ..., None].expand(1, *every.shape[1:]))[0]
        assert torch.allclose(output.logits[asked], logits_at_exit[asked], atol=1e-5)
        whole = EarlyExit(model, 1.0, at=(0,)).logits(inputs, mask)
        assert torch.allclose(whole.logits[asked], logits_of_model[asked], atol=1e-5)
        if name != "masked":
            assert output.share_of_block_tokens == pytest.approx(float((layer + 1).float().mean()) / 3)
        with pytest.raises(lsim.LayersimError, match="cannot generate"):
            EarlyExit(model, 0.5).generate(random_tokens(1, 4))
