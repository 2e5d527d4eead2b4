"""A BOS that a text brings along is not doubled, and padding that comes without a mask is not counted."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.data.data import Data
from tl_layersim.data.tokenization import adds_specials
from tl_layersim.sources.model_description import ModelDescription

from ..models.tiny_models import hidden_states, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from . import helpers

PAD = 99


def model(tokenizer=None, **more) -> ModelDescription:
    return replace(helpers.model(), tokenizer=tokenizer, **more)


def read(
    data, known: ModelDescription, seq_len: int | None = None, pack: bool = False, bos: bool = True
) -> tuple[list[list[int]], Batches]:
    batches = Batches(Data(data, batch_size=2, seq_len=seq_len, pack=pack, prepend_bos=bos), known)
    return [t[a].tolist() for b in batches for t, a in zip(b.tokens, b.attention, strict=True)], batches


def gpt_tokenizer():
    """BOS, EOS and padding are one token, as in GPT-2."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


def cls_tokenizer():
    """A tokenizer that writes [CLS] and [SEP] by itself."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.cls_token, tokenizer.sep_token = "<s>", "</s>"
    return tokenizer


def padding_tokenizer():
    """Padding is a token of its own."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = f"w{PAD}"
    return tokenizer


class TestBos:
    def test_a_text_that_starts_with_bos_gets_no_second_one(self):
        rows, batches = read(["<s> w3 w4", "w5", "<s>w6"], model(tiny_tokenizer()))
        assert rows == [[1, 3, 4], [1, 5], [1, 6]]
        assert batches.row_counts()["own_bos"] == 2

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_the_record_says_how_many_rows_had_one(self):
        texts = ["<s> w3 w4 w5", "w5 w6 w7", "<s> w6 w3 w8"]
        plain = [text.removeprefix("<s> ") for text in texts]
        llama = tiny_llama()
        llama.tokenizer = tiny_tokenizer()
        for center in ("dataset", "none"):
            found, same = (lsim.analyze(llama, data, lsim.Cosine(center=center))["cosine"] for data in (texts, plain))
            assert torch.equal(found.values, same.values)
            assert found.provenance.data == same.provenance.data
            assert (found.provenance.options["own_bos"], same.provenance.options["own_bos"]) == (2, 0)

    def test_the_numbers_are_those_of_the_text_as_it_is(self):
        llama, text = tiny_llama(), "<s> w3 w4 w5 w9 w11"
        x = hidden_states(llama, torch.tensor([1, 3, 4, 5, 9, 11]))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        found = lsim.analyze(llama, lsim.Data([text], tokenizer=tiny_tokenizer()), lsim.Cosine(center="none"))["cosine"]
        np.testing.assert_allclose(found.values.numpy(), np.einsum("ltd,mtd->lm", x, x) / 6, atol=1e-6)

    def test_a_long_text_loses_nothing(self):
        rows, _ = read(["<s> w3 w4 w5 w6 w7"], model(tiny_tokenizer()), seq_len=4)
        assert rows == [[1, 3, 4, 5], [1, 6, 7]]

    def test_without_prepend_bos_the_text_is_taken_as_it_is(self):
        rows, batches = read(["<s> w3", "w4"], model(tiny_tokenizer()), bos=False)
        assert rows == [[1, 3], [4]]
        assert batches.row_counts()["own_bos"] == 0

    def test_packed_rows_start_with_one(self):
        rows, batches = read(["<s> w3 w4 w5", "w6", "<s> w7 w8"], model(tiny_tokenizer()), seq_len=4, pack=True)
        assert rows == [[1, 3, 4, 5], [1, 2, 6, 2], [1, 7, 8, 2]]
        assert batches.row_counts()["own_bos"] == 2

    def test_where_bos_separates_texts_too_one_is_enough(self):
        rows, _ = read(["</s> w3 w4", "</s> w5", "w6 w7"], model(gpt_tokenizer()), seq_len=4, pack=True)
        assert rows == [[2, 3, 4, 2], [2, 5, 2, 6], [2, 7, 2]]
        # A separator at the start of a row is the end of the text before, and no BOS.
        rows, batches = read(["w3 w4 w5", "w6"], model(gpt_tokenizer()), seq_len=4, pack=True)
        assert rows == [[2, 3, 4, 5], [2, 2, 6, 2]]
        assert batches.row_counts()["own_bos"] == 0

    def test_cls_and_sep_of_a_text_are_not_doubled(self):
        rows, batches = read(["<s> w3 w4 </s>", "w5"], model(cls_tokenizer()))
        assert rows == [[1, 3, 4, 2], [1, 5, 2]]
        assert batches.row_counts()["own_bos"] == 1

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_stitching_and_training_record_it(self):
        llama = tiny_llama()
        llama.tokenizer = tiny_tokenizer()
        texts = ["<s> w3 w4 w5", "w5 w6 w7"] * 5
        joined = lsim.stitch(llama, llama, texts, at=(0, 0), adapter="identity", eval_data=texts[:4])
        assert joined.provenance.options["own_bos"] == 7
        trained = lsim.finetune_aligned(llama, texts, lsim.AlignedTraining(steps=1, warmup=0))
        assert trained.provenance.options["own_bos"] == 5

    @pytest.mark.light("w5 w6")
    @pytest.mark.parametrize("text", ["w5 w6", "<s> w5 w6"])
    def test_generation_of_a_stitched_model_starts_as_analyze_reads(self, text):
        llama = tiny_llama()
        joined = lsim.stitch(
            llama, llama, lsim.Data(["w3 w4 w5 w6"] * 6, tokenizer=tiny_tokenizer()), at=(1, 1), adapter="identity"
        ).model
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens = joined.generate(torch.tensor([[1, 5, 6]]), **options)
        assert joined.generate(text, **options) == tiny_tokenizer().decode(tokens[0], skip_special_tokens=True)
        assert torch.equal(tokens, llama.generate(torch.tensor([[1, 5, 6]]), **options))
        early = lsim.EarlyExit(llama, 1.0).generate(text, max_new_tokens=4, eos_token_id=(), tokenizer=tiny_tokenizer())
        assert torch.equal(early.tokens[0], tokens[0, 3:])


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 20, 7 and 11 tokens, and their mask."""
    tokens = random_tokens(3).clamp(max=PAD - 1)
    keep = torch.arange(20) < torch.tensor([20, 7, 11])[:, None]
    keep = keep.flip(1) if side == "left" else keep
    return torch.where(keep, tokens, PAD), keep


class TestPadding:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("known", ["tokenizer", "configuration"])
    def test_padding_without_a_mask_is_not_counted(self, side, known):
        llama, (tokens, mask) = tiny_llama(), padded(side)
        if known == "tokenizer":
            llama.tokenizer = padding_tokenizer()
        else:
            llama.config.pad_token_id = PAD
        with pytest.warns(lsim.LayersimWarning, match=rf"without an attention mask.*id {PAD} at the ends"):
            found = lsim.analyze(llama, tokens, lsim.Cosine())["cosine"]
        masked = lsim.analyze(llama, {"input_ids": tokens, "attention_mask": mask}, lsim.Cosine())["cosine"]
        assert found.provenance.tokens == masked.provenance.tokens == 38
        assert torch.equal(found.values, masked.values)
        assert found.provenance.options["masked_by_pad_id"] == 2
        assert masked.provenance.options["masked_by_pad_id"] == 0

    def test_of_several_rows_one_warning_is_enough(self):
        tokens, _ = padded("right")
        with pytest.warns(lsim.LayersimWarning) as said:
            rows, batches = read(list(tokens), model(padding_tokenizer()))
        assert [len(row) for row in rows] == [20, 7, 11]
        assert len(said) == 1
        # A second pass over the data says nothing new.
        assert len(list(batches)) == 2

    @pytest.mark.parametrize("kind", ["one mapping", "mappings of a row", "ragged", "array"])
    def test_in_every_form(self, kind):
        tokens, _ = padded("right")
        forms = {
            "one mapping": {"input_ids": tokens},
            "mappings of a row": [{"input_ids": row.tolist()} for row in tokens],
            "ragged": {"input_ids": [tokens[0].tolist(), tokens[1, :9].tolist()]},
            "array": tokens.numpy(),
        }
        with pytest.warns(lsim.LayersimWarning, match="without an attention mask"):
            rows, _ = read(forms[kind], model(pads=(PAD,)))
        assert [len(row) for row in rows] == ([20, 7] if kind == "ragged" else [20, 7, 11])

    @pytest.mark.parametrize(
        ("rows", "more"),
        [
            ([[3, PAD, 4, 5], [3, 4, 5, PAD]], {"pads": (PAD,)}),
            ([[3, 4, 2, 2]], {"pads": (2,), "ends": (1, 2)}),
            ([[2, 2, 3, 4]], {"tokenizer": tiny_tokenizer()}),
            ([[2, 2, 2, 4]], {"pads": (2,), "starts": (2,)}),
        ],
        ids=["inside rows", "end-of-text of the configuration", "end-of-text of the tokenizer", "three BOS"],
    )
    def test_padding_that_may_be_tokens_is_refused(self, rows, more):
        with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.* 1 of \d "):
            read(torch.tensor(rows), model(**more))

    def test_an_unknown_token_that_is_the_padding_too_is_refused_at_an_end_alone(self):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = tokenizer.unk_token
        assert read(torch.tensor([[3, 0, 4]]), model(tokenizer))[0] == [[3, 0, 4]]
        with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.* 1 of 1 "):
            read(torch.tensor([[3, 4, 0]]), model(tokenizer))

    def test_a_single_end_of_text_is_a_token(self):
        assert read(torch.tensor([[1, 3, 4, 2]]), model(tiny_tokenizer(), pads=(2,)))[0] == [[1, 3, 4, 2]]

    def test_labels_keep_their_places(self):
        llama, (tokens, mask) = tiny_llama(), padded("left")
        llama.config.pad_token_id = PAD
        labels = torch.where(mask, tokens.roll(-1, 1), -100)
        with pytest.warns(lsim.LayersimWarning, match="without an attention mask"):
            found = lsim.analyze(llama, {"input_ids": tokens, "labels": labels}, lsim.LogitLens(labels="data"))["logit_lens"]
        data = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
        assert torch.equal(found.values, lsim.analyze(llama, data, lsim.LogitLens(labels="data"))["logit_lens"].values)

    def test_early_exit_goes_on_from_what_is_no_padding(self):
        llama, (tokens, mask) = tiny_llama(), padded("left")
        llama.config.pad_token_id = PAD
        early = lsim.EarlyExit(llama, 1.0)
        with pytest.warns(lsim.LayersimWarning, match="without an attention mask"):
            found = early.generate(tokens, max_new_tokens=3, eos_token_id=())
        masked = early.generate(tokens, attention_mask=mask, max_new_tokens=3, eos_token_id=())
        assert all(torch.equal(x, y) for x, y in zip(found.tokens, masked.tokens, strict=True))

    def test_attach_refuses_padding_that_the_model_attends_to(self):
        llama, (tokens, mask) = tiny_llama(), padded("right")
        llama.config.pad_token_id = PAD
        with lsim.attach(llama, lsim.Cosine(center="none")) as probe, torch.no_grad():
            llama(tokens)
        with pytest.raises(lsim.LayersimError, match="`attention_mask`"):
            probe.results()
        with lsim.attach(llama, lsim.Cosine(center="none")) as probe, torch.no_grad():
            llama(tokens, attention_mask=mask.long())
        assert probe.results()["cosine"].provenance.tokens == 38

    def test_rows_that_end_in_eos_are_refused_where_no_padding_id_is_named(self):
        gpt2, tokens = tiny_gpt2(), random_tokens(4, 12)
        tokens[1:, 7:] = 2
        with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.* 3 of 4 .* 2 "):
            lsim.analyze(gpt2, tokens, lsim.Cosine(center="none"))
        mask = {"input_ids": tokens, "attention_mask": (tokens != 2).long()}
        assert lsim.analyze(gpt2, mask, lsim.Cosine(center="none"))["cosine"].provenance.tokens == 12 + 3 * 7


PLAIN = torch.arange(3, 93).view(30, 3).repeat(1, 4)


def runs(count: int, side: str = "end", pad: int = 0, rows: torch.Tensor = PLAIN) -> torch.Tensor:
    """Rows of which the first `count` end (or start) with 2, 3, 4, ... of `pad`."""
    rows = rows.clone()
    for i in range(count):
        n = 2 + i % 5
        rows[i, slice(None, n) if side == "start" else slice(-n, None)] = pad
    return rows


class TestRunsOfAnIdThatNothingNames:
    @pytest.mark.parametrize("side", ["start", "end"])
    @pytest.mark.parametrize("form", [lambda x: x, list, lambda x: list(x.split(4)), lambda x: list(x.flip(0))])
    @pytest.mark.parametrize("size", [2, 7])
    def test_rows_that_most_end_in_one_are_refused_and_some_are_named_once(self, side, form, size):
        read_all = lambda x: list(Batches(Data(form(x), batch_size=size), model(padding_tokenizer())))  # noqa: E731
        with pytest.raises(lsim.LayersimError, match=rf"`attention_mask`.* of 30 .* 0 .*\b{side}\b"):
            read_all(runs(16, side))
        for count in (15, 2):
            with pytest.warns(lsim.LayersimWarning) as said:
                assert sum(len(batch.tokens) for batch in read_all(runs(count, side))) == 30
            assert [str(w.message)[: len(f"{count} of 30")] for w in said] == [f"{count} of 30"]
        read_all(runs(1, side))
        # One row with more than a doubled token.
        with pytest.warns(lsim.LayersimWarning, match=r"^1 of 30 .* 0 "):
            read_all(torch.cat([runs(2, side)[1:], PLAIN[:1]]))

    def test_most_rows_of_the_first_tables_are_enough_to_refuse_a_stream(self):
        rows = runs(90, rows=PLAIN.repeat(40, 1))
        with pytest.raises(lsim.LayersimError, match="64 of 64 rows have token 0"):
            list(Batches(Data(iter(rows.split(16))), model(padding_tokenizer())))

    def test_an_id_that_is_elsewhere_in_the_rows_is_text(self):
        lines = runs(30, pad=7)
        lines[:, 2] = 7
        assert len(read(lines, model(padding_tokenizer()))[0]) == 30
        assert len(read(torch.full((30, 6), 5), model(padding_tokenizer()))[0]) == 30

    def test_one_token_at_an_end_is_no_padding(self):
        rows = PLAIN.clone()
        rows[:, 0], rows[:, -1] = 0, 90
        with warnings.catch_warnings(action="error"):
            assert len(read(rows, model(padding_tokenizer()))[0]) == len(rows)

    @pytest.mark.parametrize(
        "more", [{"tokenizer": tiny_tokenizer()}, {"starts": (1,)}, {"pads": (1,), "starts": (1,), "ends": (2,)}]
    )
    def test_two_bos_at_the_start_are_tokens(self, more):
        assert len(read(runs(5, "start", 1)[::5], model(**more))[0]) == 6

    def test_every_reader_of_rows_without_a_mask(self):
        llama, rows = tiny_llama(), runs(90, rows=PLAIN.repeat(3, 1))
        for call in (
            lambda: lsim.EarlyExit(llama, 1.0).generate(rows, max_new_tokens=1, eos_token_id=()),
            lambda: lsim.finetune_aligned(llama, rows, lsim.AlignedTraining(steps=1, warmup=0)),
        ):
            with pytest.raises(lsim.LayersimError, match="90 of 90 rows have token 0"):
                call()
        with lsim.attach(llama, lsim.Cosine(center="none")) as probe, torch.no_grad():
            for part in rows.split(3):
                llama(part)
        with pytest.raises(lsim.LayersimError, match=r"66 of 66 rows have token 0"):
            probe.results()
        with lsim.attach(llama, lsim.Cosine(center="none")) as probe, torch.no_grad():
            llama(runs(3))
        with pytest.warns(lsim.LayersimWarning, match="3 of 30"):
            probe.results()
        # A warning is given once, and rows before a reset do not count.
        probe.results()
        probe.reset()
        with pytest.raises(lsim.LayersimError, match=r"`with`.*model\.forward\(tokens\)"):
            probe.results()


@pytest.mark.parametrize(("specials", "own"), [(0, False), (1, False), (2, True)])
def test_a_tokenizer_that_adds_two_specials_decides_them_and_one_that_adds_a_bos_does_not(specials, own):
    tokenizer = SimpleNamespace(bos_token_id=1, cls_token_id=None, num_special_tokens_to_add=lambda: specials)
    assert adds_specials(tokenizer) == own
