"""Heads of classifiers, against the model's own forward pass with each layer's residual in place of the last block's output."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.architectures.layouts import HEADS_BY_CLASS, NO_HEAD
from tl_layersim.architectures.unembed import Pool

from .. import oracles
from ..models.head_models import CASES, CLASSES, WORDS, HeadCase, block_outputs, layer_logits
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import nnsight
from ..running.options import called

LABELS = torch.tensor([0, 2, 1, 1, 0])
LEVELS = (0.0, 0.4, 0.6, 1.0)
ANALYZERS = [lsim.LogitLens(labels="data", top_k=(1, 2)), lsim.Saturation(), lsim.ExitCurve(thresholds=LEVELS, labels="data")]
ROWS = [name for name, case in CASES.items() if case.reads == "rows"]


def own_logits(case: HeadCase, count: int = 5) -> torch.Tensor:
    """`row layer class`, each row alone and without padding."""
    model = case.build()
    return torch.stack([torch.cat(layer_logits(model, case.paths, row)) for row in case.rows(count)])


def assert_lens(report: lsim.Report, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Every number of the lens, saturation and the exit curve from logits `row layer class`, in float64."""
    log_probs, best = logits.log_softmax(-1), logits.argmax(-1)
    layers, rows = logits.shape[1], torch.arange(len(logits))
    target = log_probs[rows, :, labels]
    lens = report["logit_lens"]
    assert (lens.positions, lens.targets) == (len(logits), len(logits))
    expected = {
        "cross_entropy": -target.mean(0),
        "accuracy": (best == labels[:, None]).double().mean(0),
        "agreement": (best == best[:, -1:]).double().mean(0),
        "target_probability": target.exp().mean(0),
        "entropy": -(log_probs.exp() * log_probs).sum(-1).mean(0),
        "kl_to_final": (log_probs[:, -1:].exp() * (log_probs[:, -1:] - log_probs)).sum(-1).mean(0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(lens, name), value, rtol=1e-9, atol=1e-12, err_msg=name)
    two = (logits.topk(2, -1).indices == labels[:, None, None]).any(-1).double().mean(0)
    np.testing.assert_allclose(lens.top_k_accuracy[1], two)
    saturated = [min(n for n in range(layers) if bool((row[n:] == row[-1]).all())) for row in best]
    np.testing.assert_array_equal(report["saturation"].counts, np.bincount(saturated, minlength=layers))
    top = log_probs.amax(-1).exp()
    for level in LEVELS:
        exits = [next((n for n in range(layers - 1) if row[n] > level), layers - 1) for row in top]
        point = report["exit_curve"].at(level)
        np.testing.assert_array_equal(point.exits, np.bincount(exits, minlength=layers))
        assert point.accuracy == np.mean([best[row, n] == labels[row] for row, n in enumerate(exits)])


@pytest.mark.light("bert", "dinov2", "beit of [CLS]")
@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_read_as_the_model_reads_the_last(name):
    case, logits = CASES[name], own_logits(CASES[name])
    assert len(set(logits.argmax(-1).flatten().tolist())) > 1
    report = called(lsim.analyze, case.build(), case.data(labels=LABELS), ANALYZERS, batch_size=3, **case.options)
    assert_lens(report, logits, LABELS)
    assert report["logit_lens"].unembedding == case.head


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", ["modernbert mean", "deit with teacher"])
def test_one_row_and_the_grouping_of_rows(name):
    case, logits = CASES[name], own_logits(CASES[name])
    alone = called(lsim.analyze, case.build(), case.data(1, labels=LABELS[:1]), ANALYZERS, **case.options)
    assert_lens(alone, logits[:1], LABELS[:1])
    for size in (1, 5):
        report = called(lsim.analyze, case.build(), case.data(labels=LABELS), ANALYZERS, batch_size=size, **case.options)
        assert_lens(report, logits, LABELS)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", ["modernbert mean", "dinov2", "beit"])
def test_nnsight_reads_the_same_heads(name):
    case, logits = CASES[name], own_logits(CASES[name])
    for options in ({}, {"remote": "local"}):
        found = called(lsim.analyze, nnsight(case.build()), case.data(labels=LABELS), ANALYZERS, **case.options, **options)
        assert_lens(found, logits, LABELS)


@pytest.mark.light("modernbert mean", "clip")
@pytest.mark.parametrize("name", ["modernbert mean", "dinov2", "beit", "clip"])
def test_the_lens_without_the_norm_pools_the_residuals_themselves(name):
    case = CASES[name]
    model, data = case.build(), case.data(labels=LABELS)
    analyzers = [lsim.LogitLens(labels="data", norm="none"), lsim.Saturation(norm="none")]
    report = called(lsim.analyze, model, data, analyzers, **case.options)
    plain = case.build()
    blocks, final = [plain.get_submodule(path) for path in case.paths], own_logits(case)[:, -1:]
    norm = case.head.split("(x)")[0].split("(")[-1] if case.reads == "rows" and "(x)" in case.head else ""
    norm = {"beit": "beit.pooler.layernorm"}.get(name, norm)
    if norm:
        parent, _, last = norm.rpartition(".")
        setattr(plain.get_submodule(parent), last, torch.nn.Identity())
    bare = torch.stack([torch.cat(layer_logits(plain, case.paths, row)) for row in case.rows()])
    logits = torch.cat([bare[:, : len(blocks) - 1], final], 1)
    expected = -logits.log_softmax(-1)[torch.arange(5), :, LABELS].mean(0)
    np.testing.assert_allclose(report["logit_lens"].cross_entropy, expected, rtol=1e-9)
    assert norm == "" or norm not in report["logit_lens"].unembedding
    best = logits.argmax(-1)
    saturated = [min(n for n in range(3) if bool((row[n:] == row[-1]).all())) for row in best]
    np.testing.assert_array_equal(report["saturation"].counts, np.bincount(saturated, minlength=3))


@pytest.mark.light("modernbert mean-none", "dinov2-dataset")
@pytest.mark.parametrize("center", ["none", "dataset"])
@pytest.mark.parametrize("name", ["modernbert mean", "dinov2"])
def test_the_cosine_of_saturated_rows_is_that_of_pooled_residuals(name, center):
    case, model = CASES[name], CASES[name].build()
    found = called(lsim.analyze, model, case.data(), lsim.Saturation(center=center), **case.options)["saturation"]
    vectors, tokens = [], []
    for row in case.rows():
        x = torch.cat(block_outputs(model, case.paths, row))
        tokens.append(x)
        vectors.append(x.mean(1) if name != "dinov2" else torch.cat([x[:, 0], x[:, 1:].mean(1)], -1))
    mean = torch.cat(tokens, 1).mean(1) if center == "dataset" else torch.zeros(3, 16, dtype=torch.float64)
    mean = mean.repeat(1, vectors[0].shape[-1] // 16)
    best = own_logits(case).argmax(-1)
    cosines: dict[int, list[float]] = {}
    for row, x in zip(best, vectors, strict=True):
        layer = min(n for n in range(3) if bool((row[n:] == row[-1]).all()))
        pair = x[layer] - mean[layer], x[-1] - mean[-1]
        cosines.setdefault(layer, []).append(float(torch.cosine_similarity(*pair, 0)))
    for layer, value in cosines.items():
        np.testing.assert_allclose(found.cosine_to_last[layer], np.mean(value), rtol=1e-7)


def test_half_precision_rows_agree_with_the_model():
    case = CASES["dinov2"]
    model = case.build().to(torch.bfloat16)
    data = {"pixel_values": case.data()["pixel_values"].to(torch.bfloat16)}
    report = lsim.analyze(model, data | {"labels": LABELS}, lsim.LogitLens(labels="data"))
    with torch.no_grad():
        logits = model(**data).logits.double()
    own = torch.nn.functional.cross_entropy(logits, LABELS)
    np.testing.assert_allclose(report["logit_lens"].cross_entropy[-1], own, rtol=0.05)


TOKENS = {
    "DistilBertForMaskedLM": "vocab_projector(vocab_layer_norm(activation(vocab_transform(x))))",
    "ElectraForMaskedLM": "generator_lm_head(generator_predictions(x))",
    "ModernBertForMaskedLM": "decoder(head(model.final_norm(x)))",
    "BertForMaskedLM": "cls(x)",
    "RobertaForMaskedLM": "lm_head(x)",
    "DebertaForMaskedLM": "cls(x)",
    "DebertaV2ForMaskedLM": "cls(x)",
    "MPNetForMaskedLM": "lm_head(x)",
    "BertForTokenClassification": "classifier(x)",
    "RobertaForTokenClassification": "classifier(x)",
    "DistilBertForTokenClassification": "classifier(x)",
    "ElectraForTokenClassification": "classifier(x)",
    "DebertaForTokenClassification": "classifier(x)",
    "DebertaV2ForTokenClassification": "classifier(x)",
    "ModernBertForTokenClassification": "classifier(head(model.final_norm(x)))",
    "MPNetForTokenClassification": "classifier(x)",
}


@pytest.mark.light("DistilBertForMaskedLM", "MPNetForTokenClassification")
@pytest.mark.parametrize("name", TOKENS)
def test_heads_of_tokens_are_read_at_every_position(name):
    family = name.split("For")[0]
    text = next(case for case in CASES.values() if case.model == f"{family}ForSequenceClassification")
    case = HeadCase(name, text.settings, TOKENS[name], list=text.list)
    model = case.build()
    rows = [torch.stack(layer_logits(model, case.paths, row))[:, 0] for row in case.rows()]
    labels = torch.randint(0, CLASSES, (5, 9), generator=torch.Generator().manual_seed(0))
    report = lsim.analyze(case.build(), lsim.Data(case.data(), batch_size=3), lsim.LogitLens(labels=labels, top_k=1))
    targets = torch.cat([labels[number, : row.shape[1]] for number, row in enumerate(rows)])
    logits = torch.cat(rows, 1)
    expected = [float(torch.nn.functional.cross_entropy(layer, targets)) for layer in logits]
    np.testing.assert_allclose(report["logit_lens"].cross_entropy, expected, rtol=1e-9)
    np.testing.assert_allclose(report["logit_lens"].accuracy, (logits.argmax(-1) == targets).double().mean(1))
    assert report["logit_lens"].unembedding == case.head


def test_a_head_of_rows_measures_all_positions_by_default_and_no_fewer():
    case = CASES["modernbert mean"]
    data = case.data(labels=LABELS)
    both = lsim.analyze(case.build(), data, [lsim.LogitLens(labels="data"), lsim.Cosine(center="none")])
    assert both["cosine"].provenance.tokens == 31
    np.testing.assert_allclose(
        both["logit_lens"].cross_entropy[-1], -own_logits(case).log_softmax(-1)[torch.arange(5), -1, LABELS].mean()
    )
    for positions in ("first", "last", slice(0, 2), "mean"):
        with pytest.raises(lsim.LayersimError, match="positions"):
            lsim.analyze(case.build(), lsim.Data(data, positions=positions), lsim.LogitLens(labels="data"))
    with pytest.raises(lsim.LayersimError, match="`skip_first` is 1"):
        lsim.analyze(case.build(), lsim.Data(data, skip_first=1), lsim.Saturation())
    assert lsim.analyze(case.build(), lsim.Data(data, skip_first=1), lsim.Cosine(center="none"))
    with pytest.raises(lsim.LayersimError, match="labels` differ within a row"):
        lsim.analyze(case.build(), case.data(labels=torch.arange(45).view(5, 9) % 3), lsim.LogitLens(labels="data"))


def test_padding_on_the_left_is_no_part_of_the_mean():
    case = CASES["modernbert mean"]
    data = case.data(labels=LABELS)
    turned = {name: data[name].clone() for name in ("input_ids", "attention_mask")} | {"labels": LABELS}
    for number, length in enumerate(data["attention_mask"].sum(1).tolist()):
        for name in ("input_ids", "attention_mask"):
            turned[name][number] = data[name][number].roll(9 - length)
    ids = torch.arange(9).expand(5, 9) - (9 - data["attention_mask"].sum(1, keepdim=True))
    report = lsim.analyze(case.build(), turned | {"position_ids": ids.clamp(min=0)}, ANALYZERS)
    assert_lens(report, own_logits(case), LABELS)


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_a_head_at_the_end_of_the_other_stacks_text_is_refused_with_the_reason(family):
    torch.manual_seed(0)
    small = {"d_model": 16, "vocab_size": WORDS, "num_labels": CLASSES, "decoder_start_token_id": 0}
    if family == "T5":
        small |= {"num_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8}
    else:
        small |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    model = getattr(transformers, f"{family}ForSequenceClassification")(
        getattr(transformers, f"{family}Config")(**small)
    ).eval()
    ids = random_tokens(2, 6) % (WORDS - 5) + 5
    ids[:, -1] = model.config.eos_token_id
    data = {"input_ids": ids, "decoder_input_ids": ids.roll(1, 1), "label": torch.tensor([0, 1])}
    with pytest.raises(lsim.LayersimError, match=r"needs an unembedding(.|\n)*last end-of-text token"):
        lsim.analyze(model, data, lsim.LogitLens(labels="data"))
    assert lsim.analyze(model, data, lsim.Cosine(center="none"))


def test_pool_is_a_mean_over_attended_positions():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    attended = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 1]]).bool()
    x.masked_fill_(~attended[:, :, None], torch.nan)
    found = Pool((0, 1), 1)(x, attended)
    for layer in range(2):
        for row in range(3):
            mean = torch.stack([x[layer, row, n] for n in range(1, 5) if attended[row, n]]).mean(0)
            torch.testing.assert_close(found[layer, row], torch.cat([x[layer, row, 0], x[layer, row, 1], mean]))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_every_entry_of_the_table_names_classes_of_transformers():
    # Vectors are a source of this package.
    names = list(NO_HEAD.keys() - {"VectorSource"})
    for layout in HEADS_BY_CLASS:
        names += layout.classes
    assert all(hasattr(transformers, name) for name in names)


@pytest.mark.light("bert", "llama")
@pytest.mark.filterwarnings("ignore:NC1 is not defined at blocks.0.hook_resid_pre")
@pytest.mark.parametrize("name", ["bert", "modernbert mean", "dinov2", "deit with teacher", "llama"])
def test_collapse_of_what_the_head_reads(name):
    case, model = CASES[name], CASES[name].build()
    labels = torch.tensor([0, 1, 0, 1, 0])
    vectors = []
    for row in case.rows():
        x = torch.cat(block_outputs(model, case.paths, row))
        read = {"bert": x[:, 0], "modernbert mean": x.mean(1), "llama": x[:, -1]}
        read["dinov2"] = torch.cat([x[:, 0], x[:, 1:].mean(1)], -1)
        read["deit with teacher"] = torch.cat([x[:, 0], x[:, min(1, x.shape[1] - 1)]], -1)
        vectors.append(read[name])
    expected = oracles.oracle_neural_collapse([torch.stack(vectors, 1).numpy()], labels.tolist(), 2)["values"]
    asked = lsim.NeuralCollapse(labels="data", classes=2, pool="head")
    found = called(lsim.analyze, model, case.data(labels=labels), asked, **case.options)["neural_collapse"]
    np.testing.assert_allclose(found.values[1:], expected, rtol=1e-8)
    if case.reads == "rows":
        with pytest.raises(lsim.LayersimError, match="positions"):
            called(lsim.analyze, model, case.data(labels=labels), asked, positions="first", **case.options)


def test_collapse_of_what_a_language_model_reads_is_not_defined():
    with pytest.raises(lsim.LayersimError, match="`pool` is 'head'"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.NeuralCollapse(labels=torch.zeros(4).long(), pool="head"))


@pytest.mark.light("modernbert mean")
@pytest.mark.parametrize("name", ["modernbert mean", "dinov2", "beit"])
def test_skipped_blocks_change_the_classes_of_rows(name):
    case, model = CASES[name], CASES[name].build()
    found = called(lsim.analyze, model, case.data(4), lsim.SkipEffect(keep_first=1, splits=1), batch_size=3, **case.options)[
        "skip_effect"
    ]
    for skipped in range(3):
        every = []
        for row in case.rows(4):
            with torch.no_grad():
                own = model(**row).logits[0].softmax(-1)
            length = block_outputs(model, case.paths, row)[0].shape[1]

            def skip(_module, args, output, length=length):
                x = (output[0] if isinstance(output, tuple) else output).clone()
                x[:, 1:length] = args[0][:, 1:length]
                return (x, *output[1:]) if isinstance(output, tuple) else x

            handle = model.get_submodule(case.paths[skipped]).register_forward_hook(skip)
            with torch.no_grad():
                every.append(float((own - model(**row).logits[0].softmax(-1)).norm()))
            handle.remove()
        np.testing.assert_allclose(found.probability_change[skipped], np.mean(every), rtol=1e-8)
        # The head also reads the positions at which the block is skipped.
        assert bool(found.later_probability_change[skipped].isnan())
