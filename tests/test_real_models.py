"""On real pretrained models, where they are at hand: oracles, sources, and what the papers expect."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from . import oracles
from .conftest import hidden_states, optional_real, worst
from .test_sources import bridge, nnsight


def load(name: str):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def wikitext() -> list[str]:
    text = optional_real("sets", "wikitext-2/test.txt").read_text()
    return [line for line in text.splitlines() if len(line) > 200][:60]


@pytest.fixture(scope="module")
def stories15m():
    return load("stories15M")


def test_cosine_and_cka_equal_their_oracles_on_a_real_model(stories15m, wikitext):
    batch = stories15m.tokenizer(wikitext[:2], return_tensors="pt", truncation=True, max_length=48)["input_ids"]
    states = np.concatenate([hidden_states(stories15m, row) for row in batch], axis=1)
    cosine = oracles.oracle_cosine([states])
    # One minibatch of all tokens, shuffled or not.
    cka = oracles.oracle_cka([states - states.mean(1, keepdims=True)])
    found = lsim.analyze(stories15m, batch, [lsim.Cosine(), lsim.CKA()])
    np.testing.assert_allclose(found["cosine"].values, cosine["values"], atol=2e-6)
    np.testing.assert_allclose(found["cosine"].norm_ratio, cosine["norm_ratio"], rtol=1e-4)
    np.testing.assert_allclose(found["cosine"].monotone_share, cosine["monotone_share"], atol=1e-9)
    np.testing.assert_allclose(found["cka"].values, cka["values"], atol=2e-5)


def test_sources_agree_on_a_real_model(stories15m, wikitext):
    plain = lsim.analyze(stories15m, wikitext[:8], [lsim.Cosine(), lsim.CKA(minibatch=64)])
    tokenizer = stories15m.tokenizer
    others = [nnsight(load("stories15M")), bridge(load("stories15M"))]
    for model in others:
        found = lsim.analyze(model, wikitext[:8], [lsim.Cosine(), lsim.CKA(minibatch=64)], tokenizer=tokenizer)
        for name in plain:
            np.testing.assert_allclose(found[name].values, plain[name].values, atol=2e-5)


def test_similarity_to_the_last_layer_rises_with_depth(stories15m, wikitext):
    found = lsim.analyze(stories15m, wikitext, [lsim.Cosine(), lsim.CKA()], pack=True, max_tokens=4096)
    to_last = found["cosine"].values[:, -1]
    assert (to_last.diff() > 0).all()
    assert found["cosine"].monotone_share > 0.5
    assert (found["cka"].values[:, -1].diff() > 0).float().mean() > 0.6


def test_the_first_token_is_an_outlier(stories15m, wikitext):
    every = lsim.analyze(stories15m, wikitext, "cka", max_tokens=4096)["cka"]
    without = lsim.analyze(stories15m, wikitext, "cka", max_tokens=4096, skip_first=1)["cka"]
    assert (every.values - without.values).abs().max() > 0.05


def test_shuffled_minibatches_are_near_the_exact_value(stories15m, wikitext):
    options = {"pack": True, "max_tokens": 8192, "skip_first": 1}
    exact = lsim.analyze(stories15m, wikitext, lsim.CKA(estimator="exact"), **options)["cka"]
    shuffled = lsim.analyze(stories15m, wikitext, lsim.CKA(), **options)["cka"]
    assert (exact.values - shuffled.values).abs().max() < 0.05
    biased = lsim.analyze(stories15m, wikitext, lsim.CKA(estimator="biased"), **options)["cka"]
    assert (biased.values - exact.values).mean() > (shuffled.values - exact.values).abs().mean()


def test_two_runs_of_one_recipe_compare(wikitext):
    a, b = load("stories260K"), load("stories279K-xs")
    across = lsim.compare(a, b, wikitext, lsim.CKA(), pack=True, max_tokens=8192, skip_first=1)
    same = lsim.compare(a, a, wikitext, lsim.CKA(), pack=True, max_tokens=8192, skip_first=1)
    within = lsim.analyze(a, wikitext, lsim.CKA(), pack=True, max_tokens=8192, skip_first=1)["cka"]
    assert worst(same, within) < 1e-9
    assert same.distance() < 1e-3 < across.distance()
    # Layers of like depth are the most alike.
    assert (across.values.argmax(1).diff() >= 0).all()


def test_a_real_sentence_encoder():
    from transformers import AutoModel, AutoTokenizer

    folder = optional_real("models", "all-minilm-l6-v2")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = lsim.demo_text()[:12]
    whole = lsim.analyze(model, texts, [lsim.Cosine(), lsim.CKA(estimator="exact")])
    alone = lsim.analyze(model, texts, [lsim.Cosine(), lsim.CKA(estimator="exact")], batch_size=1)
    for name in whole:
        # Padding inside a batch of a bidirectional model, told by its mask.
        assert (whole[name].values - alone[name].values).abs().max() < 1e-5
    assert "post-norm" in whole["cka"].provenance.basis


# ---- what layers would say


def test_the_lens_of_a_real_model_is_its_own_logits(stories15m, wikitext):
    """Every block's loss by hand, float32, with and without the norm; the norm changes everything."""
    from .test_lens import by_hand

    batch = stories15m.tokenizer(wikitext[:2], return_tensors="pt", truncation=True, max_length=48)["input_ids"]
    states = np.concatenate([hidden_states(stories15m, row) for row in batch], axis=1)
    target = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in batch])
    losses = {}
    for norm in ("final", "none"):
        logits = torch.as_tensor(by_hand(stories15m, states, norm == "final"))
        expected = [float(torch.nn.functional.cross_entropy(z, target)) for z in logits]
        found = lsim.analyze(stories15m, batch, lsim.LogitLens(norm=norm))["logit_lens"]
        np.testing.assert_allclose(found.cross_entropy, expected, rtol=1e-4)
        said = logits.argmax(-1)
        np.testing.assert_allclose(found.agreement, (said == said[-1]).double().mean(1), atol=1.5 / said.shape[1])
        losses[norm] = found.cross_entropy
    assert losses["final"][-1] == pytest.approx(losses["none"][-1])
    with torch.no_grad():
        own = stories15m(batch, labels=batch).loss
    np.testing.assert_allclose(losses["final"][-1], own, rtol=1e-5)


def test_sources_agree_on_what_the_layers_of_a_real_model_say(stories15m, wikitext):
    every = [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(), lsim.Trajectory(window=3), lsim.NeuralCollapse()]
    plain = lsim.analyze(stories15m, wikitext[:8], every)
    tokens = plain["saturation"].provenance.tokens
    for model, options in (
        (nnsight(load("stories15M")), {}),
        (nnsight(load("stories15M")), {"remote": "local"}),
        (bridge(load("stories15M")), {}),
    ):
        found = lsim.analyze(model, wikitext[:8], every, tokenizer=stories15m.tokenizer, **options)
        for name in ("logit_lens", "trajectory", "neural_collapse"):
            np.testing.assert_allclose(found[name].values, plain[name].values, rtol=1e-4)
        # A near tie may fall to either side.
        assert (found["saturation"].counts - plain["saturation"].counts).abs().sum() < 0.002 * tokens


def test_walking_down_a_real_model_finds_the_same_layers(stories15m, wikitext):
    alone = lsim.analyze(stories15m, wikitext, lsim.Saturation(), pack=True, max_tokens=4096)["saturation"]
    beside = lsim.analyze(stories15m, wikitext, [lsim.LogitLens(), lsim.Saturation()], pack=True, max_tokens=4096)["saturation"]
    assert (alone.counts - beside.counts).abs().sum() <= 2
    assert 0.05 < alone.early_share < 0.9


def test_exits_of_a_real_model(stories15m, wikitext):
    curve = lsim.analyze(stories15m, wikitext, lsim.ExitCurve(), pack=True, max_tokens=4096)["exit_curve"]
    assert (curve.speedup.diff() <= 1e-12).all()
    assert (curve.exits.sum(1) == 4096).all()
    assert curve.at(1.0).agreement == 1
    assert curve.at(curve.threshold_for(agreement=0.9)).agreement >= 0.9


def test_a_real_story_is_told_by_the_layers(stories15m):
    grid = lsim.prediction_grid(stories15m, "Once upon a time, there was a little girl named")
    assert grid.words[-1][-1].strip() == "L" or grid.probability[-1, -1] > 0.3
    assert (grid.saturation_layer <= 5).all()


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_trained_blocks_couple_more_than_random_ones(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(model.config).eval()
    fresh.tokenizer = model.tokenizer
    texts = [
        "Once upon a time there was a little girl",
        "The dog ran to the park and saw a big",
        "Tom was sad because he lost his",
    ]
    trained, random = (lsim.analyze(m, texts, lsim.BlockCoupling(k=10))["block_coupling"] for m in (model, fresh))
    assert trained.mean() > random.mean() + 0.01
    # Without training, blocks know nothing of each other.
    assert abs(random.mean("values") - random.mean("null")) < 0.01


def test_coupling_of_a_real_model_is_that_of_the_formula():
    from transformers import AutoModelForCausalLM

    from . import oracles
    from .test_coupling import calls_of, naive

    model = AutoModelForCausalLM.from_pretrained(optional_real("models", "stories260K"), dtype=torch.float32).eval()
    tokens = torch.tensor([[1, 403, 407, 261, 378, 432, 285]])
    found = lsim.analyze(model, tokens, lsim.BlockCoupling(k=10))["block_coupling"]
    jacobians = [naive(call, 0, 6, 6).numpy() for call in calls_of(model, lambda: model(tokens, use_cache=False))]
    expected = [[oracles.miscoupling(oracles.coupling_matrix(a, b, 10)) for b in jacobians] for a in jacobians]
    torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)


def test_stitching_real_models(wikitext):
    """What a stitch must give where the answer is known, and that half of the float64 work by hand says the same."""
    from .test_stitching import rotated

    front, back = load("stories260K"), load("stories279K-xs")
    options = {"seq_len": 64, "max_tokens": 6000}
    count = len(front.model.layers)
    for layer in range(count + 1):
        assert lsim.stitch(front, front, wikitext[:4], at=(layer, layer), adapter="identity", **options).penalty == 0.0
    turned, basis = rotated(front)
    turned.tokenizer = front.tokenizer
    plain = lsim.stitch(front, turned, wikitext, at=(3, 3), adapter="identity", **options)
    found = lsim.stitch(front, turned, wikitext, at=(3, 3), adapter="linear", fit="lstsq", **options)
    assert plain.penalty > 1
    assert abs(found.penalty) < 1e-3
    np.testing.assert_allclose(found.weight, basis, atol=1e-3)

    # Two models of independent runs: a map brings most of it over, and more of the better model.
    grid = lsim.stitch_grid({"a": front, "b": back}, wikitext, layers=[3], fit="lstsq", **options)
    apart = lsim.stitch_grid({"a": front, "b": back}, wikitext, layers=[3], adapter="identity", **options)
    assert float(grid.penalty[0, 1, 0]) < 0.5 * float(apart.penalty[0, 1, 0])

    one = lsim.stitch(front, back, wikitext, at=(3, 2), adapter="affine", fit="lstsq", **options)
    tokens = front.tokenizer(wikitext[-1], return_tensors="pt")["input_ids"][:, :64]
    tokens = torch.cat([torch.full((1, 1), front.tokenizer.bos_token_id), tokens], 1)[:, :64]
    judged = lsim.stitch(front, back, tokens, at=(3, 2), adapter=one.adapter)
    back = back.double()
    x = one.weight @ torch.as_tensor(hidden_states(front.double(), tokens[0])[3]).T + one.bias[:, None]
    handle = back.model.layers[2].register_forward_pre_hook(lambda _m, args: (x.T[None], *args[1:]))
    with torch.no_grad():
        logits = back(tokens).logits[0, :-1]
    handle.remove()
    by_hand = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    assert judged.loss == pytest.approx(float(by_hand), abs=2e-5)


def test_alignment_of_a_real_model(tmp_path, wikitext):
    """A short one: early layers gain more than by standard training, and the folder that is written says the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models, shares = {}, {}
    for name, how in {"standard": {"objective": "standard"}, "aligned": {"save_to": tmp_path / "aligned"}}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        training = lsim.AlignedTraining(steps=60, lr=1e-3, warmup=6, **how)
        lsim.finetune_aligned(model, wikitext[:45], training, tokenizer=tokenizer, batch_size=4, seq_len=128, pack=True)
        models[name] = model
        found = lsim.analyze(model, wikitext[45:], [lsim.Saturation()], tokenizer=tokenizer, pack=True)["saturation"]
        shares[name] = float(found.early_share)
    assert shares["aligned"] > shares["standard"] + 0.1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "aligned", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "aligned")(wikitext[0], return_tensors="pt").input_ids[:, :60]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, models["aligned"](tokens).logits)


def test_the_aligned_loss_of_a_real_model_is_the_formula():
    from transformers import AutoModelForCausalLM

    folder = optional_real("models", "stories15M")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(3, 32000, (2, 20), generator=torch.Generator().manual_seed(0))
    loss = lsim.aligned_loss(model, tokens)
    loss.backward()
    head = model.lm_head.weight.grad.double().clone()
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    hidden = wide(tokens, output_hidden_states=True).hidden_states
    expected = 0
    for layer in range(1, 7):
        logits = wide.lm_head(hidden[layer] if layer == 6 else wide.model.norm(hidden[layer]))[:, :-1]
        expected = expected + layer / 21 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs = wide.lm_head.weight.grad
    assert float((head - theirs).norm() / theirs.norm()) < 1e-5
