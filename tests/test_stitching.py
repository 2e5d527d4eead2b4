"""Stitching: halves of models, adapters, their fit, what is measured, and what is refused."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim
from tl_layersim.adapter import cross_moments, own_moments, solve
from tl_layersim.sources import open_half
from tl_layersim.stitching.material import Activations
from tl_layersim.stitching.results import over_batches

from .conftest import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer

QUICK = lsim.StitchTraining(steps=30, warmup=5)


def rows(count: int = 24, length: int = 16) -> torch.Tensor:
    return random_tokens(count, length)


def rotated(model, seed: int = 5):
    """The same function of tokens with its residual stream in another orthogonal basis, and that basis.

    Norms' weights, which belong to the old coordinates, are folded into what reads the normed stream.
    """
    d = model.config.hidden_size
    q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    turned = copy.deepcopy(model)
    with torch.no_grad():

        def reads(linear, norm) -> None:
            linear.weight.copy_((linear.weight.double() * norm.weight.double()) @ q.T)

        def writes(linear) -> None:
            linear.weight.copy_(q @ linear.weight.double())

        turned.lm_head.weight = torch.nn.Parameter(turned.lm_head.weight.clone())
        turned.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.double() @ q.T)
        reads(turned.lm_head, turned.model.norm)
        turned.model.norm.weight.fill_(1)
        for block in turned.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                reads(linear, block.input_layernorm)
            for linear in (block.mlp.gate_proj, block.mlp.up_proj):
                reads(linear, block.post_attention_layernorm)
            block.input_layernorm.weight.fill_(1)
            block.post_attention_layernorm.weight.fill_(1)
            writes(block.self_attn.o_proj)
            writes(block.mlp.down_proj)
    return turned, q


def gpt2_parts(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Residual layers of a GPT-2 in float64, `batch pos d_model` each, block by block by hand."""
    body = model.transformer
    x = body.wte(tokens) + body.wpe(torch.arange(tokens.shape[1]))
    layers = [x]
    for block in body.h:
        x = block(x)
        layers.append(x if isinstance(x, torch.Tensor) else x[0])
    return layers


def gpt2_upper(model, x: torch.Tensor, layer: int) -> torch.Tensor:
    for block in model.transformer.h[layer:]:
        x = block(x)
    return model.lm_head(model.transformer.ln_f(x))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean cross-entropy by the formula, in NumPy."""
    z = logits.detach().double().numpy()
    total, count = 0.0, 0
    for row in range(z.shape[0]):
        for pos in range(z.shape[1] - 1):
            shifted = z[row, pos] - z[row, pos].max()
            total -= shifted[int(tokens[row, pos + 1])] - math.log(np.exp(shifted).sum())
            count += 1
    return total / count


def lsim_batches(tokens: torch.Tensor, size: int = 4):
    from tl_layersim.data import Batches
    from tl_layersim.sources import open_source

    return list(Batches(tokens, open_source(tiny_llama()).model, size, None, False, None, 0, True, None))


class TestAdapter:
    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    @pytest.mark.parametrize("widths", [(6, 6), (6, 4), (4, 6)])
    def test_closed_form_is_least_squares(self, kind, widths):
        rng = np.random.default_rng(0)
        x, y = (rng.normal(size=(50, d)) * (1 + np.arange(d)) + 3 for d in widths)
        total = lsim.Sums()
        for part in (slice(0, 7), slice(7, 50)):
            h, t = torch.as_tensor(x[part]), torch.as_tensor(y[part])
            total = total + lsim.Sums.of(own_moments(kind, h) | cross_moments(kind, h, t))
        weight, bias, explained = solve(kind, total.fields, 0.0)

        u = x
        if kind == "affine-norm":
            u = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        target = y - x if kind == "affine-norm" and widths[0] == widths[1] else y
        design = u if kind == "linear" else np.hstack([u, np.ones((50, 1))])
        coefficients = np.linalg.lstsq(design, target, rcond=None)[0]
        fit = design @ coefficients
        centre = 0 if kind == "linear" else target.mean(0)
        r2 = 1 - ((target - fit) ** 2).sum() / ((target - centre) ** 2).sum()
        adapter = lsim.Adapter(kind, weight, bias)
        ours = adapter(torch.as_tensor(x)).numpy() - (y - target)
        np.testing.assert_allclose(ours, fit, atol=1e-9)
        assert explained == pytest.approx(r2, abs=1e-10)

    def test_ridge_is_the_formula(self):
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(30, 5)), rng.normal(size=(30, 3))
        h, t = torch.as_tensor(x), torch.as_tensor(y)
        weight, _, _ = solve("linear", own_moments("linear", h) | cross_moments("linear", h, t), 0.5)
        gram = x.T @ x
        by_hand = np.linalg.solve(gram + 0.5 * gram.diagonal().mean() * np.eye(5), x.T @ y).T
        np.testing.assert_allclose(weight.numpy(), by_hand, atol=1e-12)

    def test_its_numbers_are_its_own(self):
        weight = torch.eye(2)
        adapter = lsim.Adapter("linear", weight)
        weight.zero_()
        assert torch.equal(adapter(torch.ones(2)), torch.ones(2))
        with pytest.raises(lsim.LayersimError, match="whole numbers"):
            lsim.Adapter("linear", torch.eye(2).long())

    def test_a_large_mean_in_a_linear_map(self):
        h = torch.randn(400, 6, dtype=torch.float64) + 1e5
        truth = torch.randn(3, 6, dtype=torch.float64)
        t = h @ truth.T
        weight, _, _ = solve("linear", own_moments("linear", h) | cross_moments("linear", h, t), 0.0)
        torch.testing.assert_close(weight, truth, rtol=0, atol=0.02)

    def test_directions_that_no_token_has_are_left_alone(self):
        x = torch.randn(40, 3, dtype=torch.float64)
        h = torch.cat([x, x[:, :1], torch.zeros(40, 1)], 1).double()
        t = x[:, :2].double()
        weight, _, explained = solve("linear", own_moments("linear", h) | cross_moments("linear", h, t), 0.0)
        assert weight.isfinite().all()
        assert weight[:, 4].abs().max() == 0
        # Twice the same feature shares its weight.
        torch.testing.assert_close(weight[:, 0], weight[:, 3])
        assert explained == pytest.approx(1.0)

    def test_features_of_very_different_sizes(self):
        h = torch.randn(200, 4, dtype=torch.float64) * torch.tensor([1e4, 1.0, 1e-3, 1.0])
        h[::20, 0] += 1e6
        truth = torch.randn(3, 4, dtype=torch.float64)
        t = h @ truth.T + 7
        weight, bias, _ = solve("affine", own_moments("affine", h) | cross_moments("affine", h, t), 0.0)
        torch.testing.assert_close(weight, truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bias, torch.full((3,), 7.0).double(), rtol=1e-5, atol=1e-3)

    @pytest.mark.parametrize(
        "given",
        [
            ("twisted", None, None),
            ("identity", torch.eye(2), None),
            ("linear", None, None),
            ("linear", torch.eye(2), torch.zeros(2)),
            ("affine", torch.eye(2), None),
            ("affine", torch.eye(2), torch.zeros(3)),
            ("linear", torch.zeros(2), None),
        ],
    )
    def test_what_is_none(self, given):
        with pytest.raises(lsim.LayersimError, match=r"no adapter|do not fit each other"):
            lsim.Adapter(*given)

    def test_nothing_of_it_learns(self):
        adapter = lsim.Adapter("affine", torch.eye(3, requires_grad=True), torch.zeros(3))
        assert not list(adapter.parameters())
        assert not adapter(torch.ones(3)).requires_grad
        x = torch.ones(3, requires_grad=True)
        adapter(x).sum().backward()
        assert x.grad is not None


class TestNumbers:
    @pytest.mark.parametrize("at", [(0, 0), (1, 1), (1, 2), (3, 1), (2, 3)])
    def test_losses_are_the_formula(self, at):
        front, back, tokens = tiny_gpt2(0).double(), tiny_gpt2(1).double(), rows(6, 10)
        found = lsim.stitch(front, back, tokens, at=at, adapter="identity")
        with torch.no_grad():
            x = gpt2_parts(front, tokens)[at[0]]
            stitched = next_token_loss(gpt2_upper(back, x, at[1]), tokens)
            own = next_token_loss(back(tokens).logits, tokens)
            hits = (gpt2_upper(back, x, at[1])[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean()
        assert found.loss == pytest.approx(stitched, abs=1e-9)
        assert found.back_loss == pytest.approx(own, abs=1e-9)
        assert found.penalty == pytest.approx(stitched - own, abs=1e-9)
        assert found.accuracy == pytest.approx(float(hits))
        assert found.accuracy_penalty == pytest.approx(found.back_accuracy - float(hits))

    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    def test_closed_form_on_a_model(self, kind):
        front, back, tokens = tiny_gpt2(0).double(), tiny_gpt2(1).double(), rows(40, 10)
        found = lsim.stitch(front, back, tokens, at=(2, 1), adapter=kind, fit="lstsq", batch_size=8)
        fit, judged = tokens[:32], tokens[32:]
        with torch.no_grad():
            x, y = gpt2_parts(front, fit)[2].reshape(-1, 32).numpy(), gpt2_parts(back, fit)[1].reshape(-1, 32).numpy()
            new = gpt2_parts(front, judged)[2].reshape(-1, 32).numpy()

            def features(h):
                if kind != "affine-norm":
                    return h if kind == "linear" else np.hstack([h, np.ones((len(h), 1))])
                normed = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
                return np.hstack([normed, np.ones((len(h), 1))])

            offset = (lambda h: h) if kind == "affine-norm" else (lambda h: 0 * h)
            coefficients = np.linalg.lstsq(features(x), y - offset(x), rcond=None)[0]
            out = torch.as_tensor(features(new) @ coefficients + offset(new)).view(8, 10, 32)
            assert found.loss == pytest.approx(next_token_loss(gpt2_upper(back, out, 1), judged), abs=1e-6)

    @pytest.mark.parametrize("relative", [True, False])
    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    def test_training_is_torchs_sgd_on_the_whole_stitched_model(self, kind, relative):
        """The same steps by hand: whole models, plain autograd, torch's optimiser, in float64."""
        front, back, tokens = tiny_gpt2(0).double(), tiny_gpt2(1).double(), rows(12, 10)
        settings = lsim.StitchTraining(steps=12, lr=0.3, warmup=4, clip=0.7, relative=relative)
        found = lsim.stitch(
            front,
            back,
            tokens[:8],
            at=(2, 1),
            adapter=kind,
            fit="sgd",
            batch_size=4,
            training=settings,
            eval_data=tokens[8:],
            seed=3,
        )
        with torch.no_grad():
            hidden = [gpt2_parts(front, tokens[i : i + 4])[2] for i in (0, 4)]
            theirs = gpt2_parts(back, tokens[:4])[1].numpy()
        unit, size = 1.0, 1.0
        if relative:
            unit = float(np.exp(np.log(np.sqrt((theirs**2).mean(-1))).mean()))
            u = hidden[0].numpy()
            u = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-5) if kind == "affine-norm" else u
            size = float(np.exp(np.log(np.sqrt((u**2).mean(-1))).mean()))
        start = torch.zeros(32, 32) if kind == "affine-norm" else torch.eye(32)
        a, b = (
            torch.zeros(32, 32, dtype=torch.float64, requires_grad=True),
            torch.zeros(32, dtype=torch.float64, requires_grad=True),
        )
        learnt = [a] if kind == "linear" else [a, b]
        optimiser = torch.optim.SGD(learnt, lr=1.0, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda s: 0.3 * (1 - 0.9) * ((s + 1) / 4 if s < 4 else (12 - s) / (12 - 4))
        )

        def apply(h):
            u = torch.nn.functional.layer_norm(h, (32,)) if kind == "affine-norm" else h
            out = u @ (start.double() + a * unit / size).T
            out = out if kind == "linear" else out + b * unit
            return out + h if kind == "affine-norm" else out

        curve = []
        for step in range(12):
            order = torch.randperm(2, generator=torch.Generator().manual_seed(3 * 1_000_003 + step // 2))
            index = int(order[step % 2])
            batch = tokens[4 * index : 4 * index + 4]
            logits = gpt2_upper(back, apply(hidden[index]), 1)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
            curve.append(float(loss.detach()))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, 0.7)
            optimiser.step()
            schedule.step()
        np.testing.assert_allclose(found.curve.numpy(), curve, rtol=1e-7)
        torch.testing.assert_close(found.weight, (start.double() + a * unit / size).detach(), rtol=1e-7, atol=1e-9)
        with torch.no_grad():
            out = apply(gpt2_parts(front, tokens[8:])[2])
        assert found.loss == pytest.approx(next_token_loss(gpt2_upper(back, out, 1), tokens[8:]), abs=1e-6)

    def test_a_planted_rotation(self):
        model = tiny_llama(4)
        turned, q = rotated(model)
        tokens = rows(80, 20)
        with torch.no_grad():
            logits = model(tokens).logits
            torch.testing.assert_close(logits[:2], turned(tokens[:2]).logits, rtol=1e-3, atol=1e-4)
        # A random model is good at nothing but what it says itself.
        options = {"labels": logits.argmax(-1)}
        for at in ((1, 1), (3, 3)):
            plain = lsim.stitch(model, turned, tokens, at=at, adapter="identity", **options)
            found = lsim.stitch(model, turned, tokens, at=at, adapter="linear", fit="lstsq", **options)
            assert plain.penalty > 0.5
            assert plain.accuracy < 0.3
            assert found.accuracy > 0.99
            assert abs(found.penalty) < 1e-3
            torch.testing.assert_close(found.weight, q, atol=2e-4, rtol=0)
            assert found.explained > 0.99999

    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_a_model_with_itself_costs_nothing(self, build):
        model = build()
        for layer in range(len(open_half(model, None, False).model.layers)):
            found = lsim.stitch(model, model, rows(5, 12), at=(layer, layer), adapter="identity", batch_size=2)
            assert found.penalty == 0.0
            assert found.accuracy_penalty == 0.0
            assert tuple(found.penalty_interval()) == (0.0, 0.0, 0.0)

    def test_padding_changes_nothing(self):
        front, back = tiny_llama(seed=0).double(), tiny_llama(seed=1).double()
        lengths = [5, 12, 9, 2]
        ragged = [rows(4, 12)[i, :n].tolist() for i, n in enumerate(lengths)]
        together = lsim.stitch(front, back, {"input_ids": ragged}, at=(2, 1), adapter="identity", batch_size=4)
        alone = lsim.stitch(front, back, {"input_ids": ragged}, at=(2, 1), adapter="identity", batch_size=1)
        assert together.loss == pytest.approx(alone.loss, abs=1e-10)
        assert int(together.batch_tokens.sum()) == sum(n - 1 for n in lengths)
        options = {"at": (2, 1), "adapter": "linear", "fit": "lstsq", "eval_data": rows(2), "ridge": 1.0}
        with pytest.warns(lsim.LayersimWarning, match="28 tokens for 32 features"):
            fits = [lsim.stitch(front, back, {"input_ids": ragged}, batch_size=n, **options) for n in (1, 4)]
        torch.testing.assert_close(fits[0].weight, fits[1].weight, rtol=1e-9, atol=1e-12)

    def test_skipped_positions_are_fitted_and_not_counted(self):
        model, other, tokens = tiny_llama(), tiny_llama(seed=1), rows(20, 10)
        all_of_it = lsim.stitch(model, other, tokens, at=(1, 1), adapter="linear", fit="lstsq", batch_size=4)
        later = lsim.stitch(model, other, tokens, at=(1, 1), adapter="linear", fit="lstsq", batch_size=4, skip_first=4)
        torch.testing.assert_close(all_of_it.weight, later.weight)
        assert int(all_of_it.batch_tokens.sum()) == 4 * 9
        assert int(later.batch_tokens.sum()) == 4 * 5

    def test_what_is_kept_out_does_not_depend_on_the_batch_size(self):
        model, other, tokens = tiny_llama(), tiny_llama(seed=1), rows(37)
        sizes = [lsim.stitch(model, other, tokens, at=(1, 1), adapter="linear", fit="lstsq", batch_size=n) for n in (1, 5, 37)]
        for found in sizes[1:]:
            assert int(found.batch_tokens.sum()) == 7 * 15
            torch.testing.assert_close(found.weight, sizes[0].weight)
            assert found.penalty == pytest.approx(sizes[0].penalty, abs=1e-6)

    def test_the_last_fifth_is_kept_out(self):
        model, other, tokens = tiny_llama(), tiny_llama(seed=1), rows(40, 10)
        found = lsim.stitch(model, other, tokens, at=(1, 1), adapter="linear", fit="lstsq", batch_size=4)
        apart = lsim.stitch(
            model, other, tokens[:32], at=(1, 1), adapter="linear", fit="lstsq", batch_size=4, eval_data=tokens[32:]
        )
        assert torch.equal(found.weight, apart.weight)
        assert found.penalty == apart.penalty
        again = lsim.stitch(model, other, tokens[32:], at=(1, 1), adapter=apart.adapter, batch_size=4)
        assert again.penalty == apart.penalty
        assert again.fit == ""

    def test_what_is_judged_is_what_is_given_back(self):
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        front, back = tiny_gpt2(0), tiny_gpt2(1)
        wide = lsim.stitch(front, back, rows(4), at=(1, 1), adapter=lsim.Adapter("linear", weight))
        narrow = lsim.stitch(front, back, rows(4), at=(1, 1), adapter=lsim.Adapter("linear", weight.float()))
        assert wide.loss == narrow.loss
        assert torch.equal(wide.weight, weight.float().double())
        double = lsim.stitch(front.double(), back.double(), rows(4), at=(1, 1), adapter=lsim.Adapter("linear", weight))
        assert torch.equal(double.adapter.weight, weight)

    def test_a_table_of_labels_is_of_one_data_set(self):
        table = torch.full((6, 8), 5)
        with pytest.raises(lsim.LayersimError, match="belongs to one data set"):
            lsim.stitch(
                tiny_gpt2(0), tiny_gpt2(1), rows(6, 8), at=(1, 1), adapter="identity", labels=table, eval_data=rows(6, 8)
            )

    def test_the_tokenizer_of_either(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        back.tokenizer = tiny_tokenizer()
        by_text = lsim.stitch(front, back, ["w5 w6 w7 w8"], at=(1, 1), adapter="identity")
        by_ids = lsim.stitch(front, back, torch.tensor([[1, 5, 6, 7, 8]]), at=(1, 1), adapter="identity")
        assert by_text.loss == by_ids.loss

    def test_labels_of_ones_own(self):
        model, other, tokens = tiny_gpt2(0), tiny_gpt2(1), rows(6, 8)
        shifted = torch.full_like(tokens, -100)
        shifted[:, :-1] = tokens[:, 1:]
        usual = lsim.stitch(model, other, tokens, at=(1, 1), adapter="identity")
        table = lsim.stitch(model, other, tokens, at=(1, 1), adapter="identity", labels=shifted)
        assert usual.loss == table.loss
        shifted[:, :4] = -100
        fewer = lsim.stitch(model, other, tokens, at=(1, 1), adapter="identity", labels=shifted)
        assert int(fewer.batch_tokens.sum()) == 6 * 3

    def test_what_is_judged_is_cut_into_batches_enough_for_an_interval(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        ragged = {"input_ids": [rows(25, 12)[i, : 3 + i % 9].tolist() for i in range(25)]}
        fine = lsim.stitch(front, back, ragged, at=(1, 1), adapter="identity", batch_size=2)
        coarse = lsim.stitch(front, back, ragged, at=(1, 1), adapter="identity", batch_size=25)
        assert torch.equal(fine.batch_tokens[:-1], coarse.batch_tokens[:-1])
        assert len(coarse.batch_tokens) == 13
        assert coarse.penalty == pytest.approx(fine.penalty, abs=1e-6)
        assert coarse.penalty_interval().high == pytest.approx(fine.penalty_interval().high, abs=1e-6)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 40)), min_size=2, max_size=12))
    def test_the_interval_is_the_formula(self, pairs):
        from scipy.stats import t

        sums, tokens = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
        value, low, high = over_batches(sums, tokens, 0.9)
        mean = sum(s for s, _ in pairs) / sum(n for _, n in pairs)
        count = len(pairs)
        variance = sum((s - mean * n) ** 2 for s, n in pairs) * count / (count - 1) / sum(n for _, n in pairs) ** 2
        half = t.ppf(0.95, count - 1) * math.sqrt(variance)
        assert value == pytest.approx(mean, abs=1e-12)
        assert high - value == pytest.approx(half, abs=1e-9)
        assert value - low == pytest.approx(half, abs=1e-9)

    def test_the_interval_holds_what_it_promises(self):
        rng = np.random.default_rng(0)
        inside = 0
        for _ in range(1000):
            tokens = rng.integers(50, 150, size=8)
            sums = tokens * (0.3 + 0.1 * rng.normal(size=8))
            low, high = over_batches(torch.as_tensor(sums), torch.as_tensor(tokens).double(), 0.95)[1:]
            inside += low < 0.3 < high
        assert 0.92 < inside / 1000 < 0.98

    def test_one_row_has_no_interval(self):
        found = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(1), at=(1, 1), adapter="identity")
        assert all(math.isnan(end) for end in found.penalty_interval()[1:])
        assert "nan" in repr(found)

    @pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 3), (1, 0), (5, 4), (40, None)])
    def test_rates_rise_and_fall(self, steps, warmup):
        training = lsim.StitchTraining(steps=steps, warmup=warmup)
        rates = [training.rate(step) for step in range(steps)]
        assert all(rate > 0 for rate in rates)
        assert max(rates) == pytest.approx(0.1)
        top = rates.index(max(rates))
        assert rates[: top + 1] == sorted(rates[: top + 1])
        assert rates[top:] == sorted(rates[top:], reverse=True)


class TestEveryKind:
    """HookedTransformer, TransformerBridge, nnsight and plain models on either side give one answer."""

    @pytest.fixture(scope="class")
    def expected(self):
        return lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), rows(), at=(2, 1), adapter="affine", fit="lstsq", batch_size=4)

    @staticmethod
    def build(kind: str, seed: int):
        hf = tiny_gpt2(seed)
        if kind == "bridge":
            from transformer_lens.model_bridge.sources import build_bridge_from_module

            return build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
        if kind == "nnsight":
            import nnsight

            return nnsight.TransformersModel(hf, task="text-generation", tokenizer=tiny_tokenizer())
        if kind == "wrapped":
            import nnsight

            return nnsight.NNsight(hf)
        if kind == "hooked":
            return hooked(hf)
        return hf

    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    @pytest.mark.parametrize("side", ["front", "back"])
    def test_one_answer(self, kind, side, expected):
        models = [tiny_gpt2(0), tiny_gpt2(1)]
        models[side == "back"] = self.build(kind, int(side == "back"))
        found = lsim.stitch(*models, rows(), at=(2, 1), adapter="affine", fit="lstsq", batch_size=4)
        assert found.loss == pytest.approx(expected.loss, abs=2e-6)
        assert found.back_loss == pytest.approx(expected.back_loss, abs=2e-6)
        torch.testing.assert_close(found.weight, expected.weight, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    def test_training_through_it(self, kind):
        plain, other = (
            lsim.stitch(tiny_gpt2(0), back, rows(), at=(2, 2), adapter="affine-norm", fit="sgd", batch_size=4, training=QUICK)
            for back in (tiny_gpt2(1), self.build(kind, 1))
        )
        np.testing.assert_allclose(other.curve, plain.curve, atol=2e-5)

    @pytest.mark.parametrize("kind", ["bridge", "nnsight", "wrapped", "hooked"])
    def test_the_stitched_model_of_it(self, kind):
        tokens = rows(4, 8)
        found = lsim.stitch(self.build(kind, 0), self.build(kind, 1), tokens, at=(2, 1), adapter="identity")
        plain = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), tokens, at=(2, 1), adapter="identity")
        with torch.no_grad():
            ours, theirs = found.model(tokens), plain.model(tokens)
        ours = getattr(ours, "logits", ours)
        torch.testing.assert_close(ours, theirs.logits, rtol=1e-4, atol=1e-5)
        lens = lsim.analyze(found.model, tokens, [lsim.LogitLens()])["logit_lens"]
        assert float(lens.cross_entropy[-1]) == pytest.approx(found.loss, abs=1e-5)
        assert lens.layers == ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")

    def test_models_are_left_as_they_were(self):
        bridge = self.build("bridge", 1)
        tokens = rows(4, 8)
        before = bridge(tokens)
        keys = [set(vars(block)) for block in bridge.blocks]
        found = lsim.stitch(tiny_gpt2(0), bridge, tokens, at=(2, 2), adapter="identity")
        found.model(tokens)
        assert torch.equal(bridge(tokens), before)
        assert [set(vars(block)) for block in bridge.blocks] == keys

    @pytest.mark.parametrize("fit", ["lstsq", "sgd"])
    def test_in_nnsights_simulation_of_a_server(self, fit):
        options = {"at": (2, 1), "adapter": "affine", "fit": fit, "batch_size": 6}
        options |= {"training": lsim.StitchTraining(steps=3, warmup=1)} if fit == "sgd" else {}
        there = [self.build("nnsight", seed) for seed in (0, 1)]
        here = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), rows(), **options)
        found = lsim.stitch(*there, rows(), remote="local", **options)
        assert found.loss == pytest.approx(here.loss, abs=1e-6)
        assert found.back_loss == pytest.approx(here.back_loss, abs=1e-6)
        np.testing.assert_allclose(found.curve, here.curve, atol=1e-6)
        mixed = lsim.stitch(tiny_gpt2(0), there[1], rows(), remote=(False, "local"), **options)
        assert mixed.loss == pytest.approx(here.loss, abs=1e-6)
        with pytest.raises(lsim.LayersimError, match="not at hand"):
            _ = mixed.model

    def test_the_end_of_a_remote_back(self):
        there = self.build("nnsight", 1)
        here = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), rows(4, 8), at=(3, 3), adapter="identity")
        found = lsim.stitch(tiny_gpt2(0), there, rows(4, 8), at=(3, 3), adapter="identity", remote=(False, "local"))
        assert found.loss == pytest.approx(here.loss, abs=1e-6)
        first = lsim.stitch(tiny_gpt2(0), there, rows(4, 8), at=(0, 0), adapter="identity", remote=(False, "local"))
        assert first.loss == pytest.approx(
            lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), rows(4, 8), at=(0, 0), adapter="identity").loss, abs=1e-6
        )


def hooked(hf):
    """A HookedTransformer with the same unprocessed weights; only TransformerLens 3 has one."""
    import transformer_lens as tl

    try:
        tl.HookedTransformer  # noqa: B018
    except (AttributeError, ImportError):
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    cfg = tl.HookedTransformerConfig(
        n_layers=3,
        d_model=32,
        n_ctx=64,
        d_head=8,
        n_heads=4,
        d_mlp=128,
        d_vocab=100,
        act_fn="gelu_new",
        normalization_type="LN",
    )
    model = tl.HookedTransformer(cfg)
    model.load_state_dict(convert_gpt2_weights(hf, cfg), strict=False)
    return model


FAMILIES = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {}),
    "falcon": ("FalconForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "mpt": ("MptForCausalLM", {}),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "phi": ("PhiForCausalLM", {}),
    "bert": ("BertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
}


def family(name: str, seed: int = 0):
    import transformers

    head, more = FAMILIES[name]
    cls = getattr(transformers, head)
    config = cls.config_class()
    wanted = {
        "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3,
        "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "intermediate_size": 48, "vocab_size": 100,
        "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    settings = {key: value for key, value in wanted.items() if hasattr(config, key)} | more
    torch.manual_seed(seed)
    return cls(cls.config_class(**settings)).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_can_be_entered_at_every_layer(name):
    model, other = family(name), family(name, 1)
    masked = "Masked" in type(model).__name__
    more = {"labels": rows(4, 10).roll(1, 1)} if masked else {}
    count = len(open_half(model, None, False).model.layers)
    for layer in range(count):
        same = lsim.stitch(model, model, rows(4, 10), at=(layer, layer), adapter="identity", **more)
        assert same.penalty == 0.0
        assert lsim.stitch(other, model, rows(4, 10), at=(layer, layer), adapter="identity", **more).penalty != 0.0
    ragged = {"input_ids": [rows(4, 10)[i, : 10 - i].tolist() for i in range(4)]}
    if not masked:
        assert lsim.stitch(model, model, ragged, at=(1, 1), adapter="identity").penalty == 0.0


class TestClassifiers:
    @staticmethod
    def build(name: str, seed: int, base=None):
        import transformers

        if name == "bert":
            config = transformers.BertConfig(
                hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100, num_labels=3
            )
            cls = transformers.BertForSequenceClassification
        else:
            config = transformers.LlamaConfig(
                hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100, num_labels=3,
                pad_token_id=0,
            )  # fmt: skip
            cls = transformers.LlamaForSequenceClassification
        torch.manual_seed(seed)
        model = cls(config).eval()
        if base is not None:
            model.load_state_dict(base.state_dict())
            with torch.no_grad():
                # A fine-tune: the upper layers moved, the lower ones did not.
                for parameter in (model.bert.encoder.layer if name == "bert" else model.model.layers)[2].parameters():
                    parameter.add_(0.5 * torch.randn_like(parameter))
        return model

    @pytest.mark.parametrize("name", ["bert", "llama"])
    def test_accuracy_penalty(self, name):
        base = self.build(name, 0)
        tuned = self.build(name, 1, base)
        tokens, classes = rows(30, 9), torch.arange(30) % 3
        data = {"input_ids": tokens, "labels": classes}
        # The first two blocks are the same in both, so nothing is lost below the third.
        for layer in (1, 2):
            found = lsim.stitch(base, tuned, data, at=(layer, layer), adapter="identity", batch_size=8)
            assert found.accuracy_penalty == pytest.approx(0.0)
            assert abs(found.penalty) < 1e-6
        found = lsim.stitch(base, tuned, data, at=(3, 3), adapter="identity", batch_size=8)
        with torch.no_grad():
            own = tuned(tokens).logits
            swapped = copy.deepcopy(tuned)
            layers = swapped.bert.encoder.layer if name == "bert" else swapped.model.layers
            layers[2] = (base.bert.encoder.layer if name == "bert" else base.model.layers)[2]
            stitched = swapped(tokens).logits
        assert found.back_accuracy == pytest.approx(float((own.argmax(-1) == classes).double().mean()))
        assert found.accuracy == pytest.approx(float((stitched.argmax(-1) == classes).double().mean()))
        assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(stitched, classes)), abs=1e-5)
        assert int(found.batch_tokens.sum()) == 30

    def test_the_class_of_a_row_does_not_need_its_first_positions(self):
        base, tuned = self.build("bert", 0), self.build("bert", 1)
        data = {"input_ids": rows(12, 9), "labels": torch.arange(12) % 3}
        found = lsim.stitch(base, tuned, data, at=(3, 3), adapter="identity")
        later = lsim.stitch(base, tuned, data, at=(3, 3), adapter="identity", skip_first=2)
        assert later.loss == found.loss
        assert int(later.batch_tokens.sum()) == 12
        assert found.unit == "row"
        assert "nats a row" in found.plot().layout.yaxis.title.text

    def test_padded_rows_and_training(self):
        base, tuned = self.build("bert", 0), self.build("bert", 1)
        data = {"input_ids": [rows(20, 9)[i, : 4 + i % 5].tolist() for i in range(20)], "labels": [i % 3 for i in range(20)]}
        found = lsim.stitch(base, tuned, data, at=(3, 3), fit="sgd", batch_size=4, training=QUICK)
        assert len(found.curve) == 30
        grid = lsim.stitch_grid({"a": base, "b": tuned}, data, adapter="identity", batch_size=4)
        assert grid.penalty.shape == (2, 2, 3)
        assert grid.accuracy_penalty[0, 0].abs().max() == 0

    def test_a_label_that_is_no_class(self):
        base = self.build("bert", 0)
        with pytest.raises(lsim.LayersimError, match="none of the model's classes"):
            lsim.stitch(base, base, {"input_ids": rows(4), "labels": [0, 1, 2, 7]}, at=(1, 1), adapter="identity")

    def test_a_language_model_beside_a_classifier(self):
        with pytest.raises(lsim.LayersimError, match="some are classifiers"):
            lsim.stitch_grid({"a": self.build("llama", 0), "b": tiny_llama()}, rows(4), adapter="identity")

    def test_the_last_token_is_where_the_back_looks_for_it(self):
        """The tokenizer pads with another token than the classifier's own configuration names."""
        base, tuned = self.build("llama", 0), self.build("llama", 1)
        base.tokenizer = tuned.tokenizer = tiny_tokenizer()
        data = {
            "text": [" ".join(f"w{3 + (7 * i + j) % 90}" for j in range(2 + i % 6)) for i in range(20)],
            "label": [i % 3 for i in range(20)],
        }
        one, many = (lsim.stitch(base, tuned, data, at=(2, 2), adapter="identity", batch_size=n) for n in (1, 20))
        assert many.loss == pytest.approx(one.loss, abs=1e-6)
        assert many.back_loss == pytest.approx(one.back_loss, abs=1e-6)

    def test_classes_of_tokens(self):
        import transformers

        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100, num_labels=120
        )
        models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            models.append(transformers.BertForTokenClassification(config).eval())
        data = {"input_ids": rows(4), "labels": rows(4) + 10}
        found = lsim.stitch(*models, data, at=(1, 1), adapter="identity")
        assert found.provenance.options["labels"] == "data"
        with torch.no_grad():
            own = models[1](rows(4)).logits
        expected = torch.nn.functional.cross_entropy(own.reshape(-1, 120), (rows(4) + 10).reshape(-1))
        assert found.back_loss == pytest.approx(float(expected), abs=1e-6)

    def test_models_that_say_nothing_or_see_the_answer(self):
        with pytest.raises(lsim.LayersimError, match="it has no head"):
            lsim.stitch(tiny_llama().model, tiny_llama(seed=1).model, rows(4) % 30, at=(1, 1), adapter="identity")
        with pytest.raises(lsim.LayersimError, match="masked language model"):
            lsim.stitch(family("bert"), family("bert", 1), rows(4), at=(1, 1), adapter="identity")


class TestNothingElseChanges:
    @pytest.mark.parametrize("kind", ["identity", "affine", "affine-norm"])
    def test_no_gradient_reaches_a_weight(self, kind):
        front, back = tiny_llama().train(), tiny_llama(seed=1).train()
        list(back.parameters())[3].requires_grad_(False)
        flags = [[p.requires_grad for p in m.parameters()] for m in (front, back)]
        sums = [[float(p.detach().double().sum()) for p in m.parameters()] for m in (front, back)]
        more = {} if kind == "identity" else {"fit": "lstsq+sgd", "training": QUICK, "batch_size": 6}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lsim.LayersimWarning)
            lsim.stitch(front, back, rows(), at=(2, 2), adapter=kind, **more)
        assert front.training
        for model, flag, total in zip((front, back), flags, sums, strict=True):
            assert all(p.grad is None for p in model.parameters())
            assert [p.requires_grad for p in model.parameters()] == flag
            assert [float(p.detach().double().sum()) for p in model.parameters()] == total
            assert model.training
            for module in model.modules():
                assert "forward" not in vars(module)
                assert not module._forward_hooks
                assert not module._forward_pre_hooks

    def test_nor_after_an_exception(self, monkeypatch):
        front, back = tiny_llama(), tiny_llama(seed=1)
        monkeypatch.setattr(back.lm_head, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("broken head")))
        with pytest.raises(RuntimeError, match="broken head"):
            lsim.stitch(front, back, rows(), at=(2, 2), adapter="identity")
        for model in (front, back):
            assert all(p.requires_grad for p in model.parameters())
            for module in model.model.modules():
                assert "forward" not in vars(module)
                assert not module._forward_hooks
                assert not module._forward_pre_hooks

    def test_no_block_below_the_seam_runs_in_a_step(self):
        front, back = tiny_llama(4), tiny_llama(4, seed=1)
        runs = dict.fromkeys(range(4), 0)
        for number, block in enumerate(back.model.layers):
            block.mlp.register_forward_hook(lambda *_, n=number: runs.update({n: runs[n] + 1}))
        half, other = open_half(back, None, False), open_half(front, None, False)
        material = lsim_batches(rows(4))
        half.tuples()
        runs.update(dict.fromkeys(runs, 0))
        half.pull(material[0], material[0].next_tokens, 3, other.hidden(material[0], 3))
        assert runs == {0: 0, 1: 0, 2: 0, 3: 1}

    def test_the_front_runs_once_a_batch(self, monkeypatch):
        from tl_layersim.sources.halves import LocalHalf

        asked = []
        plain = LocalHalf.hidden
        monkeypatch.setattr(
            LocalHalf, "hidden", lambda self, batch, layer: asked.append(self.model.weights_hash) or plain(self, batch, layer)
        )
        front, back = tiny_llama(), tiny_llama(seed=1)
        found = lsim.stitch(front, back, rows(20), at=(1, 1), adapter="affine-norm", fit="sgd", batch_size=4, training=QUICK)
        own = found.provenance.weights_hash.split(" | ")[0]
        # Four batches of the fit; the fifth is judged row by row.
        assert asked.count(own) == 4 + 4

    def test_inside_a_users_own_contexts(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        options = {"at": (2, 2), "adapter": "affine-norm", "fit": "sgd", "batch_size": 6, "training": QUICK}
        plain = lsim.stitch(front, back, rows(), **options)
        with torch.no_grad():
            assert lsim.stitch(front, back, rows(), **options).penalty == plain.penalty
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert lsim.stitch(front, back, rows(), **options).penalty == plain.penalty
        with torch.inference_mode():
            assert lsim.stitch(front, back, rows(), **options).penalty == plain.penalty

    def test_hooks_below_the_seam_do_not_touch_what_is_put_there(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        plain = lsim.stitch(front, back, rows(4), at=(2, 2), adapter="identity")
        handles = [back.model.layers[0].register_forward_hook(lambda _m, _a, out: out * 3)]
        handles.append(back.model.layers[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2,)))
        assert lsim.stitch(front, back, rows(4), at=(2, 2), adapter="identity").loss == plain.loss
        assert lsim.stitch(front, back, rows(4), at=(2, 2), adapter="identity").back_loss != plain.back_loss
        for handle in handles:
            handle.remove()

    def test_warnings_point_to_the_users_line(self):
        with pytest.warns(lsim.LayersimWarning) as caught:
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(2), at=(1, 1), fit="lstsq", batch_size=1)
        assert caught[0].filename == __file__

    def test_a_block_that_does_not_run_is_refused_in_words(self):
        # As in a compiled graph, which runs past its modules.
        model = tiny_llama()
        model.spare = torch.nn.Linear(32, 32)
        with pytest.raises(lsim.LayersimError, match=r"did not come to blocks.1.hook_resid_post(.|\n)*torch.compile"):
            lsim.stitch(model, tiny_llama(), rows(4), at=(2, 2), adapter="identity", layers=(["model.layers.0", "spare"], None))


class TestCache:
    def test_a_file_gives_the_same_numbers_and_goes_away(self, tmp_path, capsys):
        front, back = tiny_llama(), tiny_llama(seed=1)
        options = {"at": (2, 2), "adapter": "affine-norm", "fit": "sgd", "batch_size": 6, "training": QUICK}
        here = lsim.stitch(front, back, rows(), **options)
        there = lsim.stitch(front, back, rows(), cache=tmp_path, **options)
        assert torch.equal(here.curve, there.curve)
        assert not list(tmp_path.iterdir())
        # 20 of 24 rows of 16 positions of 32 float32.
        assert "41.0 kB in a file" in capsys.readouterr().err

    def test_too_much_for_memory(self, monkeypatch):
        from tl_layersim.stitching import material

        monkeypatch.setattr(material, "_free", lambda folder: (1000.0, "memory"))
        with pytest.raises(lsim.LayersimError, match="do not fit into the memory"):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(), at=(2, 2), fit="sgd", batch_size=6, training=QUICK)

    def test_half_precision_is_kept_as_it_is(self):
        front = open_half(tiny_llama(dtype=torch.bfloat16), None, False)
        batches = tuple(lsim_batches(rows(8)))
        acts = Activations(front, 2, batches)
        with acts.keep(None):
            assert acts[1].dtype == torch.bfloat16
            assert torch.equal(acts[1], front.hidden(batches[1], 2))

    def test_no_such_folder(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match="no place to go"):
            lsim.stitch(tiny_llama(), tiny_llama(), rows(), at=(1, 1), cache=tmp_path / "nowhere")


class TestInterrupts:
    OPTIONS = {"at": (2, 2), "adapter": "affine", "fit": "lstsq+sgd", "batch_size": 4}  # noqa: RUF012

    @pytest.mark.parametrize("after", [1, 11, 29])
    def test_the_same_call_goes_on_with_the_same_numbers(self, tmp_path, monkeypatch, after):
        from tl_layersim.sources.halves import LocalHalf

        front, back = tiny_llama(), tiny_llama(seed=1)
        whole = lsim.stitch(front, back, rows(80), training=QUICK, **self.OPTIONS)
        plain, calls = LocalHalf.pull, []

        def interrupted(self, *given):
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(1)
            return plain(self, *given)

        monkeypatch.setattr(LocalHalf, "pull", interrupted)
        path = tmp_path / "stitch.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lsim.stitch(front, back, rows(80), training=QUICK, checkpoint=path, **self.OPTIONS)
        again = []
        monkeypatch.setattr(LocalHalf, "pull", lambda self, *given: again.append(1) or plain(self, *given))
        found = lsim.stitch(front, back, rows(80), training=QUICK, checkpoint=path, **self.OPTIONS)
        assert len(again) == 30 - after
        for name in found.tensor_fields():
            assert torch.equal(getattr(found, name), getattr(whole, name)), name
        assert found.explained == whole.explained
        # And what is done is not done again.
        lsim.stitch(front, back, rows(80), training=QUICK, checkpoint=path, **self.OPTIONS)
        assert len(again) == 30 - after

    @pytest.mark.parametrize(
        "change",
        [
            {"at": (1, 2)},
            {"seed": 1},
            {"adapter": "linear"},
            {"ridge": 0.1},
            {"labels": random_tokens(80, 16, 9)},
            {"eval_data": random_tokens(4, 16, 9)},
            {"training": lsim.StitchTraining(steps=31)},
            {"skip_first": 1},
        ],
        ids=str,
    )
    def test_another_call_is_refused(self, tmp_path, change):
        front, back = tiny_llama(), tiny_llama(seed=1)
        path = tmp_path / "stitch.safetensors"
        options = {**self.OPTIONS, "training": QUICK}
        lsim.stitch(front, back, rows(80), checkpoint=path, **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, rows(80), checkpoint=path, **(options | change))
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, rows(81), checkpoint=path, **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, tiny_llama(seed=2), rows(80), checkpoint=path, **options)

    def test_adapters_that_are_given_are_told_apart(self, tmp_path):
        front, back, path = tiny_llama(), tiny_llama(seed=1), tmp_path / "stitch.safetensors"
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
        lsim.stitch(front, back, rows(), at=(1, 1), adapter=lsim.Adapter("affine", weight, torch.zeros(32)), checkpoint=path)
        for other in (
            lsim.Adapter("affine", weight.T.contiguous(), torch.zeros(32)),
            lsim.Adapter("affine", weight, torch.ones(32)),
            lsim.Adapter("linear", weight),
        ):
            with pytest.raises(lsim.LayersimError, match="belongs to another run"):
                lsim.stitch(front, back, rows(), at=(1, 1), adapter=other, checkpoint=path)

    def test_what_is_asked_and_of_what_is_told_apart(self, tmp_path):
        front, back, labels = tiny_llama(), tiny_llama(seed=1), random_tokens(20, 16, 7)
        options = {"at": (1, 1), "adapter": "identity", "labels": "data", "checkpoint": tmp_path / "a"}
        lsim.stitch(front, back, {"input_ids": rows(20), "labels": labels}, **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, {"input_ids": rows(20), "labels": labels.flip(0)}, **options)
        options = {"at": (1, 1), "fit": "lstsq", "batch_size": 4, "checkpoint": tmp_path / "b"}
        lsim.stitch(front, back, rows(20)[:12], eval_data=rows(20)[12:], **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, rows(20)[:16], eval_data=rows(20)[16:], **options)
        options = {"at": (0, 0), "adapter": "identity", "checkpoint": tmp_path / "c"}
        paths = [f"model.layers.{i}" for i in range(3)]
        lsim.stitch(front, back, rows(4), layers=(paths[:2], None), **options)
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.stitch(front, back, rows(4), layers=(paths, None), **options)

    def test_names_of_any_kind(self, tmp_path):
        models = {name: tiny_llama(seed=seed) for seed, name in enumerate(["org/a", "b>c", "org/a>b", "c@1"])}
        options = {"layers": [1], "adapter": "identity"}
        plain = lsim.stitch_grid(models, rows(4), **options)
        for _ in range(2):
            kept = lsim.stitch_grid(models, rows(4), checkpoint=tmp_path / "grid", **options)
            assert torch.equal(kept.values, plain.values)

    def test_trouble_after_the_training_loses_nothing(self, tmp_path, monkeypatch):
        from tl_layersim.stitching.bench import Bench

        front, back, path = tiny_llama(), tiny_llama(seed=1), tmp_path / "stitch.safetensors"
        whole = lsim.stitch(front, back, rows(80), training=QUICK, **self.OPTIONS)

        def interrupted(*given):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Bench, "_judge", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lsim.stitch(front, back, rows(80), training=QUICK, checkpoint=path, **self.OPTIONS)
        from tl_layersim.sources.halves import LocalHalf
        from tl_layersim.stitching import bench

        monkeypatch.setattr(LocalHalf, "pull", interrupted)
        monkeypatch.setattr(bench, "least_squares", interrupted)
        assert lsim.stitch(front, back, rows(80), training=QUICK, checkpoint=path, **self.OPTIONS).penalty == whole.penalty

    def test_data_that_cannot_be_judged_is_found_before_the_work(self, tmp_path, monkeypatch):
        from tl_layersim.sources.halves import LocalHalf

        asked = []
        plain = LocalHalf.pull
        monkeypatch.setattr(LocalHalf, "pull", lambda self, *given: asked.append(1) or plain(self, *given))
        bad = random_tokens(4, 16)
        bad[-1, -1] = 5000
        data, judged = {"input_ids": rows()}, {"input_ids": random_tokens(4, 16, 3), "labels": bad}
        with pytest.raises(lsim.LayersimError, match="none of the model's classes"):
            lsim.stitch(
                tiny_llama(), tiny_llama(seed=1), {**data, "labels": rows().flip(1)}, at=(1, 1), fit="sgd", labels="data",
                eval_data=judged, training=QUICK, batch_size=4, checkpoint=tmp_path / "f",
            )  # fmt: skip
        assert not asked
        assert not (tmp_path / "f").exists()

    def test_a_grid_goes_on_where_it_was(self, tmp_path, monkeypatch):
        from tl_layersim.sources.halves import LocalHalf

        models = {"a": tiny_llama(), "b": tiny_llama(seed=1)}
        options = {"layers": [1, 3], "fit": "sgd", "training": lsim.StitchTraining(steps=4, warmup=1), "batch_size": 2}
        whole = lsim.stitch_grid(models, rows(), **options)
        plain, calls = LocalHalf.pull, []

        def interrupted(self, *given):
            if len(calls) == 18:
                raise KeyboardInterrupt
            calls.append(1)
            return plain(self, *given)

        monkeypatch.setattr(LocalHalf, "pull", interrupted)
        path = tmp_path / "grid.safetensors"
        with pytest.raises(KeyboardInterrupt):
            lsim.stitch_grid(models, rows(), checkpoint=path, **options)
        monkeypatch.setattr(LocalHalf, "pull", lambda self, *given: calls.append(1) or plain(self, *given))
        found = lsim.stitch_grid(models, rows(), checkpoint=path, **options)
        assert len(calls) == 8 * 4
        for name in found.tensor_fields():
            assert torch.equal(getattr(found, name), getattr(whole, name)), name


class TestTrouble:
    @staticmethod
    def losses(monkeypatch, values):
        """Let the back say these losses, with its true slopes."""
        from tl_layersim.sources.halves import LocalHalf

        plain, said = LocalHalf.pull, iter(values)
        monkeypatch.setattr(LocalHalf, "pull", lambda self, *given: (next(said), plain(self, *given)[1]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 11.0])
    @pytest.mark.parametrize("good", [10, 60])
    def test_an_exploding_loss_stops_and_keeps_the_best(self, monkeypatch, bad, good):
        from tl_layersim.stitching import training

        seen = []
        plain = training.Trained

        def noted(step=0, tensors=None, curve=(), *rest, **more):
            seen.append((step, dict(tensors or {})))
            return plain(step, tensors or {}, curve, *rest, **more)

        monkeypatch.setattr(training, "Trained", noted)
        options = {"at": (1, 1), "fit": "sgd", "adapter": "affine-norm", "batch_size": 6}
        self.losses(monkeypatch, [*([5.0] * 25 + [4.0] * 25 + [4.5] * 10)[:good], bad])
        settings = lsim.StitchTraining(steps=80, warmup=10, relative=False)
        kept = "the best one on the way" if good == 60 else "the one that it started from"
        with pytest.warns(lsim.LayersimWarning, match=rf"exploded at step {good + 1} of 80.*The adapter is {kept}"):
            found = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(), training=settings, **options)
        assert found.stopped == good + 1
        assert len(found.curve) == good + 1
        # The best window ended with step 50; before the first one is over there is only the start, which is zero here.
        expected = next(tensors["weight"] for step, tensors in seen if step == 50) if good == 60 else torch.zeros(32, 32)
        assert torch.equal(found.weight.float(), expected.float())

    @pytest.mark.parametrize("steps", [8, 60])
    def test_a_loss_that_ends_higher_is_said_and_the_best_kept(self, steps):
        model, tokens = tiny_llama(), rows(200)
        with torch.no_grad():
            labels = model(tokens).logits.argmax(-1)
        options = {"at": (1, 1), "batch_size": 16, "labels": labels}
        wild = lsim.StitchTraining(steps=steps, lr=1e5, warmup=0)
        with pytest.warns(lsim.LayersimWarning, match=r"higher loss than it began with.*StitchTraining\(lr=1\)"):
            found = lsim.stitch(model, model, tokens, fit="sgd", adapter="affine-norm", training=wild, **options)
        start = lsim.stitch(model, model, tokens, adapter="identity", **options)
        assert found.loss <= start.back_loss + 1e-6
        assert found.stopped == 0

    def test_rows_that_are_fitted_and_judged_are_said(self):
        with pytest.warns(lsim.LayersimWarning, match="3 of 5 rows of eval_data"):
            lsim.stitch(
                tiny_llama(),
                tiny_llama(seed=1),
                rows(40),
                at=(1, 1),
                fit="lstsq",
                eval_data=torch.cat([rows(40)[:3], random_tokens(2, 16, 8)]),
            )

    def test_data_of_one_row_cannot_be_parted(self):
        with pytest.raises(lsim.LayersimError, match="cannot be parted"):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(1), at=(1, 1), fit="lstsq")

    def test_few_tokens_for_least_squares(self):
        with pytest.warns(lsim.LayersimWarning, match=r"16 tokens for 32 features"):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(2), at=(1, 1), fit="lstsq", batch_size=1)

    @pytest.mark.parametrize("layer", [4, -1, "blocks.3.hook_resid_post", "blocks.0.attn"])
    def test_a_layer_that_does_not_exist(self, layer):
        for at in ((layer, 1), (1, layer)):
            with pytest.raises(lsim.LayersimError, match="has no such layer"):
                lsim.stitch(tiny_llama(), tiny_llama(), rows(), at=at, adapter="identity")

    def test_layers_by_name(self):
        model, other = tiny_llama(), tiny_llama(seed=1)
        expected = lsim.stitch(model, other, rows(), at=(1, 2), adapter="identity")
        for at in (
            ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post"),
            ("blocks.1.hook_resid_pre", "blocks.2.hook_resid_pre"),
        ):
            assert lsim.stitch(model, other, rows(), at=at, adapter="identity").penalty == expected.penalty
        assert expected.layers == ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")

    def test_other_tokens(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        front.tokenizer, back.tokenizer = tiny_tokenizer(), tiny_tokenizer(90)
        with pytest.raises(lsim.LayersimError, match="read different tokens"):
            lsim.stitch(front, back, rows(), at=(1, 1), adapter="identity")

    def test_rows_longer_than_one_of_the_models_takes(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        short = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=8)).eval()
        for pair in ((tiny_gpt2(), short), (short, tiny_gpt2())):
            with pytest.raises(lsim.LayersimError, match="longer than the model's context"):
                lsim.stitch(*pair, rows(), at=(1, 1), adapter="identity")

    def test_half_precision(self):
        front, back = tiny_llama(), tiny_llama(seed=1, dtype=torch.float16)
        with pytest.raises(lsim.LayersimError, match="float16 model vanish"):
            lsim.stitch(front, back, rows(), at=(1, 1), fit="sgd")
        for dtype in (torch.float16, torch.bfloat16):
            model = tiny_llama(dtype=dtype)
            assert lsim.stitch(model, model, rows(), at=(2, 2), adapter="identity").penalty == 0.0
            found = lsim.stitch(tiny_llama(seed=1), model, rows(60), at=(2, 2), fit="lstsq")
            wide = lsim.stitch(tiny_llama(seed=1), tiny_llama(), rows(60), at=(2, 2), fit="lstsq")
            assert found.penalty == pytest.approx(wide.penalty, abs=0.03)
        trained = lsim.stitch(
            tiny_llama(seed=1), model, rows(), at=(2, 2), fit="sgd", adapter="affine-norm", batch_size=6, training=QUICK
        )
        wide = lsim.stitch(
            tiny_llama(seed=1), tiny_llama(), rows(), at=(2, 2), fit="sgd", adapter="affine-norm", batch_size=6, training=QUICK
        )
        assert trained.loss == pytest.approx(wide.loss, abs=0.05)
        assert trained.adapter.weight.dtype == torch.float32

    def test_widths(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        wide = LlamaForCausalLM(
            LlamaConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100)
        ).eval()
        with pytest.raises(lsim.LayersimError, match="different widths there is no identity"):
            lsim.stitch(wide, tiny_llama(), rows(), at=(1, 1), adapter="identity")
        with pytest.raises(lsim.LayersimError, match="different widths there is no identity"):
            lsim.stitch(wide, tiny_llama(), rows(), at=(1, 1), fit="sgd", batch_size=6)
        for kind in ("linear", "affine", "affine-norm"):
            found = lsim.stitch(
                wide, tiny_llama(), rows(60), at=(1, 2), adapter=kind, fit="lstsq+sgd", batch_size=6, training=QUICK
            )
            assert found.weight.shape == (32, 48)
            assert found.adapter(torch.zeros(2, 48)).shape == (2, 32)
            assert float(found.curve[-5:].mean()) < float(found.curve[:5].mean())
            with torch.no_grad():
                assert found.model(rows(2)).logits.shape == (2, 16, 100)
        with pytest.raises(lsim.LayersimError, match="does not fit between these"):
            lsim.stitch(tiny_llama(), wide, rows(), at=(1, 1), adapter=found.adapter)

    def test_identity_between_bases_is_said(self):
        bridge = TestEveryKind.build("bridge", 0)
        bridge.enable_compatibility_mode()
        with pytest.warns(lsim.LayersimWarning, match="written in different bases"):
            lsim.stitch(bridge, tiny_gpt2(1), rows(4, 8), at=(1, 1), adapter="identity")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"adapter": "identity", "fit": "lstsq"}, "nothing to fit"),
            ({"adapter": "identity", "training": QUICK}, "nothing to fit"),
            ({"fit": "lstsq", "training": QUICK}, "Nothing is trained by gradients"),
            ({"fit": "sgd", "ridge": 1.0}, "ridge belongs to least squares"),
            ({"fit": "lstsq", "ridge": -1.0}, "ridge belongs to least squares"),
            ({"adapter": "twisted"}, "does not take this for adapter"),
            ({"fit": "adam"}, "does not take this for fit"),
            ({"eval_data": []}, "nothing to answer in eval_data"),
            ({"labels": "class"}, "no place to take labels from"),
            ({"cache": "."}, "Nothing is kept where nothing is trained"),
        ],
    )
    def test_options_that_do_not_fit(self, options, message):
        with pytest.raises(lsim.LayersimError, match=message):
            lsim.stitch(
                tiny_llama(),
                tiny_llama(seed=1),
                rows(),
                **({"at": (1, 1), "fit": "lstsq"} | options if "adapter" not in options else {"at": (1, 1)} | options),
            )

    @pytest.mark.parametrize(
        "settings", [{"steps": 0}, {"lr": 0.0}, {"lr": math.nan}, {"momentum": 1.0}, {"warmup": -1}, {"clip": 0.0}]
    )
    def test_settings_of_a_training(self, settings):
        with pytest.raises(lsim.LayersimError, match="out of range"):
            lsim.StitchTraining(**settings)

    @pytest.mark.parametrize("data", [[], torch.zeros(3, 1, dtype=torch.int64), [[5]]])
    def test_no_data(self, data):
        with pytest.raises(lsim.LayersimError, match="nothing to answer"):
            lsim.stitch(tiny_llama(), tiny_llama(), data, at=(1, 1), adapter="identity")

    def test_a_back_that_is_broken(self):
        broken = tiny_llama()
        with torch.no_grad():
            broken.model.layers[2].mlp.down_proj.weight.fill_(torch.nan)
        with pytest.raises(lsim.LayersimError, match="is NaN, before anything is stitched"):
            lsim.stitch(tiny_llama(), broken, rows(), at=(1, 1), adapter="identity")

    def test_a_front_that_is_broken_is_said(self):
        broken = tiny_llama()
        with torch.no_grad():
            broken.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
        with pytest.warns(lsim.LayersimWarning, match="stitched loss of .* is not finite"):
            found = lsim.stitch(broken, tiny_llama(), rows(), at=(2, 2), adapter="identity")
        assert math.isnan(found.penalty)
        with pytest.raises(lsim.LayersimError, match="not finite, so nothing can be fitted"):
            lsim.stitch(broken, tiny_llama(), rows(), at=(2, 2), fit="lstsq", batch_size=6)

    def test_blocks_that_are_not_the_residual(self):
        model = tiny_llama()
        paths = ["model.layers.2", "model.layers.0"]
        with pytest.raises(lsim.LayersimError, match="cannot be entered at"):
            lsim.stitch(model, model, rows(), at=(1, 2), adapter="identity", layers=(None, paths))

    def test_a_layer_that_nothing_reads(self):
        class Deaf(torch.nn.Module):
            """Says the same whatever its blocks give."""

            def __init__(self):
                super().__init__()
                self.embed, self.head = torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100)
                self.steps = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

            def forward(self, tokens):
                x = self.embed(tokens)
                self.steps[1](self.steps[0](x))
                return self.head(x)

        paths = ["steps.0", "steps.1"]
        with pytest.raises(lsim.LayersimError, match=r"cannot be entered(.|\n)*and another with another"):
            lsim.stitch(Deaf(), Deaf(), rows(4), at=(1, 1), adapter="identity", layers=(paths, paths))

    def test_a_source_of_ones_own(self):
        from tl_layersim.sources import open_source

        class Own(lsim.Source):
            model = open_source(tiny_llama()).model

            def run(self, batch, kernels): ...

            def collect(self, batch): ...

        with pytest.raises(lsim.LayersimError, match="runs parts of models"):
            lsim.stitch(Own(), tiny_llama(), rows(), at=(1, 1), adapter="identity")


class TestResult:
    @pytest.fixture(scope="class")
    def found(self):
        return lsim.stitch(
            tiny_llama(),
            tiny_llama(seed=1),
            rows(),
            at=(2, 1),
            fit="lstsq+sgd",
            batch_size=4,
            training=lsim.StitchTraining(steps=60, warmup=5),
        )

    def test_comes_back_from_a_file(self, found, tmp_path):
        again = lsim.load(found.save(tmp_path / "stitch.safetensors"))
        assert again.penalty == found.penalty
        assert again.penalty_interval(0.9) == found.penalty_interval(0.9)
        assert torch.equal(again.adapter.weight, found.adapter.weight)
        assert again.provenance == found.provenance
        with pytest.raises(lsim.LayersimError, match="not at hand"):
            _ = again.model
        tokens = rows(3, 8)
        joined = lsim.stitch(tiny_llama(), tiny_llama(seed=1), tokens, at=(2, 1), adapter=again.adapter)
        with torch.no_grad():
            assert torch.equal(joined.model(tokens).logits, found.model(tokens).logits)

    def test_tables_and_plots(self, found):
        table = found.to_frame()
        assert list(table.columns) == ["step", "curve"]
        assert len(table) == 60
        batches = found.to_frame("batch_loss")
        assert {"batch", "batch_tokens", "batch_back_loss"} <= set(batches.columns)
        names = [trace.name for trace in found.plot().data]
        assert names[:2] == ["each step", "mean of 15 steps"]
        assert f"back alone, judged: {found.back_loss:.3f}" in names
        each = found.plot("penalty").data[0].y
        np.testing.assert_allclose(each, (found.batch_loss - found.batch_back_loss) / found.batch_tokens)
        plain = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(), at=(2, 1), adapter="identity")
        assert plain.plot().layout.title.text == "Penalty by batch"
        assert "nats a token" in plain.plot().layout.yaxis.title.text
        assert len(found.plot("batch_loss").data) == 1
        assert "penalty, nats" in repr(found)

    def test_what_is_recorded(self, found):
        options = found.provenance.options
        assert options["at"] == ["blocks.1.hook_resid_post", "blocks.0.hook_resid_post"]
        assert options["training"]["steps"] == 60
        assert options["fit_batches"] == 5
        assert found.provenance.tokens == int(found.batch_tokens.sum())
        assert found.provenance.seed == 0

    def test_in_a_report(self, found, tmp_path):
        page = lsim.Report({"stitch": found}).to_html(tmp_path / "page.html").read_text()
        assert "Learning curve of the adapter" in page


class TestGrid:
    @pytest.fixture(scope="class")
    def models(self):
        return {"a": tiny_llama(), "b": tiny_llama(seed=1)}

    @pytest.fixture(scope="class")
    def grid(self, models):
        return lsim.stitch_grid(models, rows(80), fit="lstsq", batch_size=4)

    def test_each_cell_is_a_stitch(self, models, grid):
        assert grid.fronts == ("a", "b")
        assert grid.seams == tuple(f"blocks.{i}.hook_resid_post" for i in range(3))
        for i, a in enumerate(models):
            for j, b in enumerate(models):
                for s in (0, 2):
                    one = lsim.stitch(models[a], models[b], rows(80), at=(s + 1, s + 1), fit="lstsq", batch_size=4)
                    assert float(grid.penalty[i, j, s]) == one.penalty
                    assert float(grid.loss[i, j, s]) == one.loss
                    assert (float(grid.low[i, j, s]), float(grid.high[i, j, s])) == tuple(one.penalty_interval())[1:]
                    assert float(grid.accuracy_penalty[i, j, s]) == one.accuracy_penalty

    def test_asymmetry(self, grid):
        table = grid.asymmetry("a", "b")
        np.testing.assert_allclose(table["difference"], (grid.penalty[0, 1] - grid.penalty[1, 0]).numpy(), atol=1e-12)
        assert (table["low"] <= table["difference"]).all()
        assert (table["difference"] <= table["high"]).all()
        swapped = grid.asymmetry("b", "a")
        np.testing.assert_allclose(swapped["difference"], -table["difference"], atol=1e-12)
        with pytest.raises(lsim.LayersimError, match="no such model"):
            grid.asymmetry("a", "c")

    def test_beyond_what_fitting_costs(self, models):
        # Trained, so that models with themselves do not come out at zero.
        options = {"layers": [1, 2], "fit": "sgd", "adapter": "affine-norm", "training": QUICK, "batch_size": 8}
        grid = lsim.stitch_grid(models, rows(40), **options)
        assert grid.penalty[0, 0].abs().min() > 1e-3
        table = grid.beyond_self()
        assert list(table.front) == ["a"] * 2 + ["b"] * 2
        for _, row in table.iterrows():
            a, b, s = grid.fronts.index(row.front), grid.fronts.index(row.back), grid.seams.index(row.seam)
            assert row.difference == pytest.approx(float(grid.penalty[a, b, s] - grid.penalty[b, b, s]))
            assert row.low < row.difference < row.high

    def test_tables_plots_and_files(self, grid, tmp_path):
        table = grid.to_frame()
        assert len(table) == 2 * 2 * 3
        assert {"front", "back", "seam", "penalty", "low", "high", "loss", "back_loss", "accuracy_penalty"} <= set(
            table.columns
        )
        figure = grid.plot()
        assert [trace.name for trace in figure.data] == ["a into b", "b into a", "a into a", "b into b"]
        assert list(figure.layout.xaxis.ticktext) == ["0", "1", "2"]
        assert grid.plot("accuracy_penalty").data[0].error_y.array is not None
        np.testing.assert_allclose(grid.plot("loss").data[0].y, grid.loss[0, 1])
        assert "affine, lstsq" in figure.layout.title.text
        again = lsim.load(grid.save(tmp_path / "grid.safetensors"))
        assert torch.equal(again.values, grid.values)
        page = lsim.Report({"stitches": grid}).to_html(tmp_path / "page.html").read_text()
        assert "Stitching penalty" in page

    def test_models_of_different_depths(self, models):
        mixed = {"a": models["a"], "deep": tiny_llama(5, seed=2)}
        with pytest.raises(lsim.LayersimError, match="not of one depth"):
            lsim.stitch_grid(mixed, rows(), adapter="identity")
        grid = lsim.stitch_grid(mixed, rows(), adapter="identity", layers={"a": [1, 3], "deep": [2, 5]})
        one = lsim.stitch(mixed["deep"], mixed["a"], rows(), at=(2, 1), adapter="identity")
        assert float(grid.penalty[1, 0, 0]) == one.penalty
        assert grid.seams[0] == "a blocks.0.hook_resid_post, deep blocks.1.hook_resid_post"
        assert grid.penalty[0, 0].abs().max() == 0

    @pytest.mark.parametrize("layers", [[], {"a": [1]}, {"a": [1, 2], "b": [1]}])
    def test_seams_that_do_not_fit(self, models, layers):
        with pytest.raises(lsim.LayersimError, match="seams do not fit"):
            lsim.stitch_grid(models, rows(), adapter="identity", layers=layers)

    def test_models_without_names(self, models):
        with pytest.raises(lsim.LayersimError, match="names for its models"):
            lsim.stitch_grid(list(models.values()), rows(), adapter="identity")


class TestStitchedModel:
    @pytest.fixture(scope="class")
    def found(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        front.tokenizer = back.tokenizer = tiny_tokenizer()
        return lsim.stitch(front, back, rows(), at=(2, 1), fit="lstsq", batch_size=4)

    def test_generates_what_its_logits_say(self, found):
        tokens = rows(1, 5)
        expected = tokens
        with torch.no_grad():
            for _ in range(6):
                expected = torch.cat([expected, found.model(expected).logits[:, -1:].argmax(-1)], 1)
        made = found.model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert torch.equal(made, expected)
        text = found.model.generate("w5 w6", max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert text.startswith("w5 w6")

    def test_making_it_changes_no_mode(self):
        front, back = tiny_llama().train(), tiny_llama(seed=1)
        _ = lsim.stitch(front, back, rows(4), at=(1, 1), adapter="identity").model
        assert front.training
        assert all(module.training for module in front.modules())
        assert not back.training

    def test_left_padding_in_generation(self, found):
        tokens = rows(1, 5)
        alone = found.model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
        padded = torch.cat([torch.full((1, 3), 2), tokens], 1)
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        made = found.model.generate(
            padded, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        assert torch.equal(made[:, 3:], alone)

    @pytest.mark.parametrize("kinds", [("gpt2", "gpt2"), ("gpt2", "llama"), ("llama", "gpt2")])
    def test_left_padding_with_absolute_positions(self, kinds):
        def strong(kind, seed):
            model = (tiny_gpt2 if kind == "gpt2" else tiny_llama)(seed=seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(4 if kind == "gpt2" else 1)
            return model

        front, back = strong(kinds[0], 0), strong(kinds[1], 1)
        joined = lsim.stitch(front, back, rows(4), at=(2, 1), adapter="identity").model
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        tokens = rows(2)
        mask = torch.ones_like(tokens)
        mask[0, :5] = 0
        padded = joined.generate(tokens, attention_mask=mask, **options)
        assert torch.equal(padded[0, 5:], joined.generate(tokens[:1, 5:], **options)[0])

    def test_one_model_twice_is_measured_above_the_seam(self):
        model, tokens = tiny_llama(), rows(8)
        turn = lsim.Adapter("linear", torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0])
        for at in ((3, 1), (2, 1), (1, 2), (1, 0)):
            twice = lsim.stitch(model, model, tokens, at=at, adapter=turn).model
            apart = lsim.stitch(model, copy.deepcopy(model), tokens, at=at, adapter=turn).model
            analyzers = [lsim.CKA(minibatch=32), lsim.LogitLens(), lsim.BlockCoupling(k=3)]
            one, other = (lsim.analyze(m, tokens, analyzers) for m in (twice, apart))
            for name in one:
                for field in one[name].tensor_fields():
                    a, b = getattr(one[name], field), getattr(other[name], field)
                    torch.testing.assert_close(a, b, equal_nan=True, msg=f"{at} {name} {field}")
            with lsim.attach(twice, [lsim.LogitLens()]) as probe, torch.no_grad():
                twice(tokens)
            torch.testing.assert_close(probe.results()["logit_lens"].cross_entropy, one["logit_lens"].cross_entropy)

    def test_its_first_layer_is_what_the_adapter_gives(self):
        from tl_layersim.sources import open_source

        front, back = tiny_llama(), tiny_llama(seed=1)
        half = open_half(front, None, False)
        [batch] = lsim_batches(rows(4), 4)
        for at in ((1, 0), (0, 0), (2, 1)):
            joined = lsim.stitch(front, back, rows(4), at=at, adapter=lsim.Adapter("linear", torch.eye(32) * 2)).model
            seen = open_source(joined).collect(batch).residual[0]
            torch.testing.assert_close(seen, 2 * half.hidden(batch, at[0]).reshape(-1, 32))

    def test_another_adapter_is_another_model(self, tmp_path):
        front, back = tiny_llama(), tiny_llama(seed=1)
        joined = [
            lsim.stitch(front, back, rows(4), at=(1, 1), adapter=lsim.Adapter("linear", torch.eye(32) * size)).model
            for size in (1, 2)
        ]
        lsim.analyze(joined[0], rows(4), [lsim.CKA(minibatch=32)], checkpoint=tmp_path / "f")
        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.analyze(joined[1], rows(4), [lsim.CKA(minibatch=32)], checkpoint=tmp_path / "f")

    def test_the_tokenizer_that_was_given(self):
        front, back = tiny_llama(), tiny_llama(seed=1)
        found = lsim.stitch(front, back, ["w5 w6 w7 w8"], at=(1, 1), adapter="identity", tokenizer=tiny_tokenizer())
        options = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 2}
        assert found.model.generate("w5 w6", do_sample=False, **options).startswith("w5 w6")
        assert len(found.model.generate("w5 w6", do_sample=True, num_return_sequences=3, **options)) == 3

    def test_a_model_of_ones_own(self):
        class Own(torch.nn.Module):
            def __init__(self, seed):
                super().__init__()
                torch.manual_seed(seed)
                self.embed = torch.nn.Embedding(100, 32)
                self.steps = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
                self.head = torch.nn.Linear(32, 100)

            def forward(self, tokens):
                x = self.embed(tokens)
                for step in self.steps:
                    x = x + 0 * x
                    x = step(x)
                return self.head(x)

        paths = [f"steps.{i}" for i in range(3)]
        front, back = Own(0), Own(1)
        found = lsim.stitch(front, back, rows(4), at=(2, 1), adapter="identity", layers=(paths, paths))
        with torch.no_grad():
            logits = found.model(rows(4))
        assert next_token_loss(logits, rows(4)) == pytest.approx(found.loss, abs=1e-5)
        with pytest.raises(lsim.LayersimError, match="does not generate"):
            found.model.generate(rows(1))

    def test_a_bridge_generates(self):
        found = lsim.stitch(
            TestEveryKind.build("bridge", 0), TestEveryKind.build("bridge", 1), rows(4, 8), at=(1, 1), adapter="identity"
        )
        tokens, expected = rows(1, 4), rows(1, 4)
        with torch.no_grad():
            for _ in range(4):
                logits = found.model(expected)
                expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        made = found.model.generate(tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False)
        assert torch.equal(made, expected)

    def test_no_cache(self, found):
        with pytest.raises(lsim.LayersimError, match="keeps no cache"):
            found.model(rows(1), use_cache=True)

    def test_measured_like_any_model(self, found):
        tokens = rows(6, 9)
        report = lsim.analyze(found.model, tokens, [lsim.LogitLens(), lsim.Cosine(center="none"), lsim.Trajectory()])
        judged = lsim.stitch(tiny_llama(), tiny_llama(seed=1), tokens, at=(2, 1), adapter=found.adapter)
        assert float(report["logit_lens"].cross_entropy[-1]) == pytest.approx(judged.loss, abs=1e-6)
        assert report["cosine"].layers == ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")
        assert "affine" in report["cosine"].provenance.model
        # The first layer is what the adapter gives.
        half = open_half(tiny_llama(), None, False)
        [batch] = lsim_batches(tokens, 6)
        norm = float(found.adapter(half.hidden(batch, 2)).norm(dim=-1).mean())
        assert float(report["trajectory"].norm[0]) == pytest.approx(norm, rel=1e-5)

    def test_its_pages_name_the_backs_blocks(self, found):
        report = lsim.analyze(found.model, rows(6, 9), [lsim.LogitLens(), lsim.Cosine(center="none"), lsim.CKA(minibatch=32)])
        assert "accuracy after block 2" in repr(report)
        assert "COS(blocks.1 input, last)" in repr(report)
        assert "CKA(blocks.1 input, last)" in repr(report)
        assert list(report["cosine"].plot().layout.xaxis.ticktext) == ["into 1", "1", "2"]

    def test_in_attach_and_compare(self, found):
        tokens = rows(6, 9)
        with lsim.attach(found.model, [lsim.LogitLens()]) as probe, torch.no_grad():
            found.model(tokens)
        expected = lsim.analyze(found.model, tokens, [lsim.LogitLens()])["logit_lens"]
        torch.testing.assert_close(probe.results()["logit_lens"].cross_entropy, expected.cross_entropy)
        same = lsim.compare(found.model, found.model, tokens, lsim.CKA(minibatch=32))
        assert same.distance() < 1e-3

    def test_nothing_above_the_last_layer(self):
        model = tiny_llama()
        found = lsim.stitch(model, model, rows(4), at=(3, 3), adapter="identity")
        with torch.no_grad():
            assert torch.equal(found.model(rows(4)).logits, model(rows(4)).logits)
        with pytest.raises(lsim.LayersimError, match="no blocks left"):
            lsim.analyze(found.model, rows(4), ["cosine"])

    def test_gradients_reach_what_comes_before_the_adapter_and_nothing_is_left(self, found):
        back = found.model.back
        with pytest.raises(lsim.LayersimError, match="reads tokens"):
            found.model(inputs_embeds=torch.zeros(1, 3, 32), input_ids=None)
        assert all("forward" not in vars(module) for module in back.modules())
