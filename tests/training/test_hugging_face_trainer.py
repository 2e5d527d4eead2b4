"""The Trainer of transformers with an aligned loss."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL
from tl_layersim.training.losses import layer_weights

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import naive, next_of, vit, weights_of


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

        class Watched(lsim.training.AlignedTrainer):
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
        lsim.training.AlignedTrainer(b, self.arguments(tmp_path), train_dataset=self.rows(), aligned=own).train()
        torch.testing.assert_close(weights_of(a), weights_of(b), rtol=1e-4, atol=1e-5)

    def test_evaluation_is_the_last_layers_loss(self, tmp_path):
        model, rows = tiny_llama(), self.rows(4)
        trainer = lsim.training.AlignedTrainer(model, self.arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
        tokens = torch.stack([row["input_ids"] for row in rows])
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(float(model(tokens, labels=tokens).loss.detach()), rel=1e-5)

    def test_heads_of_their_own_are_refused(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match="objective='multi-head'"):
            lsim.training.AlignedTrainer(
                tiny_llama(), self.arguments(tmp_path), aligned=lsim.AlignedTraining(objective="multi-head")
            )


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
            trainer = lsim.training.AlignedTrainer(model, self.arguments(tmp_path), train_dataset=self.rows(), aligned=own)
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
        ours = (
            lsim.training.AlignedTrainer(make(), self.arguments(tmp_path), train_dataset=rows, aligned=own)
            .train()
            .training_loss
        )
        theirs = Trainer(make(), self.arguments(tmp_path), train_dataset=rows).train().training_loss
        assert ours == pytest.approx(theirs, rel=1e-5)

    @pytest.mark.heavy("a training")
    def test_images(self, tmp_path):
        from transformers import Trainer

        torch.manual_seed(0)
        rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 4} for i in range(24)]
        own = lsim.AlignedTraining(objective="standard")
        ours = (
            lsim.training.AlignedTrainer(vit(), self.arguments(tmp_path), train_dataset=rows, aligned=own).train().training_loss
        )
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
        with pytest.raises(lsim.LayersimError, match=r"`model`.* 5\.\d+\b.* 4\.\d+.*unembed="):
            lsim.training.AlignedTrainer(
                model, self.arguments(tmp_path, remove_unused_columns=False), train_dataset=self.rows()
            ).train()

    def test_a_model_that_is_made_for_each_training(self, tmp_path):
        trainer = lsim.training.AlignedTrainer(
            args=self.arguments(tmp_path), model_init=lambda: tiny_llama(), train_dataset=self.rows()
        )
        assert trainer.train().global_step == 6
        assert trainer.train().global_step == 6

    @pytest.mark.parametrize("initialised", [False, True])
    def test_an_opened_model(self, tmp_path, initialised):
        def trainer(*blocks):
            opened = lsim.open_model(tiny_llama(), layers=[f"model.layers.{i}" for i in blocks])
            given = {"model_init": lambda: opened} if initialised else {"model": opened}
            return lsim.training.AlignedTrainer(**given, args=self.arguments(tmp_path), train_dataset=self.rows())

        assert trainer(0, 1, 2).train().global_step == 6
        with pytest.raises(lsim.LayersimError, match="layers="):
            trainer(0, 2)

    def test_what_would_be_ignored_is_refused(self, tmp_path):
        with pytest.raises(lsim.LayersimError, match="label_smoothing_factor"):
            lsim.training.AlignedTrainer(tiny_llama(), self.arguments(tmp_path, label_smoothing_factor=0.1))
        with pytest.raises(lsim.LayersimError, match="save_to="):
            lsim.training.AlignedTrainer(
                tiny_llama(), self.arguments(tmp_path), aligned=lsim.AlignedTraining(save_to=tmp_path / "x")
            )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_the_side_of_padding_changes_no_training(make, tmp_path):
    rows = [random_tokens(1, length, seed=length)[0] for length in (9, 5, 7, 4)]

    def padded(batch, side):
        ids, mask, labels = (
            torch.zeros(2, 9, dtype=torch.long),
            torch.zeros(2, 9, dtype=torch.long),
            torch.full((2, 9), NO_LABEL),
        )
        for i, row in enumerate(batch):
            at = slice(9 - len(row), None) if side == "left" else slice(0, len(row))
            ids[i, at], mask[i, at], labels[i, at] = row, 1, row
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    trained = []
    for side in ("left", "right"):
        model = make()
        trainer = lsim.training.AlignedTrainer(
            model,
            TestTrainer().arguments(tmp_path, max_steps=2, dataloader_pin_memory=False),
            train_dataset=rows,
            data_collator=lambda batch, side=side: padded(batch, side),
        )
        trainer.train()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*trained, atol=1e-4)
