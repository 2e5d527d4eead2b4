"""Fine-tunes of classifiers of texts and of images."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL

from ..models.tiny_models import random_tokens
from .helpers import SHORT, bert, vit


class TestClassifiers:
    @pytest.mark.heavy("a long training")
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

        result = lsim.finetune_aligned(model, lsim.Data(rows[:45], batch_size=15), training, eval_data=rows[45:])

        assert result.unit == "row"
        assert result.provenance.tokens == 15
        assert float(result.accuracy[-1].min()) > 0.9
        assert float(result.accuracy[0, -1]) < 0.9

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_vit_learns_at_every_layer(self):
        torch.manual_seed(0)
        labels = torch.arange(640) % 4
        pixels = torch.randn(640, 3, 8, 8) * 0.3
        for i, label in enumerate(labels.tolist()):
            pixels[i, :, (label // 2) * 4 : (label // 2) * 4 + 4, (label % 2) * 4 : (label % 2) * 4 + 4] += 2
        training = lsim.AlignedTraining(steps=80, lr=5e-3, schedule="always")
        data = {"pixel_values": pixels[:600], "labels": labels[:600]}
        held_out = {"pixel_values": pixels[600:], "labels": labels[600:]}

        result = lsim.finetune_aligned(vit(), lsim.Data(data, batch_size=16), training, eval_data=held_out)

        assert float(result.accuracy[-1].min()) > 0.9

    def test_images_without_labels_are_refused(self):
        with pytest.raises(lsim.LayersimError, match="`data` has no labels"):
            lsim.finetune_aligned(vit(), {"pixel_values": torch.randn(4, 3, 8, 8)}, SHORT)

    def test_images_of_a_data_set(self):
        import datasets

        data = datasets.Dataset.from_dict({"pixel_values": torch.randn(12, 3, 8, 8).numpy(), "label": [0, 1] * 6})
        result = lsim.finetune_aligned(vit(), lsim.Data(data, batch_size=4), SHORT)
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
        result = lsim.finetune_aligned(model, lsim.Data(masked, batch_size=4), SHORT, labels=labels)
        assert result.provenance.tokens == 1
