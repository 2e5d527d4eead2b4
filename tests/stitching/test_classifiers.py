"""Stitching classifiers."""

from __future__ import annotations

import copy

import pytest
import torch

import tl_layersim as lsim

from ..models.head_models import CASES, block_outputs, layer_logits, replaced
from ..models.tiny_models import family, tiny_llama, tiny_tokenizer
from .helpers import QUICK, rows


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

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    @pytest.mark.parametrize("name", ["bert", "llama"])
    def test_accuracy_penalty(self, name):
        base = self.build(name, 0)
        tuned = self.build(name, 1, base)
        tokens = rows(30, 9)
        classes = torch.arange(30) % 3
        data = {"input_ids": tokens, "labels": classes}

        # The first two blocks are the same in both, so nothing is lost below the third.
        for layer in (0, 1):
            result = lsim.stitch(base, tuned, lsim.Data(data, batch_size=8), at=(layer, layer), adapter="identity")
            assert result.accuracy_penalty == pytest.approx(0.0)
            assert abs(result.penalty) < 1e-6

        result = lsim.stitch(base, tuned, lsim.Data(data, batch_size=8), at=(2, 2), adapter="identity")
        with torch.no_grad():
            back_logits = tuned(tokens).logits
            swapped = copy.deepcopy(tuned)
            layers = swapped.bert.encoder.layer if name == "bert" else swapped.model.layers
            layers[2] = (base.bert.encoder.layer if name == "bert" else base.model.layers)[2]
            stitched = swapped(tokens).logits
        assert result.back_accuracy == pytest.approx(float((back_logits.argmax(-1) == classes).double().mean()))
        assert result.accuracy == pytest.approx(float((stitched.argmax(-1) == classes).double().mean()))
        assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(stitched, classes)), abs=1e-5)
        assert int(result.text_tokens.sum()) == 30

    @pytest.mark.heavy("many stitches")
    def test_the_class_of_a_row_does_not_need_its_first_positions(self):
        base = self.build("bert", 0)
        tuned = self.build("bert", 1)
        data = {"input_ids": rows(12, 9), "labels": torch.arange(12) % 3}

        result = lsim.stitch(base, tuned, data, at=(2, 2), adapter="identity")
        later = lsim.stitch(base, tuned, lsim.Data(data, skip_first=2), at=(2, 2), adapter="identity")

        assert later.loss == result.loss
        assert int(later.text_tokens.sum()) == 12
        assert result.unit == "row"
        assert "nats per row" in result.plot().layout.yaxis.title.text

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_padded_rows_and_training(self):
        base = self.build("bert", 0)
        tuned = self.build("bert", 1)
        data = {"input_ids": [rows(20, 9)[i, : 4 + i % 5].tolist() for i in range(20)], "labels": [i % 3 for i in range(20)]}

        result = lsim.stitch(base, tuned, lsim.Data(data, batch_size=4), at=(2, 2), fit="sgd", training=QUICK)

        assert len(result.curve) == 30

        grid = lsim.stitch_grid({"a": base, "b": tuned}, lsim.Data(data, batch_size=4), adapter="identity")
        assert grid.penalty.shape == (2, 2, 3)
        assert grid.accuracy_penalty[0, 0].abs().max() == 0

    def test_a_label_that_is_no_class(self):
        base = self.build("bert", 0)
        with pytest.raises(lsim.LayersimError, match="`labels`"):
            lsim.stitch(base, base, {"input_ids": rows(4), "labels": [0, 1, 2, 7]}, at=(0, 0), adapter="identity")

    def test_a_language_model_beside_a_classifier(self):
        with pytest.raises(lsim.LayersimError, match="LlamaForSequenceClassification, LlamaForCausalLM"):
            lsim.stitch_grid({"a": self.build("llama", 0), "b": tiny_llama()}, rows(4), adapter="identity")

    def test_the_last_token_is_the_one_that_the_back_reads(self):
        """The tokenizer pads with another token than the classifier's own configuration names."""
        base = self.build("llama", 0)
        tuned = self.build("llama", 1)
        base.tokenizer = tuned.tokenizer = tiny_tokenizer()
        texts = []
        for i in range(20):
            # Two to seven words, so that rows are padded.
            texts.append(" ".join(f"w{3 + (7 * i + j) % 90}" for j in range(2 + i % 6)))
        data = {"text": texts, "label": [i % 3 for i in range(20)]}

        single, many = (lsim.stitch(base, tuned, lsim.Data(data, batch_size=n), at=(1, 1), adapter="identity") for n in (1, 20))

        assert many.loss == pytest.approx(single.loss, abs=1e-6)
        assert many.back_loss == pytest.approx(single.back_loss, abs=1e-6)

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

        result = lsim.stitch(*models, data, at=(0, 0), adapter="identity")

        assert result.provenance.options["labels"] == "data"

        with torch.no_grad():
            back_logits = models[1](rows(4)).logits
        expected = torch.nn.functional.cross_entropy(back_logits.reshape(-1, 120), (rows(4) + 10).reshape(-1))
        assert result.back_loss == pytest.approx(float(expected), abs=1e-6)

    def test_models_without_a_head_or_that_see_their_targets(self):
        with pytest.raises(lsim.LayersimError, match=r"`model`.*last_hidden_state"):
            lsim.stitch(tiny_llama().model, tiny_llama(seed=1).model, rows(4) % 30, at=(0, 0), adapter="identity")
        with pytest.raises(lsim.LayersimError, match="`labels` is None"):
            lsim.stitch(family("bert"), family("bert", 1), rows(4), at=(0, 0), adapter="identity")


class TestHeadsThatPool:
    @pytest.mark.parametrize("name", ["modernbert mean", "dinov2"])
    def test_the_score_is_that_of_the_swapped_model(self, name):
        case = CASES[name]
        classes = torch.tensor([0, 2, 1, 1, 0])
        front = case.build(0)
        back = case.build(1)
        data = case.data(labels=classes)

        result = lsim.stitch(front, back, lsim.Data(data, batch_size=3), at=(1, 1), adapter="identity", eval_data=data)
        back_logits = []
        stitched = []
        for row in case.rows():
            second = block_outputs(front, case.paths, row)[1]
            block = back.get_submodule(case.paths[1])
            back_logits.append(layer_logits(back, case.paths, row)[-1])
            handle = block.register_forward_hook(lambda _m, _a, output, x=second: replaced(output, x))
            with torch.no_grad():
                stitched.append(back(**row).logits)
            handle.remove()
        cross_entropy = torch.nn.functional.cross_entropy

        assert result.back_loss == pytest.approx(float(cross_entropy(torch.cat(back_logits), classes)), rel=1e-9)
        assert result.loss == pytest.approx(float(cross_entropy(torch.cat(stitched), classes)), rel=1e-9)
