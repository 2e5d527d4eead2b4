"""Stitching: losses, fits and intervals against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_split_model
from tl_layersim.stitching.stitch_results import over_texts

from ..models.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import next_token_loss, rotated, rows


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


class TestNumbers:
    @pytest.mark.light("('blocks.0.hook_resid_pre', 'blocks.0.hook_resid_pre')-(0, 0)", "(-2, -1)-(2, 3)")
    @pytest.mark.parametrize(
        ("at", "blocks"),
        [
            (("blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"), (0, 0)),
            ((0, 0), (1, 1)),
            ((0, 1), (1, 2)),
            ((2, "blocks.0.hook_resid_post"), (3, 1)),
            ((-2, -1), (2, 3)),
        ],
    )
    def test_losses_are_the_formula(self, at, blocks):
        front = tiny_gpt2(0).double()
        back = tiny_gpt2(1).double()
        tokens = rows(6, 10)

        result = lsim.stitch(front, back, tokens, at=at, adapter="identity")
        with torch.no_grad():
            x = gpt2_parts(front, tokens)[blocks[0]]
            stitched = next_token_loss(gpt2_upper(back, x, blocks[1]), tokens)
            own_loss = next_token_loss(back(tokens).logits, tokens)
            hits = (gpt2_upper(back, x, blocks[1])[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean()

        assert result.loss == pytest.approx(stitched, abs=1e-9)
        assert result.back_loss == pytest.approx(own_loss, abs=1e-9)
        assert result.penalty == pytest.approx(stitched - own_loss, abs=1e-9)
        assert result.accuracy == pytest.approx(float(hits))
        assert result.accuracy_penalty == pytest.approx(result.back_accuracy - float(hits))

    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    def test_closed_form_on_a_model(self, kind):
        front = tiny_gpt2(0).double()
        back = tiny_gpt2(1).double()
        tokens = rows(40, 10)
        result = lsim.stitch(front, back, lsim.Data(tokens, batch_size=8), at=(1, 0), adapter=kind, fit="lstsq")
        fit = tokens[:32]
        held_out = tokens[32:]
        with torch.no_grad():
            x = gpt2_parts(front, fit)[2].reshape(-1, 32).numpy()
            y = gpt2_parts(back, fit)[1].reshape(-1, 32).numpy()
            new = gpt2_parts(front, held_out)[2].reshape(-1, 32).numpy()

            def features(h):
                if kind != "affine-norm":
                    return h if kind == "linear" else np.hstack([h, np.ones((len(h), 1))])
                normed = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
                return np.hstack([normed, np.ones((len(h), 1))])

            offset = (lambda h: h) if kind == "affine-norm" else (lambda h: 0 * h)
            coefficients = np.linalg.lstsq(features(x), y - offset(x), rcond=None)[0]
            out = torch.as_tensor(features(new) @ coefficients + offset(new)).view(8, 10, 32)
            assert result.loss == pytest.approx(next_token_loss(gpt2_upper(back, out, 1), held_out), abs=1e-6)

    @pytest.mark.light("linear-True")
    @pytest.mark.parametrize("relative", [True, False])
    @pytest.mark.parametrize("kind", ["linear", "affine", "affine-norm"])
    def test_training_is_torchs_sgd_on_the_whole_stitched_model(self, kind, relative):
        """The same steps by hand: whole models, plain autograd, torch's optimiser, in float64."""
        front = tiny_gpt2(0).double()
        back = tiny_gpt2(1).double()
        tokens = rows(12, 10)
        settings = lsim.stitching.StitchTraining(steps=12, lr=0.3, warmup=4, clip=0.7, relative=relative, seed=3)

        result = lsim.stitch(
            front,
            back,
            lsim.Data(tokens[:8], batch_size=4),
            at=(1, 0),
            adapter=kind,
            fit="sgd",
            training=settings,
            eval_data=tokens[8:],
        )
        with torch.no_grad():
            hidden = [gpt2_parts(front, tokens[i : i + 4])[2] for i in (0, 4)]
            back_hidden = gpt2_parts(back, tokens[:4])[1].numpy()
        unit = 1.0
        size = 1.0
        if relative:
            unit = float(np.exp(np.log(np.sqrt((back_hidden**2).mean(-1))).mean()))
            u = hidden[0].numpy()
            u = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-5) if kind == "affine-norm" else u
            size = float(np.exp(np.log(np.sqrt((u**2).mean(-1))).mean()))
        start = torch.zeros(32, 32) if kind == "affine-norm" else torch.eye(32)
        a = torch.zeros(32, 32, dtype=torch.float64, requires_grad=True)
        b = torch.zeros(32, dtype=torch.float64, requires_grad=True)
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

        np.testing.assert_allclose(result.curve.numpy(), curve, rtol=1e-7)
        torch.testing.assert_close(result.weight, (start.double() + a * unit / size).detach(), rtol=1e-7, atol=1e-9)

        with torch.no_grad():
            out = apply(gpt2_parts(front, tokens[8:])[2])
        assert result.loss == pytest.approx(next_token_loss(gpt2_upper(back, out, 1), tokens[8:]), abs=1e-6)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_a_planted_rotation(self):
        model = tiny_llama(4)
        turned, q = rotated(model)
        tokens = rows(80, 20)
        with torch.no_grad():
            logits = model(tokens).logits
            torch.testing.assert_close(logits[:2], turned(tokens[:2]).logits, rtol=1e-3, atol=1e-4)
        # A random model predicts nothing but its own first choices.
        options = {"labels": logits.argmax(-1)}

        for at in ((0, 0), (2, 2)):
            plain = lsim.stitch(model, turned, tokens, at=at, adapter="identity", **options)
            result = lsim.stitch(model, turned, tokens, at=at, adapter="linear", fit="lstsq", **options)
            assert plain.penalty > 0.5
            assert plain.accuracy < 0.3
            assert result.accuracy > 0.99
            assert abs(result.penalty) < 1e-3
            torch.testing.assert_close(result.weight, q, atol=2e-4, rtol=0)
            assert result.explained > 0.99999

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
    def test_a_model_with_itself_costs_nothing(self, build):
        model = build()
        for layer in open_split_model(model).model.layers:
            result = lsim.stitch(model, model, lsim.Data(rows(5, 12), batch_size=2), at=(layer, layer), adapter="identity")
            assert result.penalty == 0.0
            assert result.accuracy_penalty == 0.0
            assert tuple(result.penalty_interval()) == (0.0, 0.0, 0.0)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_padding_changes_nothing(self):
        front = tiny_llama(seed=0).double()
        back = tiny_llama(seed=1).double()
        lengths = [5, 12, 9, 2]
        ragged = [rows(4, 12)[i, :n].tolist() for i, n in enumerate(lengths)]

        together = lsim.stitch(front, back, lsim.Data({"input_ids": ragged}, batch_size=4), at=(1, 0), adapter="identity")
        alone = lsim.stitch(front, back, lsim.Data({"input_ids": ragged}, batch_size=1), at=(1, 0), adapter="identity")

        assert together.loss == pytest.approx(alone.loss, abs=1e-10)
        assert int(together.text_tokens.sum()) == sum(n - 1 for n in lengths)

        options = {"at": (1, 0), "adapter": "linear", "fit": "lstsq", "eval_data": rows(2), "ridge": 1.0}
        with pytest.warns(lsim.LayersimWarning, match="28 tokens for 32 features"):
            fits = [lsim.stitch(front, back, lsim.Data({"input_ids": ragged}, batch_size=n), **options) for n in (1, 4)]
        torch.testing.assert_close(fits[0].weight, fits[1].weight, rtol=1e-9, atol=1e-12)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_skipped_positions_are_fitted_and_not_counted(self):
        model = tiny_llama()
        back = tiny_llama(seed=1)
        tokens = rows(20, 10)

        all_of_it = lsim.stitch(model, back, lsim.Data(tokens, batch_size=4), at=(0, 0), adapter="linear", fit="lstsq")
        later = lsim.stitch(
            model, back, lsim.Data(tokens, batch_size=4, skip_first=4), at=(0, 0), adapter="linear", fit="lstsq"
        )

        torch.testing.assert_close(all_of_it.weight, later.weight)
        assert int(all_of_it.text_tokens.sum()) == 4 * 9
        assert int(later.text_tokens.sum()) == 4 * 5

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_held_out_rows_do_not_depend_on_the_batch_size(self):
        model = tiny_llama()
        back = tiny_llama(seed=1)
        tokens = rows(37)

        sizes = [
            lsim.stitch(model, back, lsim.Data(tokens, batch_size=n), at=(0, 0), adapter="linear", fit="lstsq")
            for n in (1, 5, 37)
        ]

        for result in sizes[1:]:
            assert int(result.text_tokens.sum()) == 7 * 15
            torch.testing.assert_close(result.weight, sizes[0].weight)
            assert result.penalty == pytest.approx(sizes[0].penalty, abs=1e-6)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_the_last_fifth_is_held_out(self):
        model = tiny_llama()
        back = tiny_llama(seed=1)
        tokens = rows(40, 10)

        result = lsim.stitch(model, back, lsim.Data(tokens, batch_size=4), at=(0, 0), adapter="linear", fit="lstsq")
        apart = lsim.stitch(
            model, back, lsim.Data(tokens[:32], batch_size=4), at=(0, 0), adapter="linear", fit="lstsq", eval_data=tokens[32:]
        )

        assert torch.equal(result.weight, apart.weight)
        assert result.penalty == apart.penalty

        evaluated = lsim.stitch(model, back, lsim.Data(tokens[32:], batch_size=4), at=(0, 0), adapter=apart.adapter)
        assert evaluated.penalty == apart.penalty
        assert evaluated.fit == ""

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_evaluation_data_is_read_as_the_data_or_by_options_of_its_own(self):
        model = tiny_llama()
        back = tiny_llama(seed=1)
        tokens = rows(40, 10)
        data = lsim.Data(tokens[:32], batch_size=4, skip_first=2)
        options = {"at": (0, 0), "adapter": "linear", "fit": "lstsq"}

        like = lsim.stitch(model, back, data, eval_data=tokens[32:], **options)

        for eval_data, count in ((lsim.Data(tokens[32:]), 8 * 9), (lsim.Data(tokens[32:], positions=slice(2, 5)), 8 * 3)):
            result = lsim.stitch(model, back, data, eval_data=eval_data, **options)
            assert torch.equal(result.weight, like.weight)
            assert int(result.text_tokens.sum()) == count
        assert int(like.text_tokens.sum()) == 8 * 7

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_the_evaluated_adapter_is_the_one_returned(self):
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        front = tiny_gpt2(0)
        back = tiny_gpt2(1)

        wide = lsim.stitch(front, back, rows(4), at=(0, 0), adapter=lsim.stitching.Adapter("linear", weight))
        narrow = lsim.stitch(front, back, rows(4), at=(0, 0), adapter=lsim.stitching.Adapter("linear", weight.float()))

        assert wide.loss == narrow.loss
        assert torch.equal(wide.weight, weight.float().double())

        double = lsim.stitch(
            front.double(), back.double(), rows(4), at=(0, 0), adapter=lsim.stitching.Adapter("linear", weight)
        )
        assert torch.equal(double.adapter.weight, weight)

    def test_a_table_of_labels_is_of_one_data_set(self):
        table = torch.full((6, 8), 5)
        with pytest.raises(lsim.LayersimError, match=r"`labels`.*`eval_data`"):
            lsim.stitch(
                tiny_gpt2(0), tiny_gpt2(1), rows(6, 8), at=(0, 0), adapter="identity", labels=table, eval_data=rows(6, 8)
            )

    def test_the_tokenizer_of_either(self):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        back.tokenizer = tiny_tokenizer()

        by_text = lsim.stitch(front, back, ["w5 w6 w7 w8"], at=(0, 0), adapter="identity")
        by_ids = lsim.stitch(front, back, torch.tensor([[1, 5, 6, 7, 8]]), at=(0, 0), adapter="identity")

        assert by_text.loss == by_ids.loss

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_labels_of_ones_own(self):
        model = tiny_gpt2(0)
        back = tiny_gpt2(1)
        tokens = rows(6, 8)
        shifted = torch.full_like(tokens, -100)
        shifted[:, :-1] = tokens[:, 1:]

        usual = lsim.stitch(model, back, tokens, at=(0, 0), adapter="identity")
        table = lsim.stitch(model, back, tokens, at=(0, 0), adapter="identity", labels=shifted)

        assert usual.loss == table.loss

        shifted[:, :4] = -100
        fewer = lsim.stitch(model, back, tokens, at=(0, 0), adapter="identity", labels=shifted)
        assert int(fewer.text_tokens.sum()) == 6 * 3

    def test_the_interval_does_not_depend_on_the_batch_size(self):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        ragged = {"input_ids": [rows(25, 12)[i, : 3 + i % 9].tolist() for i in range(25)]}

        fine = lsim.stitch(front, back, lsim.Data(ragged, batch_size=2), at=(0, 0), adapter="identity")
        coarse = lsim.stitch(front, back, lsim.Data(ragged, batch_size=25), at=(0, 0), adapter="identity")

        assert fine.text_tokens.tolist() == coarse.text_tokens.tolist() == [2.0 + i % 9 for i in range(25)]
        torch.testing.assert_close(coarse.text_loss, fine.text_loss, rtol=0, atol=1e-4)
        assert coarse.penalty_interval() == pytest.approx(fine.penalty_interval(), abs=1e-5)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 40)), min_size=2, max_size=70))
    def test_the_interval_is_that_of_the_jackknife_over_blocks_of_texts(self, pairs):
        """Against plain Python, without the correction for skewness, which can only make an interval longer."""
        from scipy.stats import t

        sums, tokens = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
        value, low, high = over_texts(sums, tokens, 0.9)
        counted = [(s, n) for s, n in pairs if n > 0]

        if len(counted) < 2:
            assert math.isnan(low)
            assert math.isnan(high)
            return

        size = 1 if len(counted) < 32 else 2 if len(counted) < 64 else 4
        blocks = [counted[start : start + size] for start in range(0, len(counted), size)]
        without = []
        for left_out in range(len(blocks)):
            remaining = [pair for number, block in enumerate(blocks) if number != left_out for pair in block]
            without.append(sum(s for s, _ in remaining) / sum(n for _, n in remaining))
        mean = sum(s for s, _ in counted) / sum(n for _, n in counted)
        assert value == pytest.approx(mean, abs=1e-9)
        # Blocks that change nothing have no degree of freedom.
        if all(abs(estimate - mean) > 1e-6 for estimate in without):
            g = len(blocks)
            middle = sum(without) / g
            margin = t.ppf(0.95, g - 1) * math.sqrt((g - 1) / g * sum((estimate - middle) ** 2 for estimate in without))
            assert low <= value - margin + 1e-9 * (1 + abs(margin))
            assert high >= value + margin - 1e-9 * (1 + abs(margin))

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_the_interval_holds_what_it_promises(self):
        rng = np.random.default_rng(0)
        for count in (8, 40):
            inside = 0
            for _ in range(500):
                tokens = rng.integers(50, 150, size=count)
                sums = tokens * (0.3 + 0.1 * rng.normal(size=count))
                low, high = over_texts(torch.as_tensor(sums), torch.as_tensor(tokens).double(), 0.95)[1:]
                inside += low < 0.3 < high
            assert 0.92 < inside / 500 < 0.985

    def test_one_text_has_no_interval(self):
        result = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(1), at=(0, 0), adapter="identity")
        assert all(math.isnan(end) for end in result.penalty_interval()[1:])
        assert "nan" in repr(result)

    @pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 3), (1, 0), (5, 4), (40, None)])
    def test_rates_rise_and_fall(self, steps, warmup):
        training = lsim.stitching.StitchTraining(steps=steps, warmup=warmup)
        rates = [training.rate(step) for step in range(steps)]

        assert all(rate > 0 for rate in rates)
        assert max(rates) == pytest.approx(0.1)

        top = rates.index(max(rates))
        assert rates[: top + 1] == sorted(rates[: top + 1])
        assert rates[top:] == sorted(rates[top:], reverse=True)
