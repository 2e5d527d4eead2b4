"""`positions=` of analyze, compare and attach against hooks of plain torch, in float64, row by row and without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.vision import detection_by_layer, tower_similarity

from .. import oracles
from ..models.clip_models import clip_of, pairs
from ..models.detectors import scenes, tiny_detr
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge, nnsight
from ..running.options import called
from ..training.helpers import bert

LENGTHS = (7, 4, 9, 5, 8, 6)
ROWS = [row[:n] for row, n in zip(random_tokens(len(LENGTHS), 9, seed=3), LENGTHS, strict=True)]


def above_50(tokens):
    return tokens > 50


# Each rule beside the same choice in plain Python, from the ids of a row.
RULES = {
    "all": ("all", lambda ids: range(len(ids))),
    "first": ("first", lambda ids: [0]),
    "last": ("last", lambda ids: [len(ids) - 1]),
    "slice": (slice(-3, -1), lambda ids: [len(ids) - 3, len(ids) - 2]),
    "function": (above_50, lambda ids: [i for i, token in enumerate(ids) if token > 50]),
    "column": ("third", lambda ids: [2]),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def causal_classifier():
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels, config.pad_token_id = 3, 2
    return LlamaForSequenceClassification(config).eval()


MODELS = {
    "llama": (tiny_llama, lambda m: m.model.layers),
    "llama classifier": (causal_classifier, lambda m: m.model.layers),
    "bert classifier": (bert, lambda m: m.bert.encoder.layer),
}


def first_of(x):
    return x[0] if isinstance(x, tuple) else x


def states(model, blocks, row):
    """`layer pos d_model` of one row by itself."""
    stream = []
    handles = [blocks[0].register_forward_pre_hook(lambda m, a: stream.append(a[0]))]
    handles += [block.register_forward_hook(lambda m, a, o: stream.append(first_of(o))) for block in blocks]
    with torch.no_grad():
        model(row[None])
    for handle in handles:
        handle.remove()
    return torch.stack(stream)[:, 0].double().numpy()


def by_hand(kind, choose):
    """The activations that the rule selects, `layer sample d_model`, and the model."""
    make, blocks_of = MODELS[kind]
    model = make().double()
    parts = [states(model, blocks_of(model), row)[:, list(choose(row.tolist()))] for row in ROWS]
    return model, np.concatenate(parts, axis=1)


def padded(left=()):
    """The rows padded to one length with a token that is not special, on the left for the rows in `left`."""
    width = max(LENGTHS)
    tokens, mask, third = (torch.zeros(len(ROWS), width, dtype=torch.int64) for _ in range(3))
    tokens += 77
    for i, row in enumerate(ROWS):
        start = width - len(row) if i in left else 0
        tokens[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = 1
        third[i, start + 2] = 1
    return {"input_ids": tokens, "attention_mask": mask, "third": third}


def check(result, x, center="none", atol=1e-10):
    expected = oracles.oracle_cosine([x], center=center)
    for name in ("values", "std", "norm_ratio"):
        np.testing.assert_allclose(getattr(result, name), expected[name], atol=atol, rtol=atol)
    assert result.provenance.tokens == x.shape[1]


@pytest.mark.covering
@pytest.mark.parametrize("kind", MODELS)
@each_rule
def test_each_rule_measures_the_positions_that_it_names(kind, rule):
    positions, choose = RULES[rule]
    model, x = by_hand(kind, choose)
    for data, size in ((padded(), 6), (padded(left=(1, 4)), 2), (padded(left=range(6)), 1)):
        result = lsim.analyze(model, lsim.Data(data, positions=positions, batch_size=size), lsim.Cosine(center="none"))[
            "cosine"
        ]
        check(result, x)

    assert result.provenance.options["positions"].startswith(positions if isinstance(positions, str) else ("-3:-1", "tests."))


@each_rule
def test_a_mean_of_the_data_and_cka_are_of_the_same_positions(rule):
    positions, choose = RULES[rule]
    model, x = by_hand("llama", choose)
    analyzers = [lsim.Cosine(), lsim.CKA(estimator="exact")]
    report = lsim.analyze(model, lsim.Data(padded(), positions=positions, batch_size=2), analyzers)
    # All first tokens are at position 0, and distinct.
    check(report["cosine"], x, center="dataset")
    expected = oracles.oracle_cka([x], exact=True, row=[rows_by_hand(choose)])

    np.testing.assert_allclose(report["cka"].values, expected["values"], atol=1e-9)
    assert report["cka"].samples == x.shape[1]


def rows_by_hand(choose):
    """The row of each counted position."""
    return np.concatenate([np.full(len(list(choose(row.tolist()))), number) for number, row in enumerate(ROWS)])


def means_by_hand(kind, skip=0):
    """The mean of each row's activations, `layer row d_model`, and the model."""
    make, blocks_of = MODELS[kind]
    model = make().double()
    return model, np.stack([states(model, blocks_of(model), row)[:, skip:].mean(1) for row in ROWS], axis=1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("skip", [0, 2])
def test_the_mean_of_a_row_is_one_sample(kind, skip):
    model, x = means_by_hand(kind, skip)
    for data, size in ((padded(), 6), (padded(left=(1, 4)), 4), (padded(left=range(6)), 1)):
        analyzers = [lsim.Cosine(), lsim.CKA(estimator="exact")]
        report = lsim.analyze(model, lsim.Data(data, positions="mean", batch_size=size, skip_first=skip), analyzers)
        np.testing.assert_allclose(report["cosine"].values, oracles.oracle_cosine([x])["values"], atol=1e-10)
        np.testing.assert_allclose(report["cka"].values, oracles.oracle_cka([x], exact=True)["values"], atol=1e-9)
        assert report["cka"].samples == len(ROWS)
        assert report["cka"].provenance.options["positions"] == "mean"


def test_labels_of_rows_are_labels_of_their_means():
    model, x = means_by_hand("llama")
    classes = [0, 1, 0, 1, 0, 1]
    expected = oracles.oracle_neural_collapse([x], classes, 2)["values"]

    for labels in ("data", torch.tensor(classes)):
        for level in ("token", "sequence"):
            analyzer = lsim.NeuralCollapse(labels=labels, classes=2, level=level)
            result = lsim.analyze(model, lsim.Data(labelled(classes), positions="mean", batch_size=4), analyzer)[
                "neural_collapse"
            ]
            np.testing.assert_allclose(result.values, expected, rtol=1e-6)


def test_means_of_two_models_are_compared():
    a, x = means_by_hand("llama")
    b = tiny_gpt2().double()
    y = np.stack([states(b, b.transformer.h, row).mean(1) for row in ROWS], axis=1)
    result = lsim.compare(a, b, lsim.Data(padded(), positions="mean", batch_size=4), lsim.CKA(estimator="exact"))
    np.testing.assert_allclose(result.values, oracles.oracle_cka([x], [y], exact=True)["values"], atol=1e-9)


@pytest.mark.covering
@pytest.mark.parametrize("source", ["bridge", "NNsight", "remote=local"])
@pytest.mark.parametrize("rule", ["mean", "last", "function"])
def test_every_source_measures_the_same_positions(source, rule):
    positions, choose = RULES.get(rule, ("mean", None))
    _, x = means_by_hand("llama") if choose is None else by_hand("llama", choose)
    model = tiny_llama().double()
    model = bridge(model) if source == "bridge" else nnsight(model)
    options = {"remote": "local"} if source == "remote=local" else {}
    result = called(lsim.analyze, model, padded(), lsim.Cosine(), positions=positions, batch_size=4, **options)["cosine"]
    # A bridge rotates positions in float32.
    atol = 1e-6 if source == "bridge" else 1e-10

    np.testing.assert_allclose(result.values, oracles.oracle_cosine([x])["values"], atol=atol)


@pytest.mark.parametrize(("kind", "rule"), [("llama", "all"), ("llama classifier", "last"), ("bert classifier", "first")])
def test_the_default_is_the_position_that_the_head_reads(kind, rule):
    model, x = by_hand(kind, RULES[rule][1])
    result = lsim.analyze(model, lsim.Data(padded(), batch_size=3), lsim.Cosine(center="none"))["cosine"]
    check(result, x)
    assert result.provenance.options["positions"] == rule


def test_a_model_without_a_head_is_measured_at_every_position():
    model, x = by_hand("llama", RULES["all"][1])
    result = lsim.analyze(model.model, padded(), lsim.Cosine(center="none"))["cosine"]
    check(result, x)
    assert result.provenance.options["positions"] == "all"


def labelled(values):
    return padded() | {"labels": torch.tensor(values)}


@pytest.mark.parametrize("kind", ["llama classifier", "bert classifier"])
def test_the_lens_of_a_classifier_reads_its_position_by_default_and_among_all(kind):
    """The lens of the last layer at the position that the head reads is the model's own answer, whatever `positions` says."""
    model = MODELS[kind][0]()
    classes = [0, 1, 2, 0, 1, 2]
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits for row in ROWS]).double()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(classes))
    accuracy = (logits.argmax(-1) == torch.tensor(classes)).double().mean()
    head = "first" if kind.startswith("bert") else "last"
    lens = lsim.LogitLens(labels="data")
    curve = lsim.ExitCurve(labels="data")

    for rule in (None, head, "all"):
        report = lsim.analyze(
            model, lsim.Data(labelled(classes), positions=rule, batch_size=4), [lens, curve, lsim.Saturation()]
        )
        assert report["logit_lens"].provenance.options["positions"] == (rule or head)
        assert (report["logit_lens"].positions, report["logit_lens"].targets) == (6, 6)
        assert float(report["logit_lens"].cross_entropy[-1]) == pytest.approx(float(loss), rel=1e-5)
        assert float(report["exit_curve"].accuracy[-1]) == pytest.approx(float(accuracy))
        assert float(report["saturation"].counts.sum()) == 6

    rows = lsim.analyze(model, padded(), lsim.LogitLens(labels=torch.tensor(classes)))["logit_lens"]
    assert float(rows.cross_entropy[-1]) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    "rule", ["other", slice(0, 3), above_50, "third"], ids=lambda rule: getattr(rule, "__name__", str(rule))
)
@pytest.mark.parametrize("kind", ["llama classifier", "bert classifier"])
def test_the_lens_of_a_classifier_elsewhere_is_refused(kind, rule):
    head = "first" if kind.startswith("bert") else "last"
    rule = {"first": "last", "last": "first"}[head] if rule == "other" else rule
    with pytest.raises(lsim.LayersimError, match=rf"`positions`.*'{head}'.*Saturation"):
        lsim.analyze(MODELS[kind][0](), lsim.Data(padded(), positions=rule), lsim.Saturation())


@pytest.mark.parametrize("kind", ["llama classifier", "bert classifier"])
def test_analyzers_of_whole_rows_see_whole_rows_by_default(kind):
    model, _ = by_hand(kind, RULES["all"][1])
    blocks = MODELS[kind][1](model)
    x = [states(model, blocks, row) for row in ROWS]
    means = np.stack([row.mean(1) for row in x], axis=1)
    pooled = lsim.analyze(model, padded(), lsim.CKA(level="sequence", estimator="exact"))["cka"]

    np.testing.assert_allclose(pooled.values, oracles.oracle_cka([means], exact=True)["values"], atol=1e-9)
    assert pooled.provenance.options["positions"] == "all"

    collapse = lsim.NeuralCollapse(labels="data", pool="mean")
    report = lsim.analyze(model, labelled([0, 1, 2, 0, 1, 2]), [collapse, lsim.LogitLens(labels="data")])
    expected = oracles.oracle_neural_collapse([means], [0, 1, 2, 0, 1, 2], 3)["values"]
    np.testing.assert_allclose(report["neural_collapse"].values, expected, rtol=1e-6)
    assert report["logit_lens"].positions == len(ROWS)


def test_rows_and_positions_together_need_a_rule():
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(level="sequence", estimator="exact")]
    with pytest.raises(lsim.LayersimError, match=r"`positions` must be given: CKA .*Cosine"):
        lsim.analyze(bert(), padded(), analyzers)
    for rule, count in (("all", sum(LENGTHS)), ("first", len(ROWS))):
        assert lsim.analyze(bert(), lsim.Data(padded(), positions=rule), analyzers)["cosine"].provenance.tokens == count
    # A language model is measured at every position in any case.
    assert lsim.analyze(tiny_llama(), padded(), analyzers)["cosine"].provenance.tokens == sum(LENGTHS)


def test_skip_first_of_the_default_first_is_refused():
    with pytest.raises(lsim.LayersimError, match="`skip_first` is 1"):
        lsim.analyze(bert(), lsim.Data(padded(), skip_first=1), lsim.Cosine(center="none"))
    model, x = by_hand("bert classifier", lambda ids: [1])
    check(lsim.analyze(model, lsim.Data(padded(), skip_first=1, positions="first"), lsim.Cosine(center="none"))["cosine"], x)


def test_a_row_without_a_selected_position_contributes_nothing():
    model, x = by_hand("llama", lambda ids: range(5, len(ids)))
    result = lsim.analyze(model, lsim.Data(padded(), positions=slice(5, None), batch_size=2), lsim.Cosine(center="none"))[
        "cosine"
    ]
    check(result, x)

    with pytest.raises(lsim.LayersimError, match=r"`data`.*`positions`"):
        lsim.analyze(model, lsim.Data(padded(), positions=slice(20, None)), lsim.Cosine(center="none"))


@pytest.mark.parametrize(
    "analyzer", [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(), lsim.BlockCoupling(k=3), lsim.NeuralCollapse()]
)
def test_the_mean_of_a_row_has_no_prediction(analyzer):
    with pytest.raises(lsim.LayersimError, match=rf"`positions` is 'mean'.*{type(analyzer).__name__}"):
        lsim.analyze(tiny_llama(), lsim.Data(padded(), positions="mean"), analyzer)


def test_a_language_model_predicts_the_next_token_at_the_chosen_position():
    model = tiny_llama()
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[:, 1] for row in ROWS]).double()
    loss = torch.nn.functional.cross_entropy(logits, torch.stack([row[2] for row in ROWS]))

    result = lsim.analyze(model, lsim.Data(padded(), positions=slice(1, 2)), lsim.LogitLens())["logit_lens"]

    assert float(result.cross_entropy[-1]) == pytest.approx(float(loss), rel=1e-5)


def distributions(model) -> torch.Tensor:
    """`layer row vocabulary`, the lens at the last position of each row, by hooks of the test's own."""
    logits = []
    for row in ROWS:
        outputs = []
        handles = [
            block.register_forward_hook(lambda m, a, o, outputs=outputs: outputs.append(o)) for block in model.model.layers
        ]
        with torch.no_grad():
            model(row[None])
            logits.append(torch.stack([model.lm_head(model.model.norm(x))[0, -1] for x in outputs]))
        for handle in handles:
            handle.remove()
    return torch.stack(logits, 1).double().log_softmax(-1)


@pytest.mark.parametrize("how", ["analyze", "attach"])
def test_the_last_position_has_a_prediction_and_no_target(how):
    model = tiny_llama()
    logs = distributions(model)
    analyzers = [lsim.LogitLens(), lsim.ExitCurve(thresholds=(0.1,)), lsim.Saturation()]
    if how == "analyze":
        report = lsim.analyze(model, lsim.Data(padded(), positions="last"), analyzers)
    else:
        with lsim.attach(model, analyzers, positions="last") as probe, torch.no_grad():
            for row in ROWS:
                model(row[None])
        report = probe.results()
    lens = report["logit_lens"]
    curve = report["exit_curve"]

    assert (lens.positions, lens.targets) == (len(ROWS), 0)
    for field in ("cross_entropy", "perplexity", "accuracy", "target_probability", "lost_share", "monotone_share"):
        assert bool(getattr(lens, field).isnan().all()), field

    entropy = -(logs.exp() * logs).sum(-1).mean(1)
    assert lens.entropy.tolist() == pytest.approx(entropy.tolist(), rel=1e-5)
    kl = (logs[-1].exp() * (logs[-1] - logs)).sum(-1).mean(1)
    assert lens.kl_to_final.tolist() == pytest.approx(kl.tolist(), rel=1e-4, abs=1e-6)

    agreement = (logs.argmax(-1) == logs.argmax(-1)[-1]).double().mean(1)
    assert lens.agreement.tolist() == agreement.tolist()
    assert int(curve.exits.sum()) == len(ROWS)
    assert bool(curve.accuracy.isnan().all())
    assert not bool(curve.agreement.isnan().any())


def test_a_result_without_targets_shows_what_it_has(tmp_path):
    model = tiny_llama()
    with lsim.attach(model, lsim.LogitLens(), positions="last", intervals=True) as probe, torch.no_grad():
        for row in random_tokens(20, 8):
            model(row[None])
    report = probe.results()
    lens = report["logit_lens"]

    assert list(lens.headline()) == ["agreement of block 1 with the last"]
    assert bool(lens.interval("cross_entropy").low.isnan().all())

    entropy = lens.interval("entropy")
    assert bool((entropy.low < lens.entropy).all() and (lens.entropy < entropy.high).all())
    assert "NaN" not in str(lens.plot().to_json())

    page = report.to_html(tmp_path / "page.html").read_text()
    assert "KL divergence" in page
    assert "Perplexity" not in page
    with pytest.raises(lsim.LayersimError, match=r"effective_depth\(0\.25\).*\b20\b"):
        lens.effective_depth(0.25)


def test_positions_with_and_without_a_target_are_means_of_their_own():
    """The last two positions of a row: the first has a target, and the second has none."""
    model = tiny_llama()
    rows = random_tokens(20, 8)
    with lsim.attach(model, lsim.LogitLens(), positions=slice(-2, None), intervals=True) as probe, torch.no_grad():
        for row in rows:
            model(row[None])
    all_positions = probe.results()["logit_lens"]

    with_target = lsim.analyze(model, lsim.Data(rows, positions=slice(-2, -1)), lsim.LogitLens(), intervals=True)["logit_lens"]

    assert (all_positions.positions, all_positions.targets, with_target.targets) == (40, 20, 20)
    torch.testing.assert_close(all_positions.cross_entropy, with_target.cross_entropy, rtol=1e-5, atol=0)
    torch.testing.assert_close(all_positions.interval("accuracy").high, with_target.interval("accuracy").high)
    torch.testing.assert_close(
        all_positions.interval("cross_entropy").error, with_target.interval("cross_entropy").error, rtol=1e-3, atol=0
    )
    assert not torch.allclose(all_positions.entropy, with_target.entropy, rtol=1e-4)


def test_steps_of_generation_at_the_last_position_have_no_target():
    model = tiny_llama()
    prompt = ROWS[0][None]
    with lsim.attach(model, lsim.LogitLens(), positions="last") as probe, torch.no_grad():
        model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    lens = probe.results()["logit_lens"]

    assert (lens.positions, lens.targets) == (4, 0)
    assert bool(lens.cross_entropy.isnan().all())
    assert not bool(lens.entropy.isnan().any())
    assert float(lens.agreement[-1]) == 1


@each_rule
def test_two_models_are_compared_at_the_same_positions(rule):
    positions, choose = RULES[rule]
    a, x = by_hand("llama", choose)
    b = tiny_gpt2().double()
    parts = [states(b, b.transformer.h, row)[:, list(choose(row.tolist()))] for row in ROWS]
    expected = oracles.oracle_cka([x], [np.concatenate(parts, axis=1)], exact=True, row=[rows_by_hand(choose)])["values"]

    result = lsim.compare(a, b, lsim.Data(padded(), positions=positions, batch_size=2), lsim.CKA(estimator="exact"))

    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    assert result.provenance.tokens == x.shape[1]


@pytest.mark.filterwarnings("ignore:The vocabularies have")
def test_models_whose_heads_differ_are_compared_by_a_given_rule():
    cka = lsim.CKA(estimator="exact")
    classifier = causal_classifier()
    with pytest.raises(lsim.LayersimError, match=r"^`positions` "):
        lsim.compare(tiny_llama(), classifier, padded(), cka)
    assert lsim.compare(tiny_llama(), classifier, lsim.Data(padded(), positions="all"), cka).samples == sum(LENGTHS)

    alike = lsim.compare(classifier, classifier, padded(), cka)
    assert (alike.samples, alike.provenance.options["positions"]) == (len(ROWS), "last")
    assert lsim.compare(tiny_llama(), classifier, padded(), lsim.CKA(level="sequence", estimator="exact")).samples == len(ROWS)


def test_another_rule_does_not_resume_a_checkpoint(tmp_path):
    path = tmp_path / "x.ckpt"

    def run(rule):
        return lsim.analyze(tiny_llama(), lsim.Data(padded(), positions=rule), lsim.Cosine(center="none"), checkpoint=path)[
            "cosine"
        ]

    first = run(lambda tokens: tokens > 50)
    for rule in ("all", slice(0, 2), lambda tokens: tokens > 51):
        with pytest.raises(lsim.LayersimError, match=r"positions"):
            run(rule)
    assert torch.equal(run(lambda tokens: tokens > 50).values, first.values)


def test_other_marks_of_the_data_do_not_resume_a_checkpoint(tmp_path):
    path = tmp_path / "x.ckpt"
    tokens = random_tokens(4, 12)

    def run(marks):
        data = {"input_ids": tokens, "chosen": marks}
        return lsim.analyze(tiny_llama(), lsim.Data(data, positions="chosen"), lsim.Cosine(center="none"), checkpoint=path)[
            "cosine"
        ]

    marks = torch.zeros_like(tokens)
    marks[:, 3:7] = 1
    first = run(marks)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*checkpoint"):
        run(marks.roll(1, 1))
    assert torch.equal(run(marks).values, first.values)


def test_labels_by_position_are_refused_for_means_of_rows():
    tokens = random_tokens(8, 12)
    collapse = lsim.NeuralCollapse(labels="data", classes=2, level="sequence")
    data = {"input_ids": tokens, "labels": tokens % 2}

    with pytest.raises(lsim.LayersimError, match="differ within a row"):
        lsim.analyze(tiny_llama(), lsim.Data(data, positions="mean"), collapse)
    assert (
        lsim.analyze(tiny_llama(), lsim.Data(data | {"labels": torch.arange(8) % 2}, positions="mean"), collapse)[
            "neural_collapse"
        ].values.numel()
        == 4
    )


def vision():
    from ..training.helpers import vit

    return vit().double()


PIXELS = {"pixel_values": torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize(
    ("rule", "places"), [(None, [0]), ("first", [0]), ("last", [4]), (slice(1, None), [1, 2, 3, 4]), ("all", range(5))], ids=str
)
def test_rows_of_pixels_are_measured_at_their_patches(rule, places):
    model = vision()
    stream = []
    blocks = model.vit.layers
    handles = [blocks[0].register_forward_pre_hook(lambda m, a: stream.append(a[0]))]
    handles += [block.register_forward_hook(lambda m, a, o: stream.append(first_of(o))) for block in blocks]
    with torch.no_grad():
        model(**PIXELS)
    for handle in handles:
        handle.remove()
    x = torch.stack(stream)[:, :, list(places)].flatten(1, 2).double().numpy()

    result = lsim.analyze(model, lsim.Data(PIXELS, positions=rule, batch_size=4), lsim.Cosine(center="none"))["cosine"]

    np.testing.assert_allclose(result.values, oracles.oracle_cosine([x], center="none")["values"], atol=1e-10)
    assert result.provenance.options["positions"] == ("first" if rule is None else "1:" if isinstance(rule, slice) else rule)


def test_a_function_of_token_ids_has_nothing_to_say_on_pixels():
    with pytest.raises(lsim.LayersimError, match="`positions` is a function"):
        lsim.analyze(vision(), lsim.Data(PIXELS, positions=lambda tokens: tokens == 0), lsim.Cosine(center="none"))


# Functions that read positions of their own, and the options of `Data` that would choose others.
OWN_POSITIONS = {
    "prediction_grid": (lambda **o: lsim.prompts.prediction_grid(tiny_llama(), lsim.Data(ROWS[0], **o)), ["positions"]),
    "trajectory_pca": (lambda **o: lsim.prompts.trajectory_pca(tiny_llama(), lsim.Data(ROWS[0], **o)), ["positions"]),
    "block_jacobians": (
        lambda **o: lsim.prompts.block_jacobians(tiny_llama(), lsim.Data(ROWS[0], **o)),
        ["positions", "skip_first"],
    ),
    "coupling_matrices": (
        lambda **o: lsim.prompts.coupling_matrices(tiny_llama(), lsim.Data(ROWS[0], **o)),
        ["positions", "skip_first"],
    ),
    "tower_similarity": (lambda **o: tower_similarity(clip_of(), lsim.Data(pairs(), **o)), ["positions", "skip_first"]),
    "detection_by_layer": (
        lambda **o: detection_by_layer(tiny_detr(), lsim.Data(scenes(), **o)),
        ["positions", "skip_first"],
    ),
}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, (_, options) in OWN_POSITIONS.items() for option in options]
)
def test_functions_that_read_positions_of_their_own_refuse_others(name, option):
    value = {"positions": "last", "skip_first": 1}[option]
    with pytest.raises(lsim.LayersimError, match=f"`{option}`.* {value!r}"):
        OWN_POSITIONS[name][0](**{option: value})
