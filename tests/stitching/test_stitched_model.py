"""Stitched models: generation, caches, analyzers on them."""

from __future__ import annotations

import copy

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_split_model

from ..models.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import gpt2_of_kind, lsim_batches, next_token_loss, rows


class TestStitchedModel:
    @pytest.fixture(scope="class")
    def result(self):
        front = tiny_llama()
        back = tiny_llama(seed=1)
        front.tokenizer = back.tokenizer = tiny_tokenizer()
        return lsim.stitch(front, back, lsim.Data(rows(), batch_size=4), at=(1, 0), fit="lstsq")

    def test_generates_the_argmax_of_its_logits(self, result):
        tokens = rows(1, 5)
        expected = tokens
        with torch.no_grad():
            for _ in range(6):
                expected = torch.cat([expected, result.model(expected).logits[:, -1:].argmax(-1)], 1)

        generated = result.model.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=2)

        assert torch.equal(generated, expected)

        text = result.model.generate("w5 w6", max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert text.startswith("w5 w6")

    def test_making_it_changes_no_mode(self):
        front = tiny_llama().train()
        back = tiny_llama(seed=1)
        _ = lsim.stitch(front, back, rows(4), at=(0, 0), adapter="identity").model

        assert front.training
        assert all(module.training for module in front.modules())
        assert not back.training

    def test_left_padding_in_generation(self, result):
        tokens = rows(1, 5)
        alone = result.model.generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2)
        padded = torch.cat([torch.full((1, 3), 2), tokens], 1)
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
        generated = result.model.generate(
            padded, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2
        )

        assert torch.equal(generated[:, 3:], alone)

    @pytest.mark.light("('gpt2', 'gpt2')")
    @pytest.mark.parametrize("kinds", [("gpt2", "gpt2"), ("gpt2", "llama"), ("llama", "gpt2")])
    def test_left_padding_with_absolute_positions(self, kinds):
        def strong(kind, seed):
            model = (tiny_gpt2 if kind == "gpt2" else tiny_llama)(seed=seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(4 if kind == "gpt2" else 1)
            return model

        front = strong(kinds[0], 0)
        back = strong(kinds[1], 1)

        joined = lsim.stitch(front, back, rows(4), at=(1, 0), adapter="identity").model
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        tokens = rows(2)
        mask = torch.ones_like(tokens)
        mask[0, :5] = 0
        padded = joined.generate(tokens, attention_mask=mask, **options)

        assert torch.equal(padded[0, 5:], joined.generate(tokens[:1, 5:], **options)[0])

    @pytest.mark.heavy("every analyzer of a stitched model")
    def test_one_model_twice_is_measured_above_the_stitch_point(self):
        model = tiny_llama()
        tokens = rows(8)
        turn = lsim.stitching.Adapter(
            "linear", torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
        )

        for at in ((2, 0), (1, 0), (0, 1), (0, "blocks.0.hook_resid_pre")):
            twice = lsim.stitch(model, model, tokens, at=at, adapter=turn).model
            apart = lsim.stitch(model, copy.deepcopy(model), tokens, at=at, adapter=turn).model
            analyzers = [lsim.CKA(minibatch=32), lsim.LogitLens(), lsim.BlockCoupling(k=3)]
            twice_report, apart_report = (lsim.analyze(m, tokens, analyzers) for m in (twice, apart))
            for name in twice_report:
                for field in twice_report[name].tensor_fields():
                    a = getattr(twice_report[name], field)
                    b = getattr(apart_report[name], field)
                    torch.testing.assert_close(a, b, equal_nan=True, msg=f"{at} {name} {field}")
            with lsim.attach(twice, [lsim.LogitLens()]) as probe, torch.no_grad():
                twice(tokens)
            torch.testing.assert_close(probe.results()["logit_lens"].cross_entropy, twice_report["logit_lens"].cross_entropy)

    def test_its_first_layer_is_what_the_adapter_gives(self):
        from tl_layersim.remote.open_model import open_source
        from tl_layersim.stitching.stitch import point_number

        front = tiny_llama()
        back = tiny_llama(seed=1)
        split_model = open_split_model(front)
        [batch] = lsim_batches(rows(4), 4)

        for at in ((0, "blocks.0.hook_resid_pre"), ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"), (1, 0)):
            joined = lsim.stitch(front, back, rows(4), at=at, adapter=lsim.stitching.Adapter("linear", torch.eye(32) * 2)).model
            joined_hidden = open_source(joined).collect(batch).activations[0]
            torch.testing.assert_close(
                joined_hidden, 2 * split_model.hidden(batch, point_number(split_model.model, at[0], "at")).reshape(-1, 32)
            )

    def test_another_adapter_is_another_model(self, tmp_path):
        front = tiny_llama()
        back = tiny_llama(seed=1)

        joined = [
            lsim.stitch(front, back, rows(4), at=(0, 0), adapter=lsim.stitching.Adapter("linear", torch.eye(32) * size)).model
            for size in (1, 2)
        ]
        lsim.analyze(joined[0], rows(4), [lsim.CKA(minibatch=32)], checkpoint=tmp_path / "f")

        with pytest.raises(lsim.LayersimError, match="belongs to another run"):
            lsim.analyze(joined[1], rows(4), [lsim.CKA(minibatch=32)], checkpoint=tmp_path / "f")

    def test_the_tokenizer_that_was_given(self):
        front = tiny_llama()
        back = tiny_llama(seed=1)

        result = lsim.stitch(front, back, lsim.Data(["w5 w6 w7 w8"], tokenizer=tiny_tokenizer()), at=(0, 0), adapter="identity")
        options = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 2}

        assert result.model.generate("w5 w6", do_sample=False, **options).startswith("w5 w6")
        assert len(result.model.generate("w5 w6", do_sample=True, num_return_sequences=3, **options)) == 3

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
        front = Own(0)
        back = Own(1)

        result = lsim.stitch(
            lsim.open_model(front, layers=paths), lsim.open_model(back, layers=paths), rows(4), at=(1, 0), adapter="identity"
        )
        with torch.no_grad():
            logits = result.model(rows(4))

        assert next_token_loss(logits, rows(4)) == pytest.approx(result.loss, abs=1e-5)
        with pytest.raises(AttributeError, match="generate"):
            result.model.generate(rows(1))

    @pytest.mark.heavy("a bridge")
    def test_a_bridge_generates(self):
        result = lsim.stitch(gpt2_of_kind("bridge", 0), gpt2_of_kind("bridge", 1), rows(4, 8), at=(0, 0), adapter="identity")
        tokens = rows(1, 4)
        expected = rows(1, 4)
        with torch.no_grad():
            for _ in range(4):
                logits = result.model(expected)
                expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        generated = result.model.generate(tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False)

        assert torch.equal(generated, expected)

    def test_no_cache(self, result):
        with pytest.raises(lsim.LayersimError, match="`use_cache`"):
            result.model(rows(1), use_cache=True)

    def test_measured_like_any_model(self, result):
        tokens = rows(6, 9)
        report = lsim.analyze(result.model, tokens, [lsim.LogitLens(), lsim.Cosine(center="none"), lsim.Trajectory()])
        evaluated = lsim.stitch(tiny_llama(), tiny_llama(seed=1), tokens, at=(1, 0), adapter=result.adapter)

        assert float(report["logit_lens"].cross_entropy[-1]) == pytest.approx(evaluated.loss, abs=1e-6)
        assert report["cosine"].layers == ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")
        assert "affine" in report["cosine"].provenance.model

        # The first layer is what the adapter gives.
        split_model = open_split_model(tiny_llama())
        [batch] = lsim_batches(tokens, 6)
        norm = float(result.adapter(split_model.hidden(batch, 2)).norm(dim=-1).mean())
        assert float(report["trajectory"].norm[0]) == pytest.approx(norm, rel=1e-5)

    def test_its_pages_name_the_backs_blocks(self, result):
        report = lsim.analyze(result.model, rows(6, 9), [lsim.LogitLens(), lsim.Cosine(center="none"), lsim.CKA(minibatch=32)])
        assert "accuracy after block 2" in repr(report)
        assert "COS(blocks.1 input, last)" in repr(report)
        assert "CKA(blocks.1 input, last)" in repr(report)
        assert list(report["cosine"].plot().layout.xaxis.ticktext) == ["into 1", "1", "2"]

    def test_in_attach_and_compare(self, result):
        tokens = rows(6, 9)
        with lsim.attach(result.model, [lsim.LogitLens()]) as probe, torch.no_grad():
            result.model(tokens)
        expected = lsim.analyze(result.model, tokens, [lsim.LogitLens()])["logit_lens"]

        torch.testing.assert_close(probe.results()["logit_lens"].cross_entropy, expected.cross_entropy)

        comparison = lsim.compare(result.model, result.model, tokens, lsim.CKA(minibatch=32))
        assert comparison.distance() < 1e-3

    def test_nothing_above_the_last_layer(self):
        model = tiny_llama()
        result = lsim.stitch(model, model, rows(4), at=(2, 2), adapter="identity")
        with torch.no_grad():
            assert torch.equal(result.model(rows(4)).logits, model(rows(4)).logits)

        with pytest.raises(lsim.LayersimError, match=r"blocks\.2\.hook_resid_post"):
            lsim.analyze(result.model, rows(4), ["cosine"])

    def test_gradients_reach_what_comes_before_the_adapter_and_nothing_is_left(self, result):
        back = result.model.back
        with pytest.raises(lsim.LayersimError, match=r"inputs_embeds"):
            result.model(inputs_embeds=torch.zeros(1, 3, 32), input_ids=None)
        assert all("forward" not in vars(module) for module in back.modules())
