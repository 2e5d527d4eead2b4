"""Refusals and warnings of stitching."""

from __future__ import annotations

import math

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources import Source

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import QUICK, gpt2_of_kind, rows


class Unread(torch.nn.Module):
    """A model whose logits do not depend on its blocks."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 32)
        self.head = torch.nn.Linear(32, 100)
        self.steps = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        self.steps[1](self.steps[0](x))
        return self.head(x)


class Own(Source):
    """A source that cannot run a part of its model."""

    @property
    def model(self):
        return open_source(tiny_llama()).model

    def run(self, batch, kernels): ...

    def collect(self, batch): ...


class TestRefusals:
    @staticmethod
    def losses(monkeypatch, values):
        """Let the back return these losses, with its true gradients."""
        from tl_layersim.sources.partial_forward import LocalSplitModel

        plain = LocalSplitModel.loss_and_gradient
        losses = iter(values)
        monkeypatch.setattr(LocalSplitModel, "loss_and_gradient", lambda self, *args: (next(losses), plain(self, *args)[1]))

    @pytest.mark.light("10-nan")
    @pytest.mark.parametrize("bad", [math.nan, math.inf, 11.0])
    @pytest.mark.parametrize("good", [10, 60])
    def test_an_exploding_loss_stops_and_keeps_the_best(self, monkeypatch, bad, good):
        from tl_layersim.stitching.fitting import StitchDescent

        weights_at = {}
        plain = StitchDescent.apply

        def noted(self):
            plain(self)
            weights_at[self.step] = self.parameters["weight"].detach().clone()

        monkeypatch.setattr(StitchDescent, "apply", noted)
        options = {"at": (0, 0), "fit": "sgd", "adapter": "affine-norm"}
        self.losses(monkeypatch, [*([5.0] * 25 + [4.0] * 25 + [4.5] * 10)[:good], bad])
        settings = lsim.stitching.StitchTraining(steps=80, warmup=10, relative=False)
        outcome = "the best adapter" if good == 60 else "the initial adapter"

        with pytest.warns(lsim.LayersimWarning, match=rf"exploded at step {good + 1} of 80.*holds {outcome}"):
            result = lsim.stitch(
                tiny_llama(), tiny_llama(seed=1), lsim.Data(rows(), batch_size=6), training=settings, **options
            )

        assert result.stopped == good + 1
        assert len(result.curve) == good + 1

        # The best window ended with step 50; before the first one is over there is only the start, which is zero here.
        expected = weights_at[50] if good == 60 else torch.zeros(32, 32)
        assert torch.equal(result.weight.float(), expected.float())

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("steps", [8, 60])
    def test_a_loss_that_ends_higher_is_reported_and_the_best_kept(self, steps):
        model = tiny_llama()
        tokens = rows(200)
        with torch.no_grad():
            logits = model(tokens).logits
        labels = logits.argmax(-1)
        options = {"at": (0, 0), "labels": labels}
        wild = lsim.stitching.StitchTraining(steps=steps, lr=1e5, warmup=0)
        # The initial adapter changes nothing. Losses are of all eight batches: four fifths of the rows.
        initial_loss = torch.nn.functional.cross_entropy(logits[:160].flatten(0, 1), labels[:160].flatten())
        match = rf"higher loss.* {float(initial_loss):.4g} \(the initial adapter\).*StitchTraining\(lr=1\)"
        data = lsim.Data(tokens, batch_size=20)

        with pytest.warns(lsim.LayersimWarning, match=match):
            result = lsim.stitch(model, model, data, fit="sgd", adapter="affine-norm", training=wild, **options)
        start = lsim.stitch(model, model, tokens, adapter="identity", **options)

        assert result.loss <= start.back_loss + 1e-6
        assert result.stopped == 0

    def test_rows_of_fit_and_evaluation_are_counted_in_a_warning(self):
        with pytest.warns(lsim.LayersimWarning, match="3 of 5 rows of eval_data"):
            lsim.stitch(
                tiny_llama(),
                tiny_llama(seed=1),
                rows(40),
                at=(0, 0),
                fit="lstsq",
                eval_data=torch.cat([rows(40)[:3], random_tokens(2, 16, 8)]),
            )

    def test_few_tokens_for_least_squares(self):
        with pytest.warns(lsim.LayersimWarning, match=r"16 tokens for 32 features"):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), lsim.Data(rows(2), batch_size=1), at=(0, 0), fit="lstsq")

    @pytest.mark.parametrize("layer", [3, -4, "blocks.3.hook_resid_post", "blocks.0.attn"])
    def test_a_layer_that_does_not_exist(self, layer):
        for at in ((layer, 1), (1, layer)):
            with pytest.raises(lsim.LayersimError, match=f"`at`.*{layer}"):
                lsim.stitch(tiny_llama(), tiny_llama(), rows(), at=at, adapter="identity")

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_layers_by_name(self):
        model = tiny_llama()
        back = tiny_llama(seed=1)

        expected = lsim.stitch(model, back, rows(), at=(0, 1), adapter="identity")

        for at in (
            ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post"),
            ("blocks.1.hook_resid_pre", "blocks.2.hook_resid_pre"),
        ):
            assert lsim.stitch(model, back, rows(), at=at, adapter="identity").penalty == expected.penalty
        assert expected.layers == ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")

    @pytest.mark.heavy("trains three times")
    def test_half_precision(self):
        front = tiny_llama()
        back = tiny_llama(seed=1, dtype=torch.float16)

        with pytest.raises(lsim.LayersimError, match=r"`fit`.*float16"):
            lsim.stitch(front, back, rows(), at=(0, 0), fit="sgd")
        for dtype in (torch.float16, torch.bfloat16):
            model = tiny_llama(dtype=dtype)
            assert lsim.stitch(model, model, rows(), at=(1, 1), adapter="identity").penalty == 0.0
            result = lsim.stitch(tiny_llama(seed=1), model, rows(60), at=(1, 1), fit="lstsq")
            wide = lsim.stitch(tiny_llama(seed=1), tiny_llama(), rows(60), at=(1, 1), fit="lstsq")
            assert result.penalty == pytest.approx(wide.penalty, abs=0.03)

        trained = lsim.stitch(
            tiny_llama(seed=1),
            model,
            lsim.Data(rows(), batch_size=6),
            at=(1, 1),
            fit="sgd",
            adapter="affine-norm",
            training=QUICK,
        )
        wide = lsim.stitch(
            tiny_llama(seed=1),
            tiny_llama(),
            lsim.Data(rows(), batch_size=6),
            at=(1, 1),
            fit="sgd",
            adapter="affine-norm",
            training=QUICK,
        )
        assert trained.loss == pytest.approx(wide.loss, abs=0.05)
        assert trained.adapter.weight.dtype == torch.float32

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_widths(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        wide = LlamaForCausalLM(
            LlamaConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100)
        ).eval()

        with pytest.raises(lsim.LayersimError, match=r"`adapter`.*identity"):
            lsim.stitch(wide, tiny_llama(), rows(), at=(0, 0), adapter="identity")
        with pytest.raises(lsim.LayersimError, match=r"`fit` is 'sgd'.* 48 .* 32\b"):
            lsim.stitch(wide, tiny_llama(), lsim.Data(rows(), batch_size=6), at=(0, 0), fit="sgd")
        for kind in ("linear", "affine", "affine-norm"):
            result = lsim.stitch(
                wide, tiny_llama(), lsim.Data(rows(60), batch_size=6), at=(0, 1), adapter=kind, fit="lstsq+sgd", training=QUICK
            )
            assert result.weight.shape == (32, 48)
            assert result.adapter(torch.zeros(2, 48)).shape == (2, 32)
            assert float(result.curve[-5:].mean()) < float(result.curve[:5].mean())
            with torch.no_grad():
                assert result.model(rows(2)).logits.shape == (2, 16, 100)
        with pytest.raises(lsim.LayersimError, match=r"`adapter`.* 48 to 32.* 32, .* 48"):
            lsim.stitch(tiny_llama(), wide, rows(), at=(0, 0), adapter=result.adapter)

    @pytest.mark.heavy("many stitches")
    def test_identity_between_bases_is_warned_of(self):
        bridge = gpt2_of_kind("bridge", 0)
        bridge.enable_compatibility_mode()
        with pytest.warns(lsim.LayersimWarning, match="different bases"):
            lsim.stitch(bridge, tiny_gpt2(1), rows(4, 8), at=(0, 0), adapter="identity")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"adapter": "identity", "fit": "lstsq"}, "`fit`.*lstsq.*identity"),
            ({"adapter": "identity", "training": QUICK}, "`training`.*identity"),
            ({"fit": "lstsq", "training": QUICK}, "`training`.*lstsq"),
            ({"fit": "sgd", "ridge": 1.0}, "`ridge`.*sgd"),
            ({"fit": "lstsq", "ridge": -1.0}, "`ridge`.* -1.0"),
            ({"adapter": "twisted"}, "`adapter`.*twisted"),
            ({"fit": "adam"}, "`fit`.*adam"),
            ({"eval_data": []}, "`eval_data`"),
            ({"data": rows(1)}, r"`data`.* 1 .*eval_data="),
            ({"labels": "class"}, "`labels`.*class"),
            ({"eval_data": lsim.Data(rows(), positions="mean")}, "`positions` is 'mean'"),
        ],
    )
    def test_options_that_do_not_fit(self, options, message):
        usual = {"data": rows(), "at": (0, 0)} | ({} if "adapter" in options else {"fit": "lstsq"})
        with pytest.raises(lsim.LayersimError, match=message):
            lsim.stitch(tiny_llama(), tiny_llama(seed=1), **usual | options)

    @pytest.mark.parametrize("settings", [{"steps": 0}, {"lr": 0.0}, {"momentum": 1.0}, {"warmup": 2001}, {"clip": 0.0}])
    def test_settings_of_a_training(self, settings):
        with pytest.raises(lsim.LayersimError, match=f"`{next(iter(settings))}`"):
            lsim.stitching.StitchTraining(**settings)

    def test_a_front_that_is_broken_is_warned_of(self):
        broken = tiny_llama()
        with torch.no_grad():
            broken.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)

        with pytest.warns(lsim.LayersimWarning, match=r"blocks\.1\.hook_resid_post.*\[0"):
            result = lsim.stitch(broken, tiny_llama(), rows(), at=(1, 1), adapter="identity")

        assert math.isnan(result.penalty)
        with pytest.raises(lsim.LayersimError, match=r"LlamaForCausalLM.*blocks\.1\.hook_resid_post"):
            lsim.stitch(broken, tiny_llama(), lsim.Data(rows(), batch_size=6), at=(1, 1), fit="lstsq")

    def test_models_and_data_that_cannot_be_stitched(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        plain = tiny_llama()
        other_tokenizer_model = tiny_llama(seed=1)
        broken = tiny_llama()
        plain.tokenizer = tiny_tokenizer()
        other_tokenizer_model.tokenizer = tiny_tokenizer(90)
        with torch.no_grad():
            broken.model.layers[2].mlp.down_proj.weight.fill_(torch.nan)
        short = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=8)).eval()
        unread = lsim.open_model(Unread(), layers=["steps.0", "steps.1"])

        for front, back, data, at, match in (
            (plain, other_tokenizer_model, rows(), (0, 0), r"'w9\d' has id 9\d in "),
            (tiny_gpt2(), short, rows(), (0, 0), r"\b16\b.* 8\b"),
            (short, tiny_gpt2(), rows(), (0, 0), r"\b16\b.* 8\b"),
            *((plain, plain, nothing, (0, 0), "`data`") for nothing in ([], torch.zeros(3, 1, dtype=torch.int64), [[5]])),
            (plain, broken, rows(), (0, 0), r"LlamaForCausalLM in torch\.float32 .* NaN\b"),
            (unread, unread, rows(4), (0, 0), r"steps\.0.*layers="),
            (Own(), plain, rows(), (0, 0), "`front` is an Own"),
        ):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.stitch(front, back, data, at=at, adapter="identity")
        with pytest.raises(lsim.LayersimError, match=r"`layers`.*'model.layers.0'.*'model.layers.2'"):
            lsim.open_model(plain, layers=["model.layers.2", "model.layers.0"])
