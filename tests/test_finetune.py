"""Whole fine-tunes: exact resume, LoRA, several processes, saved models, the Trainer, every kind of model."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.source import NO_LABEL
from tl_layersim.training.losses import layer_weights
from tl_layersim.training.saving import export_bridge
from tl_layersim.training.stream import Piece

from .conftest import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from .test_aligned import CE, bert, naive, neox, next_of, vit

SHORT = lsim.AlignedTraining(steps=6, lr=1e-2, warmup=2, schedule="always")


def weights_of(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def dropping(model, rate=0.1):
    """With dropout, which has to come back after an interrupt."""
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = rate
    return model


class TestRun:
    def test_a_run_is_adamw_by_hand(self):
        """The whole training once more, from the formula, with the model's own forward pass."""
        tokens = random_tokens(10, 7)
        training = lsim.AlignedTraining(steps=5, lr=1e-2, warmup=2, weight_decay=0.1, clip=0.5, seed=3)
        model = tiny_llama().double()
        result = lsim.finetune_aligned(model, tokens, training, batch_size=2)
        other = tiny_llama().double()
        groups = [
            {"params": [p for p in other.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in other.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, lr=1e-2)
        train = tokens[:9]
        curve = []
        for step in range(5):
            orders = [torch.randperm(9, generator=torch.Generator().manual_seed(3 * 1_000_003 + turn)) for turn in range(2)]
            rows = train[torch.cat(orders)[step * 2 : step * 2 + 2]]
            weights = [0, 0, 1] if step % 2 == 0 else layer_weights("linear", 3)
            loss = naive(other, rows, next_of(rows), weights)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            for group in optimiser.param_groups:
                group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else (5 - step) / 3)
            optimiser.step()
            curve.append(float(loss.detach()))
        assert result.loss.tolist() == pytest.approx(curve, rel=1e-7)
        torch.testing.assert_close(weights_of(model), weights_of(other), rtol=1e-4, atol=1e-5)
        held = tokens[9:]
        hidden = other(held, output_hidden_states=True).hidden_states
        for layer in (1, 2, 3):
            x = hidden[layer] if layer == 3 else other.model.norm(hidden[layer])
            logits = other.lm_head(x)[:, :-1].flatten(0, 1)
            assert float(result.values[-1, layer - 1]) == pytest.approx(
                float(CE(logits, held[:, 1:].flatten()).detach()), rel=1e-6
            )
            right = (logits.argmax(-1) == held[:, 1:].flatten()).double().mean()
            assert float(result.accuracy[-1, layer - 1]) == pytest.approx(float(right))

    def test_looks_are_before_in_between_and_after(self):
        result = lsim.finetune_aligned(tiny_llama(), random_tokens(20, 6), replace(SHORT, eval_every=4), batch_size=2)
        assert result.looks == (0, 4, 6)
        assert result.values.shape == (3, 3)
        assert len(result.loss) == 6
        assert result.plot().data
        assert result.plot("loss").data
        assert float(result.values[-1].mean()) != float(result.values[0].mean())

    def test_the_model_is_left_as_it_was_found(self):
        model = dropping(tiny_gpt2())
        model.transformer.h[1].train()
        modes = {name: part.training for name, part in model.named_modules()}
        lsim.finetune_aligned(model, random_tokens(10, 6), SHORT, batch_size=2)
        assert {name: part.training for name, part in model.named_modules()} == modes
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert all(p.grad is None for p in model.parameters())

    def test_the_result_survives_a_file(self, tmp_path):
        result = lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), SHORT, batch_size=2)
        again = lsim.load(result.save(tmp_path / "run.safetensors"))
        assert torch.equal(again.values, result.values)
        assert again.looks == result.looks
        assert again.provenance == result.provenance

    def test_dropout_depends_on_the_seed_alone(self):
        found = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            found.append(lsim.finetune_aligned(dropping(tiny_gpt2()), random_tokens(10, 6), SHORT, batch_size=2).loss)
        assert torch.equal(found[0], found[1])
        other = lsim.finetune_aligned(dropping(tiny_gpt2()), random_tokens(10, 6), replace(SHORT, seed=1), batch_size=2).loss
        assert not torch.equal(found[0], other)

    def test_frozen_parameters_stay(self):
        model = tiny_llama()
        model.model.embed_tokens.weight.requires_grad_(False)
        before = model.model.embed_tokens.weight.clone()
        lsim.finetune_aligned(model, random_tokens(10, 6), SHORT, batch_size=2)
        assert torch.equal(model.model.embed_tokens.weight, before)
        with pytest.raises(lsim.LayersimError, match="Nothing in this model learns"):
            lsim.finetune_aligned(tiny_llama().requires_grad_(False), random_tokens(10, 6), SHORT, batch_size=2)

    def test_a_loss_that_is_not_finite_ends_the_run(self):
        with pytest.raises(lsim.LayersimError, match=r"The loss is .* at step"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, lr=1e30, clip=1e30, steps=8), batch_size=2)

    def test_texts_labels_and_data_that_cannot_be_parted(self):
        model = tiny_llama()
        texts = ["w3 w4 w5 w6", "w7 w8 w9"] * 4
        found = lsim.finetune_aligned(model, texts, SHORT, tokenizer=tiny_tokenizer(), batch_size=2)
        assert found.provenance.options["train_rows"] == 7
        with pytest.raises(lsim.LayersimError, match="cannot be parted"):
            lsim.finetune_aligned(model, random_tokens(1, 6), SHORT)
        with pytest.raises(lsim.LayersimError, match="nothing to answer"):
            lsim.finetune_aligned(model, random_tokens(4, 1), SHORT)

    def test_float16_is_refused(self):
        with pytest.raises(lsim.LayersimError, match="float16"):
            lsim.finetune_aligned(tiny_llama(dtype=torch.float16), random_tokens(10, 6), SHORT)

    def test_a_nnsight_model_is_refused(self):
        import nnsight

        model = nnsight.NNsight(tiny_llama())
        with pytest.raises(lsim.LayersimError, match="modules of this process"):
            lsim.finetune_aligned(model, random_tokens(10, 6), SHORT)


class TestObjectives:
    def test_cosine_regulariser(self):
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        training = lsim.AlignedTraining(objective="cosine-reg", schedule="always", beta=0.7, steps=1, lr=1e-9)
        result = lsim.finetune_aligned(model, tokens, training, eval_data=tokens, batch_size=2)
        out = tiny_llama().double()
        last: list[torch.Tensor] = []
        out.model.layers[-1].register_forward_hook(lambda _m, _a, o: last.append(o if isinstance(o, torch.Tensor) else o[0]))
        found = out(tokens, output_hidden_states=True, labels=tokens)
        expected = found.loss + 0.7 * sum(
            w * (1 - torch.nn.functional.cosine_similarity(found.hidden_states[layer], last[0], dim=-1)).mean()
            for layer, w in zip((1, 2), layer_weights("linear", 3), strict=False)
        )
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-7)

    def test_heads_of_their_own(self, tmp_path):
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        training = lsim.AlignedTraining(
            objective="multi-head", schedule="always", kl=0.5, steps=2, lr=1e-2, save_to=tmp_path / "m"
        )
        result = lsim.finetune_aligned(model, tokens, training, eval_data=tokens, batch_size=2)
        other = tiny_llama().double()
        hidden = other(tokens, output_hidden_states=True).hidden_states
        logits = [other.lm_head(hidden[i] if i == 3 else other.model.norm(hidden[i]))[:, :-1].flatten(0, 1) for i in (1, 2, 3)]
        right = tokens[:, 1:].flatten()
        expected = sum(w * CE(z, right) for z, w in zip(logits, layer_weights("linear", 3), strict=True))
        last = logits[2].log_softmax(-1)
        expected = expected + 0.5 * sum(
            w * (last.exp() * (last - z.log_softmax(-1))).sum(-1).mean()
            for z, w in zip(logits[:2], layer_weights("linear", 3), strict=False)
        )
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-7)
        from tl_layersim.storage import read

        _, heads = read(tmp_path / "m" / "heads.safetensors", ("heads",))
        assert set(heads) == {"layer 1", "layer 2"}
        assert not torch.equal(heads["layer 1"], heads["layer 2"])
        x = model.model.norm(model(tokens, output_hidden_states=True).hidden_states[1])
        loss = CE((x @ heads["layer 1"].T)[:, :-1].flatten(0, 1), right)
        assert float(result.values[-1, 0]) == pytest.approx(float(loss.detach()), rel=1e-7)

    def test_no_gradient_of_the_divergence_reaches_the_last_layer(self):
        """With the paper's term alone at work on the last head, its weights do not move."""
        model, tokens = tiny_llama().double(), random_tokens(2, 8)
        from tl_layersim.training.objective import Objective
        from tl_layersim.training.stream import open_stream

        objective = Objective(open_stream(model, None, None), lsim.AlignedTraining(objective="multi-head", kl=1.0))
        last = torch.randn(5, 32).double().requires_grad_()
        x = torch.randn(5, 32).double().requires_grad_()
        objective._divergence(last, x, objective.head_of(1)).backward()
        assert last.grad is None
        assert float(x.grad.abs().max()) > 0
        assert tokens.shape == (2, 8)

    def test_standard_is_the_last_layer_at_every_step(self):
        tokens = random_tokens(10, 7)
        a, b = tiny_llama().double(), tiny_llama().double()
        lsim.finetune_aligned(a, tokens, lsim.AlignedTraining(objective="standard", steps=3, lr=1e-2), batch_size=2)
        own = lsim.AlignedTraining(weights=[0, 0, 1], schedule="always", steps=3, lr=1e-2)
        lsim.finetune_aligned(b, tokens, own, batch_size=2)
        assert torch.equal(weights_of(a), weights_of(b))

    @pytest.mark.parametrize("objective", ["aligned", "cosine-reg", "multi-head"])
    def test_gradient_checkpointing_changes_no_number(self, objective):
        found = []
        for twice in (False, True):
            model = dropping(tiny_gpt2()).double()
            training = replace(SHORT, objective=objective, gradient_checkpointing=twice)
            found.append((lsim.finetune_aligned(model, random_tokens(10, 6), training, batch_size=2).loss, weights_of(model)))
            assert not model.is_gradient_checkpointing
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)

    def test_bfloat16_is_near_float32(self):
        found = [
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, mixed_precision=how), batch_size=2).loss
            for how in ("no", "bf16")
        ]
        assert not torch.equal(*found)
        torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


KILLED = """
import signal, sys, time, torch
# A shell's background jobs are started deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
import tl_layersim as lsim
from tests.conftest import random_tokens, tiny_gpt2
from tests.test_finetune import dropping
from tl_layersim.training import state, loop
state.SECONDS_BETWEEN_SAVES = 0
step = loop.Loop._accumulate
# At the tenth step it waits to be killed.
loop.Loop._accumulate = lambda self, n: (print(n, flush=True), time.sleep(120 if n == 10 else 0.05), step(self, n))[-1]
training = lsim.AlignedTraining(steps=30, lr=1e-2, eval_every=7, accumulation=2)
lsim.finetune_aligned(dropping(tiny_gpt2()), random_tokens(20, 6), training, batch_size=2, checkpoint=sys.argv[1])
"""


class TestResume:
    def test_killed_and_started_again_gives_the_same_bits(self, tmp_path):
        training = lsim.AlignedTraining(steps=30, lr=1e-2, eval_every=7, accumulation=2)
        whole = dropping(tiny_gpt2())
        expected = lsim.finetune_aligned(whole, random_tokens(20, 6), training, batch_size=2)
        for kill in (signal.SIGKILL, signal.SIGINT):
            path = tmp_path / f"{kill.name}.safetensors"
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", KILLED, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for line in process.stdout:
                if int(line) == 10:
                    break
            process.send_signal(kill)
            process.wait()
            assert path.exists()
            model = dropping(tiny_gpt2())
            steps = []
            again = _counting(model, training, path, steps)
            assert 0 < len(steps) < 30
            assert torch.equal(again.loss, expected.loss)
            assert torch.equal(again.values, expected.values)
            assert again.looks == expected.looks
            assert torch.equal(weights_of(model), weights_of(whole))

    def test_a_file_of_another_run_is_refused(self, tmp_path):
        path = tmp_path / "run.safetensors"
        tokens = random_tokens(20, 6)
        lsim.finetune_aligned(tiny_llama(), tokens, SHORT, batch_size=2, checkpoint=path)
        others = [
            (tiny_llama(), random_tokens(20, 6, seed=1), SHORT, 2),
            (tiny_llama(), tokens, replace(SHORT, lr=1e-3), 2),
            (tiny_llama(), tokens, replace(SHORT, weights="uniform"), 2),
            (tiny_llama(), tokens, SHORT, 4),
        ]
        for model, data, training, batch_size in others:
            with pytest.raises(lsim.LayersimError, match="another run"):
                lsim.finetune_aligned(model, data, training, batch_size=batch_size, checkpoint=path)
        model = tiny_llama()
        again = lsim.finetune_aligned(model, tokens, SHORT, batch_size=2, checkpoint=path)
        assert len(again.loss) == 6

    def test_a_model_that_the_run_has_trained_is_told_apart(self, tmp_path):
        model, tokens, path = tiny_llama(), random_tokens(20, 6), tmp_path / "run.safetensors"
        lsim.finetune_aligned(model, tokens, SHORT, batch_size=2, checkpoint=path)
        with pytest.raises(lsim.LayersimError, match="not as it was"):
            lsim.finetune_aligned(model, tokens, SHORT, batch_size=2, checkpoint=path)

    def test_places_that_are_none_are_refused_at_once(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match="no place"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), SHORT, checkpoint=tmp_path / "no" / "x")
        with pytest.raises(lsim.LayersimError, match="no place"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "no" / "x"))


def _counting(model, training, path, steps):
    from tl_layersim.training import loop

    original = loop.Loop._accumulate
    try:
        loop.Loop._accumulate = lambda self, n: steps.append(n) or original(self, n)
        return lsim.finetune_aligned(model, random_tokens(20, 6), training, batch_size=2, checkpoint=path)
    finally:
        loop.Loop._accumulate = original


class TestLora:
    def config(self):
        peft = pytest.importorskip("peft")
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)

    def test_only_adapters_learn_and_are_merged(self, tmp_path):
        from transformers import AutoModelForCausalLM

        model, before = tiny_llama(), tiny_llama()
        training = replace(SHORT, lora=self.config(), save_to=tmp_path / "m", lr=0.05)
        result = lsim.finetune_aligned(model, random_tokens(20, 8), training, batch_size=2)
        assert result.provenance.options["lora"]["r"] == "4"
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in before.named_parameters()]
        assert all(p.requires_grad for p in model.parameters())
        changed = {
            name.split(".")[-2]
            for (name, a), b in zip(model.named_parameters(), before.parameters(), strict=True)
            if not torch.equal(a, b)
        }
        assert changed == {"q_proj", "down_proj"}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        tokens = random_tokens(2, 9)
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)

    def test_an_interrupted_run_takes_them_out_and_resumes(self, tmp_path, monkeypatch):
        from tl_layersim.training import loop

        training = replace(SHORT, lora=self.config(), lr=0.05)
        whole = tiny_llama()
        expected = lsim.finetune_aligned(whole, random_tokens(20, 8), training, batch_size=2)
        original = loop.Loop._accumulate

        def stopping(self, step):
            if step == 3:
                raise KeyboardInterrupt
            return original(self, step)

        model, path = tiny_llama(), tmp_path / "run.safetensors"
        monkeypatch.setattr(loop.Loop, "_accumulate", stopping)
        with pytest.raises(KeyboardInterrupt):
            lsim.finetune_aligned(model, random_tokens(20, 8), training, batch_size=2, checkpoint=path)
        monkeypatch.undo()
        assert torch.equal(weights_of(model), weights_of(tiny_llama()))
        again = lsim.finetune_aligned(model, random_tokens(20, 8), training, batch_size=2, checkpoint=path)
        assert torch.equal(again.loss, expected.loss)
        assert torch.equal(weights_of(model), weights_of(whole))

    def test_other_things_are_refused(self):
        with pytest.raises(lsim.LayersimError, match="peft"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, lora={"r": 4}))


class TestClassifiers:
    def test_bert_learns_at_every_layer(self):
        """A word says the class: every layer can learn it, and padding is in the way."""
        labels = torch.arange(60) % 3
        rows = []
        for i, label in enumerate(labels.tolist()):
            row = random_tokens(1, 5 + i % 4, seed=i)[0].clamp(min=10)
            row[1] = 3 + label
            rows.append({"input_ids": row.tolist(), "label": label})
        model = bert()
        training = lsim.AlignedTraining(steps=120, lr=5e-3, schedule="always")
        result = lsim.finetune_aligned(model, rows[:45], training, eval_data=rows[45:], batch_size=15)
        assert result.unit == "row"
        assert result.provenance.tokens == 15
        assert float(result.accuracy[-1].min()) > 0.9
        assert float(result.accuracy[0, -1]) < 0.9

    def test_vit_learns_at_every_layer(self):
        torch.manual_seed(0)
        labels = torch.arange(640) % 4
        pixels = torch.randn(640, 3, 8, 8) * 0.3
        for i, label in enumerate(labels.tolist()):
            pixels[i, :, (label // 2) * 4 : (label // 2) * 4 + 4, (label % 2) * 4 : (label % 2) * 4 + 4] += 2
        training = lsim.AlignedTraining(steps=80, lr=5e-3, schedule="always")
        data = {"pixel_values": pixels[:600], "labels": labels[:600]}
        held = {"pixel_values": pixels[600:], "labels": labels[600:]}
        result = lsim.finetune_aligned(vit(), data, training, eval_data=held, batch_size=16)
        assert float(result.accuracy[-1].min()) > 0.9

    def test_images_without_labels_are_refused(self):
        with pytest.raises(lsim.LayersimError, match="one class each"):
            lsim.finetune_aligned(vit(), {"pixel_values": torch.randn(4, 3, 8, 8)}, SHORT)

    def test_images_of_a_data_set(self):
        import datasets

        data = datasets.Dataset.from_dict({"pixel_values": torch.randn(12, 3, 8, 8).numpy(), "label": [0, 1] * 6})
        result = lsim.finetune_aligned(vit(), data, SHORT, batch_size=4)
        assert result.provenance.options["train_rows"] == 11

    def test_a_masked_language_model_wants_labels(self):
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100)
        model = BertForMaskedLM(config).eval()
        tokens = random_tokens(8, 6)
        with pytest.raises(lsim.LayersimError, match="masked"):
            lsim.finetune_aligned(model, tokens, SHORT)
        labels = torch.full_like(tokens, NO_LABEL)
        labels[:, 2] = tokens[:, 2]
        masked = tokens.clone()
        masked[:, 2] = 3
        found = lsim.finetune_aligned(model, masked, SHORT, labels=labels, batch_size=4)
        assert found.provenance.tokens == 1


class TestTransformerLens:
    @pytest.mark.parametrize("make", [tiny_gpt2, neox, tiny_llama], ids=lambda f: f.__name__)
    def test_a_bridge_trains_and_is_saved_whole(self, make, tmp_path):
        """Also where query, key and value are one weight, which a bridge holds in three copies that learn."""
        from transformer_lens.model_bridge.sources import build_bridge_from_module
        from transformers import AutoModelForCausalLM

        hf = dropping(make(), 0.0)
        bridge = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config)
        tokens, probe = random_tokens(12, 7), random_tokens(2, 9, seed=5)
        training = replace(SHORT, save_to=tmp_path / "m")
        result = lsim.finetune_aligned(bridge, tokens, training, batch_size=3)
        plain = dropping(make(), 0.0)
        expected = lsim.finetune_aligned(plain, tokens, SHORT, batch_size=3)
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-3, atol=1e-4)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        torch.testing.assert_close(loaded(probe).logits, bridge(probe), rtol=1e-4, atol=1e-4)
        assert float((loaded(probe).logits - make()(probe).logits).abs().max().detach()) > 1e-2

    def test_a_bridge_that_is_not_raw_is_refused(self, tmp_path):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        hf = tiny_gpt2()
        bridge = build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
        for part in bridge.blocks:
            part.ln1.original_component.weight.data.mul_(2.0)
        tokens = random_tokens(2, 6)
        exported = export_bridge(bridge, Piece(tokens, {}, next_of(tokens), None))
        torch.testing.assert_close(exported(tokens).logits, bridge(tokens), rtol=1e-4, atol=1e-4)

    def test_hooked_transformer(self, tmp_path):
        try:
            from transformer_lens import HookedTransformer, HookedTransformerConfig
        except ImportError:
            pytest.skip("TransformerLens 4 has no HookedTransformer")
        config = HookedTransformerConfig(
            n_layers=3, d_model=32, n_ctx=32, d_head=8, n_heads=4, d_vocab=100, act_fn="gelu", seed=0
        )
        model = HookedTransformer(config)
        result = lsim.finetune_aligned(model, random_tokens(20, 7), replace(SHORT, steps=30), batch_size=4)
        assert float(result.loss[-1]) < float(result.loss[0])
        with pytest.raises(lsim.LayersimError, match="Hugging Face folder"):
            lsim.finetune_aligned(model, random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "m"))


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestTrainer:
    def arguments(self, tmp_path, **more):
        from transformers import TrainingArguments

        options = {
            "max_steps": 6,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1e9,
            "logging_strategy": "no",
            "use_cpu": True,
            "weight_decay": 0.0,
        } | more
        return TrainingArguments(str(tmp_path / "out"), **options)

    def rows(self, count=24, length=7):
        return [{"input_ids": row, "labels": row} for row in random_tokens(count, length)]

    def test_losses_are_those_of_the_schedule(self, tmp_path):
        losses = []

        class Watched(lsim.AlignedTrainer):
            def compute_loss(self, model, inputs, *args, **options):
                loss = super().compute_loss(model, inputs, *args, **options)
                layers = [0, 0, 1] if self.state.global_step % 2 == 0 else layer_weights("linear", 3)
                expected = naive(model, inputs["input_ids"], next_of(inputs["input_ids"]), layers)
                losses.append((self.state.global_step, float(loss.detach()), float(expected.detach()) / 2))
                return loss

        arguments = self.arguments(tmp_path, gradient_accumulation_steps=2)
        Watched(tiny_llama().double(), arguments, train_dataset=self.rows()).train()
        assert [step for step, _, _ in losses] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        for _, ours, theirs in losses:
            assert ours == pytest.approx(theirs, rel=1e-6)

    def test_standard_is_the_trainers_own(self, tmp_path):
        from transformers import Trainer

        a, b = tiny_llama().double(), tiny_llama().double()
        Trainer(a, self.arguments(tmp_path), train_dataset=self.rows()).train()
        own = lsim.AlignedTraining(objective="standard")
        lsim.AlignedTrainer(b, self.arguments(tmp_path), train_dataset=self.rows(), aligned=own).train()
        torch.testing.assert_close(weights_of(a), weights_of(b), rtol=1e-4, atol=1e-5)

    def test_evaluation_is_the_last_layers_loss(self, tmp_path):
        model, rows = tiny_llama(), self.rows(4)
        trainer = lsim.AlignedTrainer(model, self.arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
        tokens = torch.stack([row["input_ids"] for row in rows])
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-5)

    def test_heads_of_their_own_are_refused(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match="no use for this"):
            lsim.AlignedTrainer(tiny_llama(), self.arguments(tmp_path), aligned=lsim.AlignedTraining(objective="multi-head"))


RANKS = """
import sys, torch
import tl_layersim as lsim
from tests.conftest import random_tokens, tiny_llama
model = tiny_llama().double()
training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=2, layers_per_step=int(sys.argv[2]) or None)
result = lsim.finetune_aligned(model, [{"input_ids": r[: 3 + i % 5].tolist()} for i, r in enumerate(random_tokens(40, 8))],
                               training, batch_size=2)
if int(__import__("os").environ["RANK"]) == 0:
    torch.save({"loss": result.loss, "held": result.values, "w": torch.cat([p.detach().flatten() for p in model.parameters()])},
               sys.argv[1])
"""


@pytest.mark.parametrize("drawn", [0, 1])
def test_two_processes_are_one_with_twice_the_batch(tmp_path, drawn):
    import os
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "ranks.pt"
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    processes = []
    for rank in range(2):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.getcwd()}  # fmt: skip
        command = [sys.executable, "-W", "ignore", str(script), str(out), str(drawn)]
        processes.append(subprocess.Popen(command, env=os.environ | world, stderr=subprocess.PIPE))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors
    found = torch.load(out, weights_only=True)
    model = tiny_llama().double()
    training = lsim.AlignedTraining(steps=4, lr=1e-2, accumulation=2, layers_per_step=drawn or None)
    rows = [{"input_ids": r[: 3 + i % 5].tolist()} for i, r in enumerate(random_tokens(40, 8))]
    result = lsim.finetune_aligned(model, rows, training, batch_size=4)
    torch.testing.assert_close(found["loss"], result.loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["held"], result.values, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["w"], weights_of(model), rtol=1e-6, atol=1e-9)


class TestWhatWasOnceWrong:
    """Each was found by somebody who tried to break it."""

    def test_gradients_that_stand_there_are_no_part_of_the_first_step(self):
        tokens = random_tokens(10, 6)
        clean, dirty = tiny_llama().double(), tiny_llama().double()
        (1000 * lsim.aligned_loss(dirty, tokens)).backward()
        for model in (clean, dirty):
            lsim.finetune_aligned(model, tokens, replace(SHORT, steps=1, warmup=0), batch_size=2)
        assert torch.equal(weights_of(clean), weights_of(dirty))
        assert all(p.grad is None for p in dirty.parameters())

    def test_a_head_that_is_not_the_models_is_refused_in_a_loop_too(self):
        from transformers import DebertaConfig, DebertaForSequenceClassification

        torch.manual_seed(0)
        config = DebertaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100, num_labels=3
        )
        model = DebertaForSequenceClassification(config).eval()
        with torch.no_grad():
            model.pooler.dense.bias.normal_()
            model.classifier.bias.normal_()
        with pytest.raises(lsim.LayersimError, match="own logits"):
            lsim.aligned_loss(model, random_tokens(2, 6), torch.tensor([0, 1]))

    def test_own_heads_keep_the_bias_of_the_models_head(self):
        from transformers import PhiConfig, PhiForCausalLM

        torch.manual_seed(0)
        config = PhiConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100)
        model = PhiForCausalLM(config).double().eval()
        with torch.no_grad():
            model.lm_head.bias.normal_(0, 3)
        tokens = random_tokens(2, 8)
        training = lsim.AlignedTraining(objective="multi-head", schedule="always", kl=1.0, steps=1, lr=1e-12)
        result = lsim.finetune_aligned(model, tokens, training, eval_data=tokens, batch_size=2)
        hidden = model(tokens, output_hidden_states=True).hidden_states
        x = [hidden[i] if i == 3 else model.model.final_layernorm(hidden[i]) for i in (1, 2, 3)]
        logits = [model.lm_head(part)[:, :-1].flatten(0, 1) for part in x]
        right = tokens[:, 1:].flatten()
        losses = [CE(z, right) for z in logits]
        assert result.values[-1].tolist() == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-6)
        weights = layer_weights("linear", 3)
        last = logits[2].log_softmax(-1)
        kl = [(last.exp() * (last - z.log_softmax(-1))).sum(-1).mean() for z in logits[:2]]
        expected = sum(w * loss for w, loss in zip(weights, losses, strict=True))
        expected = expected + sum(w * part for w, part in zip(weights, kl, strict=False))
        assert float(result.loss[0]) == pytest.approx(float(expected.detach()), rel=1e-6)

    def test_a_row_classifier_reads_where_transformers_reads(self):
        """The last token that is not the padding id, though the mask has more: padding and end are one id in GPT-2."""
        from transformers import GPT2Config, GPT2ForSequenceClassification

        torch.manual_seed(0)
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, num_labels=3, pad_token_id=2)
        model = GPT2ForSequenceClassification(config).double().eval()
        tokens = random_tokens(4, 8)
        tokens[:, -1] = 2
        tokens[1, -3:] = 2
        labels = torch.tensor([0, 1, 2, 1])
        found = lsim.aligned_loss(model, tokens, labels, weights=[0, 1])
        assert float(found.detach()) == pytest.approx(float(model(tokens, labels=labels).loss.detach()), rel=1e-6)
        mask = torch.ones_like(tokens)
        mask[1, 5:] = 0
        other = tokens.clone()
        other[1, 5:] = 9
        padded = lsim.aligned_loss(model, other, labels, weights=[0, 1], attention_mask=mask)
        assert float(padded.detach()) == pytest.approx(
            float(model(tokens, attention_mask=mask, labels=labels).loss.detach()), rel=1e-6
        )

    def test_second_sentences_are_refused(self):
        rows = [{"input_ids": [3, 4, 5, 6], "token_type_ids": [0, 0, 1, 1], "label": i % 3} for i in range(6)]
        with pytest.raises(lsim.LayersimError, match="second one"):
            lsim.finetune_aligned(bert(), rows, SHORT)
        for row in rows:
            row["token_type_ids"] = [0] * 4
        lsim.finetune_aligned(bert(), rows, SHORT, batch_size=2)

    def test_a_checkpoint_knows_what_learns(self, tmp_path):
        path, tokens = tmp_path / "run.safetensors", random_tokens(10, 6)
        lsim.finetune_aligned(tiny_llama(), tokens, SHORT, batch_size=2, checkpoint=path)
        model = tiny_llama()
        model.model.embed_tokens.weight.requires_grad_(False)
        with pytest.raises(lsim.LayersimError, match="another run"):
            lsim.finetune_aligned(model, tokens, SHORT, batch_size=2, checkpoint=path)

    def test_broken_weights_are_not_kept(self, tmp_path):
        path = tmp_path / "run.safetensors"
        with pytest.raises(lsim.LayersimError, match="loss is"):
            lsim.finetune_aligned(
                tiny_llama(), random_tokens(10, 6), replace(SHORT, lr=1e30, clip=1e30), batch_size=2, checkpoint=path
            )
        assert not path.exists()

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "model").write_text("something")
        with pytest.raises(lsim.LayersimError, match="no place"):
            lsim.finetune_aligned(tiny_llama(), random_tokens(10, 6), replace(SHORT, save_to=tmp_path / "model"))

    def test_models_with_adapters_are_neither_saved_nor_given_more(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = tiny_llama()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for training in (
            replace(SHORT, save_to=tmp_path / "m"),
            replace(SHORT, lora=peft.LoraConfig(target_modules=["q_proj"])),
        ):
            with pytest.raises(lsim.LayersimError, match="adapters"):
                lsim.finetune_aligned(model, random_tokens(10, 6), training)

    def test_a_bridge_of_parts_that_nobody_can_join_still_learns(self, tmp_path):
        from transformer_lens.model_bridge.sources import build_bridge_from_module
        from transformers import Phi3Config, Phi3ForCausalLM

        def make():
            torch.manual_seed(0)
            config = Phi3Config(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
                vocab_size=100, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            return Phi3ForCausalLM(config).eval()

        hf = make()
        bridge = build_bridge_from_module(hf, "Phi3ForCausalLM", hf_config=hf.config)
        tokens = random_tokens(10, 6)
        with pytest.raises(lsim.LayersimError, match="in parts"):
            lsim.finetune_aligned(bridge, tokens, replace(SHORT, save_to=tmp_path / "m"))
        found = lsim.finetune_aligned(bridge, tokens, SHORT, batch_size=2).loss
        expected = lsim.finetune_aligned(make(), tokens, SHORT, batch_size=2).loss
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_heads_of_an_earlier_run_do_not_stay(self, tmp_path):
        tokens = random_tokens(10, 6)
        for objective in ("multi-head", "aligned"):
            training = replace(SHORT, objective=objective, save_to=tmp_path / "m")
            lsim.finetune_aligned(tiny_llama(), tokens, training, batch_size=2)
        assert not (tmp_path / "m" / "heads.safetensors").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestTrainersLabels(TestTrainer):
    """Whether labels are shifted follows from the model's own loss, not from its name."""

    test_losses_are_those_of_the_schedule = None
    test_standard_is_the_trainers_own = None
    test_evaluation_is_the_last_layers_loss = None
    test_heads_of_their_own_are_refused = None

    def test_a_class_of_the_users_own(self, tmp_path):
        from transformers import LlamaForCausalLM

        class Mine(LlamaForCausalLM):
            pass

        found = []
        for cls in (LlamaForCausalLM, Mine):
            model = cls(tiny_llama().config)
            model.load_state_dict(tiny_llama().state_dict())
            own = lsim.AlignedTraining(objective="standard")
            trainer = lsim.AlignedTrainer(model, self.arguments(tmp_path), train_dataset=self.rows(), aligned=own)
            found.append(trainer.train().training_loss)
        assert found[0] == pytest.approx(found[1], rel=1e-6)

    def test_a_masked_model_is_not_shifted(self, tmp_path):
        from transformers import BertConfig, BertForMaskedLM, Trainer

        def make():
            torch.manual_seed(0)
            config = BertConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=100,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            return BertForMaskedLM(config)

        rows = [
            {"input_ids": row, "labels": torch.where(torch.arange(7) % 3 == 1, row, NO_LABEL)} for row in random_tokens(24, 7)
        ]
        own = lsim.AlignedTraining(objective="standard")
        ours = lsim.AlignedTrainer(make(), self.arguments(tmp_path), train_dataset=rows, aligned=own).train().training_loss
        theirs = Trainer(make(), self.arguments(tmp_path), train_dataset=rows).train().training_loss
        assert ours == pytest.approx(theirs, rel=1e-5)

    def test_images(self, tmp_path):
        from transformers import Trainer

        torch.manual_seed(0)
        rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 4} for i in range(24)]
        own = lsim.AlignedTraining(objective="standard")
        ours = lsim.AlignedTrainer(vit(), self.arguments(tmp_path), train_dataset=rows, aligned=own).train().training_loss
        theirs = Trainer(vit(), self.arguments(tmp_path), train_dataset=rows).train().training_loss
        assert ours == pytest.approx(theirs, rel=1e-5)

    def test_a_further_term_in_the_loss_is_refused(self, tmp_path):
        from transformers import LlamaForCausalLM

        class Mine(LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                out = super().forward(*args, **kwargs)
                if out.loss is not None:
                    out.loss = out.loss + 1
                return out

        model = Mine(tiny_llama().config)
        with pytest.raises(lsim.LayersimError, match="own loss is not"):
            lsim.AlignedTrainer(model, self.arguments(tmp_path, remove_unused_columns=False), train_dataset=self.rows()).train()

    def test_a_model_that_is_made_for_each_training(self, tmp_path):
        trainer = lsim.AlignedTrainer(args=self.arguments(tmp_path), model_init=lambda: tiny_llama(), train_dataset=self.rows())
        assert trainer.train().global_step == 6
        assert trainer.train().global_step == 6

    @pytest.mark.parametrize("wrong", [{"label_smoothing_factor": 0.1}])
    def test_what_would_be_ignored_is_refused(self, tmp_path, wrong):
        with pytest.raises(lsim.LayersimError, match="no use for this"):
            lsim.AlignedTrainer(tiny_llama(), self.arguments(tmp_path, **wrong))
        with pytest.raises(lsim.LayersimError, match="no use for this"):
            lsim.AlignedTrainer(tiny_llama(), self.arguments(tmp_path), aligned=lsim.AlignedTraining(save_to=tmp_path / "x"))
