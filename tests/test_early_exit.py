"""Early exit against the model's own generation, and against the naive way: all of the text through the model each time."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit.costs import ExitCosts, plan_for, shares_of, spread
from tl_layersim.early_exit.run import EarlyExit
from tl_layersim.early_exit.shortlist import frequent_tokens
from tl_layersim.early_exit.truncate import truncate

from .conftest import VOCABULARY, optional_real, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .test_stitching import family

CAUSAL = ("llama", "qwen2", "gemma2", "gemma3", "neox", "falcon", "opt", "bloom", "mpt", "gptj", "phi")
HEAD = 6.0
# Thresholds at which tokens of the models below leave at several depths; a test asserts that they do.
RULES = {
    "max-prob": {"threshold": 0.5},
    "margin": {"threshold": 0.3},
    "patience": {"threshold": 2},
    "cosine": {"threshold": 0.8},
}


def deep(seed: int = 0):
    """A Llama of six blocks whose layers are sure of some tokens and not of others."""
    model = tiny_llama(6, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD)
    return model


def layers_of(model):
    """Per layer what enters and what leaves each block, by hooks of the test's own, and the lens."""
    llama = hasattr(model, "model")
    blocks = model.model.layers if llama else model.transformer.h
    norm = model.model.norm if llama else model.transformer.ln_f

    def read(**inputs):
        seen = []
        handles = [b.register_forward_pre_hook(lambda _m, a: seen.append(a[0])) for b in blocks]
        handles += [blocks[-1].register_forward_hook(lambda _m, _a, o: seen.append(o))]
        with torch.no_grad():
            model(**inputs, use_cache=False)
        for handle in handles:
            handle.remove()
        return seen

    return read, lambda h: model.lm_head(norm(h)).detach()


def naive_exit(states, lens, at, rule, threshold, shortlist=None):
    """(logits, exit) of one position, from its residuals at all layers."""
    streak, last = 0, None
    for layer in at:
        logits = lens(states[layer])
        asked = logits if shortlist is None else logits[shortlist]
        p = asked.double().softmax(-1).sort(descending=True).values
        if rule == "patience":
            best = int(asked.argmax())
            streak, last = (streak + 1 if best == last else 1), best
            sure = streak >= threshold
        elif rule == "max-prob":
            sure = p[0] > threshold
        elif rule == "margin":
            sure = p[0] - p[1] > threshold
        else:
            a, b = states[layer].double(), states[layer - 1].double()
            sure = a @ b / (a.norm() * b.norm()) > threshold
        if sure:
            return logits, layer
    return lens(states[-1]), len(states) - 1


def naive_generate(model, row, new, at, rule, threshold, shortlist=None, eos=None):
    read, lens = layers_of(model)
    row, tokens, exits = row.tolist(), [], []
    for _ in range(new):
        states = [h[0, -1] for h in read(input_ids=torch.tensor([row]))]
        logits, layer = naive_exit(states, lens, at, rule, threshold, shortlist)
        tokens.append(int(logits.argmax()))
        exits.append(layer)
        row.append(tokens[-1])
        if tokens[-1] == eos:
            break
    return tokens, exits


def ragged(lengths, side="left", seed=0):
    """Rows of these lengths in one tensor, with a mask."""
    width = max(lengths)
    tokens, mask = torch.zeros(len(lengths), width, dtype=torch.int64), torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        tokens[i, place] = random_tokens(1, length, seed + i)[0]
        mask[i, place] = 1
    return tokens, mask


def untouched(model):
    modules = model.named_modules()
    return [(name, len(m._forward_hooks), len(m._forward_pre_hooks), m.training, sorted(vars(m))) for name, m in modules]


class TestWholeModel:
    """At threshold 1, token by token."""

    @pytest.mark.parametrize("name", CAUSAL)
    def test_equals_the_models_own_generation(self, name):
        model = family(name)
        early = EarlyExit(model, 1.0, at=(1, 2))
        for lengths in ([9], [9, 4, 7]):
            tokens, mask = ragged(lengths)
            own = model.generate(
                tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            found = early.generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=())
            assert torch.stack(found.tokens).tolist() == own[:, 9:].tolist()
            assert set(torch.cat(found.exits).tolist()) == {3}
            assert found.checks == 0

    def test_gpt2(self):
        model = tiny_gpt2()
        tokens, mask = ragged([3, 8])
        own = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        found = EarlyExit(model, 1).generate(tokens, attention_mask=mask, max_new_tokens=12, eos_token_id=())
        assert torch.stack(found.tokens).tolist() == own[:, 8:].tolist()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype):
        model, tokens = deep().to(dtype), random_tokens(1, 6)
        own = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        found = EarlyExit(model, 1.0, at=(2,)).generate(tokens, max_new_tokens=8, eos_token_id=())
        assert found.tokens[0].tolist() == own[0, 6:].tolist()
        early = EarlyExit(model, 0.4, at=(1, 2, 4)).generate(tokens, max_new_tokens=20, eos_token_id=())
        assert {1, 6} <= set(early.exits[0].tolist())
        text = torch.cat([tokens[0], early.tokens[0]])[None]
        with torch.no_grad():
            logits = model(text[:, :-1]).logits[0, 5:].float()
        gap = logits.amax(-1) - logits.gather(1, text[0, 6:, None])[:, 0]
        # What the last block says is the model's own first choice, but for ties of half precision.
        assert float(gap[early.exits[0] == 6].max()) < (0.2 if dtype != torch.float64 else 1e-9)

    def test_real_model(self):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(optional_real("models", "stories15M"), dtype=torch.float32).eval()
        tokens, mask = ragged([6, 11])
        own = model.generate(tokens, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        # Checks are made, and hardly anything passes them.
        early = EarlyExit(model, 0.9999999, at=(3,))
        found = early.generate(tokens, attention_mask=mask, max_new_tokens=24, eos_token_id=())
        assert torch.stack(found.tokens).tolist() == own[:, 11:].tolist()
        assert found.checks


class TestAgainstTheNaiveWay:
    @pytest.mark.parametrize("rule", RULES)
    def test_tokens_and_exits(self, rule):
        model = deep()
        at, settings = (1, 3, 4), RULES[rule]
        early = EarlyExit(model, rule=rule, at=at, **settings)
        lengths = [7, 3, 9, 5]
        tokens, mask = ragged(lengths)
        wanted = [naive_generate(model, tokens[i, 9 - n :], 20, at, rule, settings["threshold"]) for i, n in enumerate(lengths)]
        assert len({layer for _, exits in wanted for layer in exits}) >= 3
        together = early.generate(tokens, attention_mask=mask, max_new_tokens=20, eos_token_id=())
        for i, (said, exits) in enumerate(wanted):
            alone = early.generate(tokens[i, 9 - lengths[i] :], max_new_tokens=20, eos_token_id=())
            for found, row in ((together, i), (alone, 0)):
                assert found.tokens[row].tolist() == said
                assert found.exits[row].tolist() == exits
        # Rows left on their own: at some step at different depths.
        assert any(len(set(step)) > 1 for step in zip(*(exits for _, exits in wanted), strict=True))

    def test_every_layer_and_min_layer(self):
        model = deep(1)
        row = random_tokens(1, 5)[0]
        for min_layer in (1, 3):
            early = EarlyExit(model, 0.4, at="all", min_layer=min_layer)
            assert early.at == tuple(range(min_layer, 6))
            found = early.generate(row, max_new_tokens=25, eos_token_id=())
            said, exits = naive_generate(model, row, 25, early.at, "max-prob", 0.4)
            assert (found.tokens[0].tolist(), found.exits[0].tolist()) == (said, exits)
            assert len(set(exits)) >= 3

    def test_right_padding_is_the_same(self):
        early = EarlyExit(deep(), 0.4, at=(2, 4))
        left, right = (ragged([4, 9, 6], side) for side in ("left", "right"))
        a, b = (
            early.generate(tokens, attention_mask=mask, max_new_tokens=9, eos_token_id=()) for tokens, mask in (left, right)
        )
        assert [x.tolist() for x in a.tokens + a.exits] == [x.tolist() for x in b.tokens + b.exits]

    @pytest.mark.parametrize("name", ["gemma3", "qwen2", "bloom"])
    def test_windows_and_positions_of_tokens_that_waited(self, name):
        # A window is 4 wide, and tokens wait for longer than that.
        model = family(name)
        tokens, mask = ragged([6, 9])
        first = EarlyExit(model, 0.0, at=(2,)).logits(tokens, mask).logits[mask.bool()].softmax(-1).amax(-1)
        early = EarlyExit(model, float(first.quantile(0.503)), at=(2,))
        found = early.generate(tokens, attention_mask=mask, max_new_tokens=40, eos_token_id=())
        for i, n in enumerate((6, 9)):
            text = torch.cat([tokens[i, 9 - n :], found.tokens[i]])
            for step in (found.exits[i] == 3).nonzero()[:, 0].tolist():
                with torch.no_grad():
                    logits = model(text[None, : n + step], use_cache=False).logits[0, -1]
                assert int(logits.argmax()) == int(found.tokens[i][step])
        waits = "".join(str(layer) for layer in torch.cat(found.exits).tolist())
        assert "22223" in waits, waits

    def test_shortlist(self):
        model, row = deep(), random_tokens(1, 5)[0]
        short = torch.arange(0, VOCABULARY, 3)
        early = EarlyExit(model, 0.6, at=(1, 3, 4), shortlist=short.tolist())
        found = early.generate(row, max_new_tokens=25, eos_token_id=())
        said, exits = naive_generate(model, row, 25, (1, 3, 4), "max-prob", 0.6, short)
        assert (found.tokens[0].tolist(), found.exits[0].tolist()) == (said, exits)
        assert len(set(exits)) >= 2
        assert any(token not in short for token in said)

    def test_exits_are_those_of_the_exit_curve(self, demo):
        texts = lsim.demo_text()[:2]
        curve = lsim.analyze(demo, texts, [lsim.ExitCurve(thresholds=(0.6,))], seq_len=64)["exit_curve"]
        early = EarlyExit(demo, 0.6, at="all")
        counts = torch.zeros(8)
        for batch in lsim.data.Batches(texts, early.half.model, 4, 64, False, None, 0, True, None):
            exits = early.logits(batch.tokens, batch.attention).exits
            counts += torch.bincount(exits[exits > 0] - 1, minlength=8)
        assert counts.tolist() == curve.exits[0].tolist()


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
        always = EarlyExit(model, 0.0, at=(2,))
        calls[:] = [0] * 6
        found = always.generate(random_tokens(2, 5), max_new_tokens=10, eos_token_id=())
        assert calls == [10, 10, 0, 0, 0, 0]
        assert found.block_calls == sum(calls)
        assert found.share_of_blocks == pytest.approx(2 / 6)
        assert found.block_tokens == 2 * 2 * (5 + 9)
        assert found.full_block_tokens == 6 * 2 * (5 + 9)
        assert found.mean_exit == 2
        some = EarlyExit(model, 0.4, at=(3,))
        calls[:] = [0] * 6
        found = some.generate(random_tokens(1, 5), max_new_tokens=20, eos_token_id=())
        deep_steps = int((found.exits[0] == 6).sum())
        assert 0 < deep_steps < 20
        assert calls == [20] * 3 + [deep_steps] * 3
        assert found.checks == 20
        calls[:] = [0] * 6
        read = always.logits(random_tokens(3, 5))
        assert calls == [1, 1, 0, 0, 0, 0]
        assert read.share_of_block_tokens == pytest.approx(1 / 3)

    def test_rows_end_on_their_own(self):
        model = deep()
        tokens, mask = ragged([5, 8, 6, 7])
        free = EarlyExit(model, 0.4, at=(3,)).generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=())
        eos = int(free.tokens[1][4])
        found = EarlyExit(model, 0.4, at=(3,)).generate(tokens, attention_mask=mask, max_new_tokens=16, eos_token_id=eos)
        for i, n in enumerate((5, 8, 6, 7)):
            said, exits = naive_generate(model, tokens[i, 8 - n :], 16, (3,), "max-prob", 0.4, eos=eos)
            assert (found.tokens[i].tolist(), found.exits[i].tolist()) == (said, exits)
        assert len(found.tokens[1]) <= 5
        assert len({len(row) for row in found.tokens}) > 1

    def test_the_models_own_end_and_texts_that_stop(self):
        model = deep()
        model.tokenizer = tiny_tokenizer()
        early = EarlyExit(model, 0.4, at=(3,))
        free = early.generate("w5 w6 w7", max_new_tokens=12, eos_token_id=())
        words = free.texts[0].split()
        found = early.generate("w5 w6 w7", max_new_tokens=12, eos_token_id=(), stop=words[3])
        assert len(found.tokens[0]) == words.index(words[3]) + 1
        model.generation_config.eos_token_id = [int(free.tokens[0][2])]
        first = free.tokens[0].tolist().index(int(free.tokens[0][2]))
        assert len(early.generate("w5 w6 w7", max_new_tokens=12).tokens[0]) == first + 1
        several = early.generate(["w5 w6 w7", "w9"], max_new_tokens=4, eos_token_id=())
        assert several.texts[0].split() == words[:4]

    def test_nothing_is_left_behind(self, monkeypatch):
        model = deep().train()
        before, config = untouched(model), copy.deepcopy(model.config.to_dict())
        grads = [p.requires_grad for p in model.parameters()]
        early = EarlyExit(model, 0.4, at=(2, 4))
        early.generate(random_tokens(2, 5), max_new_tokens=6)
        early.logits(random_tokens(2, 5))
        assert untouched(model) == before
        calls = []

        def breaks(*args, **kwargs):
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("broken")
            return own(*args, **kwargs)

        own = model.model.layers[5].mlp.forward
        monkeypatch.setattr(type(model.model.layers[5].mlp), "forward", lambda self, x: breaks(x))
        with pytest.raises(RuntimeError, match="broken"):
            early.generate(random_tokens(2, 5), max_new_tokens=30, eos_token_id=())
        monkeypatch.undo()
        assert untouched(model) == before
        assert model.config.to_dict() == config
        assert [p.requires_grad for p in model.parameters()] == grads


class TestSampling:
    def test_seeds(self):
        early = EarlyExit(deep(), 0.4, at=(3,))
        tokens = random_tokens(3, 5)
        options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": ()}
        a, b, c = (early.generate(tokens, seed=seed, **options) for seed in (7, 7, 8))
        assert [x.tolist() for x in a.tokens] == [x.tolist() for x in b.tokens]
        assert [x.tolist() for x in a.tokens] != [x.tolist() for x in c.tokens]
        # A row draws the same alone.
        assert early.generate(tokens[:1], seed=7, **options).tokens[0].tolist() == a.tokens[0].tolist()

    def test_distribution(self):
        model = deep()
        row = random_tokens(1, 5)[0]
        read, lens = layers_of(model)
        early = EarlyExit(model, 0.0, at=(3,))
        logits = lens([h[0, -1] for h in read(input_ids=row[None])][3]).double()
        p = (logits / 2.0).softmax(-1)
        # The smallest set with probability 0.7.
        order = p.argsort(descending=True)
        inside = order[: int((p[order].cumsum(0) < 0.7).sum()) + 1]
        wanted = torch.zeros(VOCABULARY, dtype=torch.float64)
        wanted[inside] = p[inside] / p[inside].sum()
        count = 3000
        found = early.generate(
            row.expand(count, -1), max_new_tokens=1, do_sample=True, temperature=2.0, top_p=0.7, seed=0, eos_token_id=()
        )
        share = torch.bincount(torch.cat(found.tokens), minlength=VOCABULARY).double() / count
        assert float(share[wanted == 0].sum()) == 0
        assert ((share - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


class TestLogits:
    @pytest.mark.parametrize("rule", RULES)
    def test_language_models(self, rule):
        model = deep()
        at, settings = (1, 3, 4), RULES[rule]
        tokens, mask = ragged([9, 4, 7], "right")
        found = EarlyExit(model, rule=rule, at=at, **settings).logits(tokens, mask)
        read, lens = layers_of(model)
        states = read(input_ids=tokens, attention_mask=mask)
        depths = set()
        for i, j in itertools.product(range(3), range(9)):
            if not mask[i, j]:
                assert found.exits[i, j] == 0
                assert not found.logits[i, j].any()
                continue
            logits, layer = naive_exit([h[i, j] for h in states], lens, at, rule, settings["threshold"])
            assert int(found.exits[i, j]) == layer
            assert torch.allclose(found.logits[i, j], logits, atol=1e-4, rtol=1e-4)
            depths.add(layer)
        assert len(depths) >= 3

    def test_threshold_one_is_the_model(self):
        model, tokens = tiny_gpt2(), random_tokens(2, 7)
        with torch.no_grad():
            own = model(tokens).logits
        found = EarlyExit(model, 1).logits(tokens)
        assert torch.allclose(found.logits, own, atol=1e-5)
        assert found.share_of_block_tokens == 1

    def test_positions_behind_the_last_unsure_one_do_not_run(self):
        model = deep()
        early = EarlyExit(model, 0.4, at=(3,))
        tokens = random_tokens(1, 20)
        found = early.logits(tokens)
        last = int((found.exits[0] == 6).nonzero().max()) + 1
        assert found.block_tokens == 3 * 20 + 3 * last

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
            own = model(**{kind: inputs}, **extra).logits
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
        found = EarlyExit(model, threshold, at=(1, 2)).logits(inputs, mask)
        sure = tops > threshold
        sure[-1] = True
        layer = sure.int().argmax(0)
        assert torch.equal(found.exits[asked], layer[asked] + 1)
        assert len(set(found.exits[asked].tolist())) >= 2
        wanted = every.gather(0, layer[None, ..., None].expand(1, *every.shape[1:]))[0]
        assert torch.allclose(found.logits[asked], wanted[asked], atol=1e-5)
        whole = EarlyExit(model, 1.0, at=(1,)).logits(inputs, mask)
        assert torch.allclose(whole.logits[asked], own[asked], atol=1e-5)
        if name != "masked":
            assert found.share_of_block_tokens == pytest.approx(float((layer + 1).float().mean()) / 3)
        with pytest.raises(lsim.LayersimError, match="does not generate"):
            EarlyExit(model, 0.5).generate(random_tokens(1, 4))


def classifier(name):
    """(model, what it reads, mask)."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    text, mask = ragged([9, 5, 7, 9, 3, 8, 9, 4], "right")
    if name == "vit":
        config = transformers.ViTConfig(**small, image_size=16, patch_size=8, num_labels=3)
        model, inputs, mask = transformers.ViTForImageClassification(config), torch.randn(8, 3, 16, 16), None
    elif name == "llama":
        config = transformers.LlamaConfig(**small, vocab_size=VOCABULARY, num_labels=3, pad_token_id=0)
        model, inputs = transformers.LlamaForSequenceClassification(config), text
    else:
        config = transformers.BertConfig(**small, vocab_size=VOCABULARY, num_labels=3)
        cls = transformers.BertForMaskedLM if name == "masked" else transformers.BertForSequenceClassification
        model, inputs = cls(config), text
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval(), inputs, mask


class TestCosts:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("batch", [1, 4])
    def test_programme_is_the_best_of_all_subsets(self, seed, batch):
        random = torch.Generator().manual_seed(seed)
        draw = lambda high=1.0: float(torch.rand((), generator=random)) * high  # noqa: E731
        costs = ExitCosts(
            block=draw(), check=draw(0.6), head=draw(2), blocks=7, block_token=draw(0.1), check_token=draw(0.05),
            head_token=draw(0.1), start=draw(), again=draw(0.5), batch=batch, full_check=seed % 2 == 0,
        )  # fmt: skip
        gone = [*sorted(draw() for _ in range(6)), 0.0]

        def naive(at):
            """The expected step, from what each check and stretch costs."""
            cost, before, share = costs.start, 0, 0.0
            for layer in (*at, 7):
                cost += (layer - before) * (costs.block * (1 - share**batch) + costs.block_token * batch)
                if layer == 7:
                    return cost + costs.head * (1 - share**batch) + costs.head_token * batch * (1 - share)
                then = gone[layer - 1]
                cost += costs.check * (1 - share**batch) + costs.check_token * batch * (1 - share)
                if not costs.full_check:
                    cost += costs.head * (1 - (1 - (then - share)) ** batch) + costs.head_token * batch * (then - share)
                cost += costs.again * max(0.0, (1 - then**batch) - (1 - then) ** (2 * batch))
                before, share = layer, then
            return cost

        full = costs.start + 7 * (costs.block + batch * costs.block_token) + costs.head + batch * costs.head_token
        for low in (1, 3):
            subsets = [s for n in range(7) for s in itertools.combinations(range(low, 7), n)]
            best = min(subsets, key=naive)
            plan = plan_for(costs, gone, low)
            assert plan.at == best
            assert plan.speedup == pytest.approx(full / naive(best))
            assert sum(plan.exits.values()) == pytest.approx(1)
        given = plan_for(costs, gone, 1, (2, 5))
        assert given.speedup == pytest.approx(full / naive((2, 5)))
        assert given.exits == pytest.approx({2: gone[1], 5: gone[4] - gone[1], 7: 1 - gone[4]})

    def test_parameters_counted(self):
        model = tiny_llama(3)
        costs = ExitCosts.count(model)
        assert costs.block == sum(p.numel() for p in model.model.layers[0].parameters())
        assert costs.head == costs.check == VOCABULARY * 32
        assert costs.full_check
        assert ExitCosts.count(model, shortlist=[1, 2, 3]).check == 3 * 32
        assert ExitCosts.count(model, rule="cosine").check == 0
        assert not ExitCosts.count(model, rule="cosine").full_check

    def test_measured_costs_are_times(self):
        costs = ExitCosts.measure(tiny_llama(4), batch=2, repeats=3, context=8)
        assert costs.blocks == 4
        assert costs.batch == 2
        assert 0 < costs.full() < 1
        assert min(costs.block, costs.check, costs.head, costs.again, costs.start, costs.block_token) >= 0

    def test_layers_are_chosen_from_a_curve(self, demo):
        curve = lsim.analyze(demo, lsim.demo_text()[:6], [lsim.ExitCurve(thresholds=(0.5, 0.9))])["exit_curve"]
        shares = shares_of(curve, 0.5, 8)
        exits = curve.at(0.5).exits
        assert shares[:7] == pytest.approx([float(exits[: i + 1].sum() / exits.sum()) for i in range(7)])
        early = EarlyExit(demo, 0.5, curve=curve)
        assert early.at == early.plan.at == plan_for(ExitCosts.count(demo), shares).at
        assert "is expected" in str(early.plan)
        with pytest.warns(lsim.LayersimWarning, match="slower"):
            EarlyExit(demo, 0.9, curve=curve, at="all")
        with pytest.raises(lsim.LayersimError, match="was not measured"):
            EarlyExit(demo, 0.7, curve=curve)

    def test_few_layers_without_a_curve(self):
        assert spread(ExitCosts(block=1, check=0.1, head=0.1, blocks=12), 1) == (2, 5, 7, 10)
        assert spread(ExitCosts(block=1, check=5, head=5, blocks=12), 1) == (6,)
        assert spread(ExitCosts(block=1, check=5, head=5, blocks=12), 8) == (8,)
        assert spread(ExitCosts(block=1, check=5, head=5, blocks=1), 1) == ()


class TestTruncate:
    @pytest.mark.parametrize("name", ["llama", "gemma3", "neox", "opt", "falcon", "bloom", "gptj"])
    def test_says_what_the_lens_says(self, name):
        model = family(name)
        before = copy.deepcopy(model.state_dict())
        short = truncate(model, 2)
        assert type(short) is type(model)
        assert short.config.num_hidden_layers == 2
        assert model.config.num_hidden_layers == 3
        tokens = random_tokens(2, 9)
        always = EarlyExit(model, 0.0, at=(2,))
        with torch.no_grad():
            own = short(tokens).logits
        assert torch.allclose(own, always.logits(tokens).logits, atol=1e-5)
        said = short.generate(tokens[:1], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 9:]
        assert said.tolist() == always.generate(tokens[:1], max_new_tokens=5, eos_token_id=()).tokens[0].tolist()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert {p.data_ptr() for p in short.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())

    def test_gpt2_and_classifiers(self):
        model = tiny_gpt2()
        assert truncate(model, 1).config.n_layer == 1
        read, lens = layers_of(model)
        tokens = random_tokens(1, 6)
        with torch.no_grad():
            assert torch.allclose(truncate(model, 1)(tokens).logits, lens(read(input_ids=tokens)[1]), atol=1e-5)
        for name in ("bert", "vit"):
            big, inputs, _ = classifier(name)
            with torch.no_grad():
                found = truncate(big, 2)(inputs).logits
            assert torch.allclose(found, EarlyExit(big, 0.0, at=(2,)).logits(inputs).logits, atol=1e-5)

    def test_saved_and_loaded(self, tmp_path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        demo = lsim.demo_model()
        state = torch.get_rng_state()
        short = truncate(demo, 5, save_to=tmp_path / "short")
        assert torch.equal(torch.get_rng_state(), state)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype=torch.float32)
        tokens = random_tokens(2, 9)
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, short(tokens).logits)
        assert AutoTokenizer.from_pretrained(tmp_path / "short").encode("Once") == demo.tokenizer.encode("Once")

    def test_half_precision(self):
        model = tiny_llama(3, torch.bfloat16)
        short = truncate(model, 2)
        assert short.dtype == torch.bfloat16
        assert short.model.rotary_emb.inv_freq.dtype == model.model.rotary_emb.inv_freq.dtype

    def test_refusals(self):
        with pytest.raises(lsim.LayersimError, match="no such part"):
            truncate(tiny_llama(3), 4)
        with pytest.raises(lsim.LayersimError, match="no such part"):
            truncate(tiny_llama(3), 0)
        own = torch.nn.Module()
        own.layers = torch.nn.ModuleList([torch.nn.Identity()])
        with pytest.raises(lsim.LayersimError):
            truncate(own, 1)


class TestRefusals:
    def test_settings(self):
        model = tiny_llama(4)
        for options, words in (
            ({"threshold": 1.5}, "never, or will always"),
            ({"threshold": -0.1}, "never, or will always"),
            ({"threshold": 0.9, "rule": "patience"}, "Patience counts"),
            ({"at": (0,)}, "no layers"),
            ({"at": (4,)}, "no layers"),
            ({"at": (2, 1)}, "no layers"),
            ({"at": (1,), "min_layer": 2}, "no layers"),
            ({"at": "some"}, "counted"),
            ({"rule": "entropy"}, "rule"),
            ({"curve": "x"}, "no exit curve"),
            ({"curve": "x", "rule": "margin"}, "largest probability"),
            ({"shortlist": [1]}, "no shortlist"),
            ({"shortlist": [1, 1]}, "no shortlist"),
            ({"shortlist": [1, VOCABULARY]}, "no shortlist"),
            ({"shortlist": [1, 2], "rule": "cosine"}, "no use"),
        ):
            with pytest.raises(lsim.LayersimError, match=words):
                EarlyExit(model, **options)

    def test_generation(self):
        early = EarlyExit(tiny_llama(4))
        tokens = random_tokens(2, 6)
        for prompt, options, words in (
            (tokens, {"max_new_tokens": 0}, "Nothing is asked"),
            (tokens, {"max_new_tokens": 60}, "rows this long"),
            (tokens, {"temperature": 2.0}, "Nothing is drawn"),
            (tokens, {"do_sample": True, "top_p": 0.0}, "Nothing can be drawn"),
            (tokens, {"attention_mask": torch.ones(2, 5)}, "no token ids"),
            (tokens, {"attention_mask": torch.zeros(2, 6)}, "nothing to go on"),
            (tokens.float(), {}, "no token ids"),
            (tokens, {"stop": "w3"}, "cannot be looked for"),
            (3, {}, "no prompt"),
            ("w3", {}, "tokenizer"),
        ):
            with pytest.raises(lsim.LayersimError, match=words):
                early.generate(prompt, **options)
        for given, mask in ((tokens.float(), None), (tokens[0], None), (tokens, torch.ones(2, 5))):
            with pytest.raises(lsim.LayersimError, match="does not"):
                early.logits(given, mask)

    def test_models(self):
        model = tiny_llama(3)
        with pytest.raises(lsim.LayersimError, match="no head"):
            EarlyExit(model.model)
        with pytest.raises(lsim.LayersimError, match="no model"):
            EarlyExit("gpt2")
        spread_out = tiny_llama(3)
        spread_out.lm_head.to("meta")
        with pytest.raises(lsim.LayersimError, match="one place"):
            EarlyExit(spread_out)
        stitched = lsim.stitch(model, model, random_tokens(4, 6), at=(1, 1), adapter="identity").model
        with pytest.raises(lsim.LayersimError, match="own blocks"):
            EarlyExit(stitched)

    def test_models_of_other_libraries(self):
        import nnsight
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        handle = nnsight.NNsight(tiny_llama(3))
        with pytest.raises(lsim.LayersimError, match="handles are none"):
            EarlyExit(handle)
        model = tiny_llama(3)
        bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match="AutoModelForCausalLM"):
            EarlyExit(bridge)

    def test_recurrent_models(self):
        import transformers

        torch.manual_seed(0)
        small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small)).eval()
        tokens = random_tokens(2, 7)
        early = EarlyExit(mamba, 0.0, at=(2,))
        with torch.no_grad():
            assert torch.allclose(early.logits(tokens).logits, truncate(mamba, 2)(tokens).logits, atol=1e-5)
        with pytest.raises(lsim.LayersimError, match="does not generate"):
            early.generate(tokens)
        config = transformers.Qwen3NextConfig(
            **small, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
        )
        with pytest.raises(lsim.LayersimError, match="cannot be run in parts"):
            EarlyExit(transformers.Qwen3NextForCausalLM(config).eval(), at=(1,))

    def test_a_model_that_does_not_run_in_parts(self):
        model = tiny_llama(3)

        class Counting(torch.nn.Module):
            """A block that keeps state of its own."""

            def __init__(self, inner):
                super().__init__()
                self.inner, self.calls = inner, 0

            def forward(self, x, *args, **kwargs):
                self.calls += 1
                return self.inner(x, *args, **kwargs) + self.calls

        model.model.layers[2] = Counting(model.model.layers[2])
        with pytest.raises(lsim.LayersimError, match="does not say what it says"):
            EarlyExit(model, at=(1, 2))


def test_frequent_tokens():
    model = tiny_llama(3)
    model.tokenizer = tiny_tokenizer()
    found = frequent_tokens(model, ["w5 w5 w5 w7 w7 w9", "w5"], 3)
    # BOS stands before each text.
    assert found.tolist()[:1] == [5]
    assert set(found.tolist()) == {5, 7, 1}


class TestWhatWasOnceWrong:
    """Each was found by somebody who tried to break it."""

    @pytest.mark.parametrize("rule", ["max-prob", "margin", "patience", "cosine"])
    def test_costs_of_several_rows_are_of_several_rows(self, rule, monkeypatch):
        from tl_layersim.early_exit import rules

        seen = []
        original = rules.Judge.__call__
        monkeypatch.setattr(rules.Judge, "__call__", lambda self, x, *rest: seen.append(len(x)) or original(self, x, *rest))
        costs = lsim.ExitCosts.measure(tiny_llama(), batch=8, rule=rule, repeats=3, context=4)
        assert set(seen) == {8, 1}
        assert costs.batch == 8

    def test_what_cannot_be_timed_is_refused(self):
        for model, options in ((tiny_llama(layers=1), {}), (tiny_llama(), {"repeats": 1})):
            with pytest.raises(lsim.LayersimError, match="too little to be timed"):
                lsim.ExitCosts.measure(model, context=4, **options)

    def test_rows_draw_their_own(self):
        early = lsim.EarlyExit(tiny_llama(), 1.0)
        a, b = random_tokens(2, 5).split(1)
        how = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": ()}
        beside = [early.generate(torch.cat([other, b]), seed=5, **how).tokens[1] for other in (a, b)]
        assert torch.equal(beside[0], beside[1])
        twice = early.generate(torch.cat([a, a]), seed=5, **how).tokens
        assert not torch.equal(twice[0], twice[1])
        assert not torch.equal(twice[1], early.generate(a, seed=6, **how).tokens[0])

    def test_without_a_seed_torchs_own_counts(self):
        early = lsim.EarlyExit(tiny_llama(), 1.0)
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            drawn = early.generate(random_tokens(1, 5), max_new_tokens=10, do_sample=True, eos_token_id=()).tokens[0]
            found.append((drawn.tolist(), float(torch.rand(1))))
        assert found[0] == found[1]

    def test_truncate_leaves_lists_that_are_no_lists_of_blocks(self):
        model = tiny_llama()
        model.config.eos_token_id = [2, 5, 7]
        assert lsim.truncate(model, 2).config.eos_token_id == [2, 5, 7]

    def test_a_hook_of_the_users_own_is_applied_once(self):
        model, tokens = tiny_llama(layers=4), random_tokens(1, 6)
        early = lsim.EarlyExit(model, 0.032, at=(1, 3))
        push = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 0.2
        for block in (0, 2):
            model.model.layers[block].register_forward_hook(lambda _m, _a, out: out + push)
        assert len(model.model.layers[0]._forward_hooks) == 1
        found = early.generate(tokens, max_new_tokens=30, eos_token_id=())
        assert len(model.model.layers[0]._forward_hooks) == 1
        assert len(set(found.exits[0].tolist())) > 1
        text = tokens
        unembed = early.unembed
        for token, depth in zip(found.tokens[0], found.exits[0], strict=True):
            seen = {}
            handles = [
                block.register_forward_hook(lambda _m, _a, out, i=i, seen=seen: seen.update({i: out[0, -1]}))
                for i, block in enumerate(model.model.layers, 1)
            ]
            with torch.no_grad():
                model(text, use_cache=False)
                logits = unembed(seen[int(depth)][None])[0]
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
            with pytest.raises(lsim.LayersimError, match="norm or head is another"):
                call()

    def test_a_curve_of_other_weights_is_told(self):
        curve = lsim.analyze(tiny_llama(seed=1), random_tokens(), lsim.ExitCurve())["exit_curve"]
        with pytest.warns(lsim.LayersimWarning, match="weights are not those"):
            early = lsim.EarlyExit(tiny_llama(), 0.5, curve=curve)
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
        found = lsim.EarlyExit(model, 1.0).logits(tokens).logits
        with torch.no_grad():
            own = model(tokens).logits
        assert float(own.abs().max()) > 1.5
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        "call",
        [
            lambda m: lsim.EarlyExit(m, float("nan"), rule="patience"),
            lambda m: lsim.EarlyExit(m, 0.5, shortlist={5, 6}),
            lambda m: lsim.EarlyExit(m, 0.5, shortlist=[True, False]),
            lambda m: lsim.frequent_tokens(m, random_tokens(), -1),
            lambda m: lsim.truncate(m, True),
            lambda m: lsim.EarlyExit(m, 1.0).logits(random_tokens(1, 70)),
            lambda m: lsim.EarlyExit(m, 1.0).generate(random_tokens(1, 60), max_new_tokens=6),
        ],
    )
    def test_refusals_say_what_to_do(self, call):
        with pytest.raises(lsim.LayersimError, match="do:"):
            call(tiny_gpt2())

    def test_the_last_token_is_not_read(self):
        model, tokens = tiny_gpt2(), random_tokens(1, 60)
        found = lsim.EarlyExit(model, 1.0).generate(tokens, max_new_tokens=5, eos_token_id=())
        own = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found.tokens[0].tolist() == own[0, 60:].tolist()
