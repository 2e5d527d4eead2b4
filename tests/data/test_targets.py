"""Labels and next tokens: where they come from, and to which position they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL

from .. import oracles
from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import build, by_hand, nnsight, tables


def test_rows_of_one_token_have_no_target_and_still_a_prediction():
    model = tiny_llama()
    mixed = [torch.tensor([5]), torch.tensor([7, 9, 11])]
    found = lsim.analyze(model, mixed, [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()])
    assert (found["logit_lens"].positions, found["logit_lens"].targets) == (4, 2)
    assert found["saturation"].counts.sum() == 4
    single = lsim.analyze(model, [torch.tensor([5])], lsim.LogitLens())["logit_lens"]
    assert bool(single.cross_entropy.isnan().all())
    assert bool(single.entropy.isfinite().all())
    assert lsim.analyze(model, [torch.tensor([5])], lsim.Saturation())["saturation"].counts.sum() == 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_labels_in_the_data_and_labels_in_a_tensor_are_one():
    model, tokens = tiny_llama(), random_tokens(5, 9)
    shifted = torch.full_like(tokens, NO_LABEL)
    shifted[:, :-1] = tokens[:, 1:]
    plain = lsim.analyze(model, lsim.Data(tokens, batch_size=2), [lsim.LogitLens(), lsim.ExitCurve()])
    data = {"input_ids": tokens, "labels": shifted}
    for labels, what in (("data", data), (shifted, tokens)):
        every = [lsim.LogitLens(labels=labels), lsim.ExitCurve(labels=labels)]
        found = lsim.analyze(model, lsim.Data(what, batch_size=2), every)
        for name in plain:
            assert worst(found[name], plain[name]) == 0
    some = shifted.clone()
    some[:, ::2] = NO_LABEL
    masked = lsim.analyze(model, lsim.Data(tokens, batch_size=2), lsim.LogitLens(labels=some))["logit_lens"]
    assert (masked.positions, masked.targets) == (45, 20)
    states, _ = tables(model, list(tokens))
    logits = by_hand(model, states)
    known = [(t, int(y)) for t, y in enumerate(some.flatten()) if y != NO_LABEL]
    own = [-np.mean([np.log(oracles.softmax(z[t])[y]) for t, y in known]) for z in logits]
    np.testing.assert_allclose(masked.cross_entropy, own, rtol=1e-5)


def test_labels_that_are_the_tokens_themselves_are_refused():
    tokens = random_tokens(3, 9)
    hf = {"input_ids": tokens, "labels": tokens.clone()}
    with pytest.raises(lsim.LayersimError, match=r"`labels`.* 27 .*'next_token'"):
        lsim.analyze(tiny_llama(), hf, lsim.LogitLens(labels="data"))
    # Without being asked for they are nobody's business.
    assert lsim.analyze(tiny_llama(), hf, lsim.LogitLens())


@pytest.mark.parametrize(
    ("labels", "data", "message"),
    [
        ("data", random_tokens(3, 9), r"`data` has no labels"),
        (
            torch.zeros(2, 9).long(),
            random_tokens(3, 9),
            r"`labels`.*\(2, 9\).* 3 .* 9 ",
        ),
        (torch.zeros(3, 5).long(), random_tokens(3, 9), r"`labels`.*\(3, 5\).* 3 .* 9 "),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, data, message):
    for cls in (lsim.LogitLens, lsim.ExitCurve, lsim.NeuralCollapse):
        with pytest.raises(lsim.LayersimError, match=message):
            lsim.analyze(tiny_llama(), data, cls(labels=labels))
    for bad in (torch.zeros(3), torch.zeros(2, 2, 2).long(), [0.5]):
        with pytest.raises(lsim.LayersimError, match=r"`labels` is torch.(float|int)"):
            lsim.LogitLens(labels=bad)
    for names in (["a", "b"], np.array(["a", "b"]), object(), [[1, 2], [3]]):
        with pytest.raises(lsim.LayersimError, match=r"`labels` is .* integers, in rows of equal shape\.$"):
            lsim.LogitLens(labels=names)
    with pytest.raises(lsim.LayersimError, match="`labels` is 'label'"):
        lsim.LogitLens(labels="label")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_columns_of_labels_are_read_from_tables():
    datasets = pytest.importorskip("datasets")
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    texts, label = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w3 w9"] * 3, [0, 1, 0, 1] * 3
    analyzer = lsim.NeuralCollapse(labels="data")
    table = datasets.Dataset.from_dict({"text": texts, "label": label})
    found = lsim.analyze(model, table, analyzer)["neural_collapse"]
    assert (found.labels, found.samples.tolist()) == ((0, 1), [6, 6])
    given = lsim.analyze(model, texts, lsim.NeuralCollapse(labels=torch.tensor(label)))["neural_collapse"]
    assert worst(found, given) == 0
    import pandas

    frame = lsim.analyze(model, pandas.DataFrame({"text": texts, "label": label}), analyzer)["neural_collapse"]
    assert worst(found, frame) == 0
    for other in (["a", "b"] * 6, [0.5, 1.5] * 6, [[0, 3], [1]] * 6):
        odd = datasets.Dataset.from_dict({"text": texts, "label": other})
        with pytest.raises(lsim.LayersimError, match="`labels`"):
            lsim.analyze(model, odd, analyzer)
        # Nobody who does not ask for labels is bothered with them.
        assert lsim.analyze(model, odd, lsim.Cosine(center="none"))
    with pytest.raises(lsim.LayersimError, match=r"`labels`.* 2 .* 3\b"):
        lsim.analyze(model, {"text": texts[:3], "label": [0, 1]}, analyzer)
    with pytest.raises(lsim.LayersimError, match=r"`data` has no labels(.|\n)*pack=True"):
        lsim.analyze(model, lsim.Data(table, pack=True), analyzer)


@pytest.mark.parametrize("label", [100, -1])
def test_labels_outside_the_head_are_refused(label):
    labels = torch.full((4, 12), 5)
    labels[:, ::2] = label
    labels[:, 1::4] = label
    with pytest.raises(lsim.LayersimError, match=rf"`labels` .* {label} to {label}\b.*0 to 99"):
        lsim.analyze(tiny_llama(), random_tokens(4, 12), lsim.LogitLens(labels=labels))


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:`labels` has")
def test_labels_follow_the_rows_and_positions_of_the_users_data():
    """Rows without tokens, padding on the left and rows that are split do not shift labels by row."""
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    texts, label = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w3 w9"] * 3, torch.tensor([0, 1, 0, 1] * 3)
    plain = lsim.analyze(model, texts, lsim.NeuralCollapse(labels=label))["neural_collapse"]
    labels, data = torch.cat([label[:5], torch.tensor([5]), label[5:]]), [*texts[:5], "", *texts[5:]]
    assert worst(lsim.analyze(model, data, lsim.NeuralCollapse(labels=labels))["neural_collapse"], plain) == 0

    tokens = random_tokens(3, 8)
    shifted = torch.full_like(tokens, NO_LABEL)
    shifted[:, :-1] = tokens[:, 1:]
    plain = lsim.analyze(model, tokens, lsim.LogitLens(labels=shifted))["logit_lens"]
    pad, none = torch.zeros(3, 4).long(), torch.full((3, 4), NO_LABEL)
    mask = torch.cat([pad, torch.ones(3, 8).long()], 1)
    left = {"input_ids": torch.cat([pad, tokens], 1), "attention_mask": mask}
    for what, labels in (
        (left, torch.cat([none, shifted], 1)),
        (
            {"input_ids": torch.cat([tokens[:1], tokens]), "attention_mask": torch.tensor([[0] * 8] + [[1] * 8] * 3)},
            torch.cat([shifted[:1], shifted]),
        ),
    ):
        assert worst(lsim.analyze(model, what, lsim.LogitLens(labels=labels))["logit_lens"], plain) < 1e-12
        assert worst(lsim.analyze(nnsight(model), what, lsim.LogitLens(labels=labels))["logit_lens"], plain) < 1e-5
    split = lsim.analyze(model, lsim.Data(tokens, seq_len=4), lsim.LogitLens(labels=shifted))["logit_lens"]
    assert split.targets == plain.targets
    with pytest.raises(lsim.LayersimError, match=r"a packed row joins several texts"):
        lsim.analyze(model, lsim.Data(texts, pack=True), lsim.LogitLens(labels=label))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_missing_label_is_none_whatever_the_batch():
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    data = [{"text": t, "label": y} for t, y in zip(["w3 w4 w5", "w6 w7", "w8 w9", "w3 w9"], [0, None, 1, 1], strict=True)]
    found = [
        lsim.analyze(model, lsim.Data(data, batch_size=b), lsim.NeuralCollapse(labels="data"))[
            "neural_collapse"
        ].samples.tolist()
        for b in (1, 2, 4)
    ]
    assert found == [[2, 1]] * 3


def test_masked_models_are_not_asked_for_the_next_token_in_silence():
    model = build("Bert")
    with pytest.warns(lsim.LayersimWarning, match="masked language model"):
        lsim.analyze(model, random_tokens(2, 9), lsim.LogitLens())


def test_labels_options_and_classes_as_users_have_them():
    import pandas

    wanted = torch.tensor([[1, 2], [3, 4]])
    for what in (wanted.tolist(), wanted.numpy(), pandas.DataFrame(wanted.numpy()), wanted):
        assert torch.equal(lsim.LogitLens(labels=what).labels, wanted)
    assert lsim.LogitLens(top_k=5).top_k == (5,)
    assert lsim.LogitLens(top_k=[1, 3]).top_k == (1, 3)
    assert lsim.ExitCurve(thresholds=0.9).thresholds == (0.9,)
    assert lsim.NeuralCollapse(classes=[1, 2]).classes == (1, 2)


def test_a_class_of_a_row_is_no_token():
    model, tokens = tiny_llama(), random_tokens(4, 12)
    for analyzer in (lsim.LogitLens, lsim.ExitCurve):
        with pytest.raises(lsim.LayersimError, match=r"`labels` .* 4 rows(.|\n)*AutoModelForSequenceClassification"):
            lsim.analyze(model, tokens, analyzer(labels=[0, 1, 0, 1]))
    assert lsim.analyze(model, tokens, lsim.NeuralCollapse(labels=[0, 1, 0, 1]))
    # Two labels of a row may be equal by chance.
    twice = torch.full_like(tokens, NO_LABEL)
    twice[:, 3:5] = torch.arange(4)[:, None]
    assert lsim.analyze(model, tokens, lsim.LogitLens(labels=twice))["logit_lens"].targets == 8


def test_a_table_of_labels_that_is_too_long_is_mentioned():
    tokens = random_tokens(4, 12)
    with pytest.warns(lsim.LayersimWarning, match=r"`labels` has 5 rows, .* 4\b"):
        lsim.analyze(tiny_llama(), tokens, lsim.NeuralCollapse(labels=[0, 1, 0, 1, 1]))
