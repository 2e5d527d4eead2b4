"""Layers that are read by heads of their own: the oracle, ties, padding, half precision, and heads of other models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.lens import ExitHeads

from .. import oracles
from ..inputs.views import from_views, own_head, residuals, view, view_for, worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama

ANALYZERS = {"logit_lens": lsim.LogitLens, "saturation": lsim.Saturation, "exit_curve": lsim.ExitCurve}
each_lens = pytest.mark.parametrize("name", ANALYZERS)
either_norm = pytest.mark.parametrize("norm", ["final", "none"])


def random_heads(count: int = 2, words: int = oracles.WORDS, width: int = 8, seed: int = 0, dtype=torch.float64, **options):
    """Heads that differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, words, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(count, words, generator=generator, dtype=torch.float64)
    return ExitHeads(weight.to(dtype), bias.to(dtype), **options)


def pairs(heads: ExitHeads) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(weight.double().numpy(), bias.double().numpy()) for weight, bias in zip(heads.weight, heads.bias, strict=True)]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_lens
@either_norm
def test_every_layer_is_read_by_its_own_head(name, norm):
    data = [residuals(seed, tokens=tokens) for seed, tokens in enumerate((12, 1, 30))]
    # Copies of the model's head agree with it at some tokens and not at others.
    near = torch.as_tensor(oracles.HEAD) + 0.3 * random_heads().weight
    for heads in (random_heads(norm=norm), ExitHeads(near, 0.1 * random_heads().bias, norm=norm)):
        expected = getattr(oracles, f"oracle_{name}")(data, norm=norm == "final", heads=pairs(heads))
        analyzer = ANALYZERS[name](norm=norm, heads=heads)
        result = from_views(analyzer, [view_for(analyzer, x) for x in data])
        for field, value in expected.items():
            np.testing.assert_allclose(getattr(result, field).numpy(), value, rtol=1e-9, atol=1e-9, err_msg=field)


@pytest.mark.parametrize("memory", [0.01, 0.05, 128])
def test_memory_for_logits_changes_no_number(memory):
    heads = random_heads()
    sample_view = view(residuals(tokens=40))
    for cls in (lsim.LogitLens, lsim.Saturation):
        result = from_views(cls(heads=heads, lens_memory_mb=memory), [replace(sample_view, memo={})])
        assert worst(result, from_views(cls(heads=heads), [replace(sample_view, memo={})])) < 1e-9


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_lenses_of_one_run_do_not_take_the_logits_of_other_heads():
    """In one run logits are shared, by analyzers with the same heads alone."""
    data = residuals(tokens=25)
    first = random_heads(seed=1)
    second = random_heads(seed=2)
    sample_view = view(data)
    from tl_layersim.activations.view import reduce

    for heads in (first, None, second, first):
        analyzer = lsim.Saturation(heads=heads)
        kernels = {"lens": lsim.LogitLens(heads=heads).kernel({}), "saturation": analyzer.kernel({})}
        counts = reduce(kernels, sample_view)[1]["saturation"]["counts"]
        head_pairs = None if heads is None else pairs(heads)
        assert counts.tolist() == oracles.oracle_saturation([data], heads=head_pairs)["values"].tolist()


def test_ties_go_to_the_lowest_id():
    """All logits of a layer's head are equal: every layer below the last says id 0."""
    data = residuals(tokens=9)
    heads = ExitHeads(torch.zeros(2, oracles.WORDS, 8, dtype=torch.float64))

    lens = from_views(lsim.LogitLens(heads=heads), [view(data)])
    zero = [target == 0 for target in oracles.next_of([data]) if target is not None]

    assert lens.accuracy[:-1].tolist() == [sum(zero) / len(zero)] * 2
    np.testing.assert_allclose(lens.entropy[:-1].numpy(), np.log(oracles.WORDS), rtol=1e-12)


@each_lens
def test_padding_does_not_matter(name):
    heads = random_heads(2, 100, 32, dtype=torch.float32)
    rows = [random_tokens(1, length, seed=length)[0] for length in (9, 4, 6)]
    tokens = torch.full((3, 12), 5)
    mask = torch.zeros(3, 12, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, 12 - len(row) :] = row
        mask[i, 12 - len(row) :] = 1
    analyzer = ANALYZERS[name](heads=heads)

    plain = lsim.analyze(tiny_llama(), rows, analyzer)[name]

    assert worst(plain, lsim.analyze(tiny_llama(), {"input_ids": tokens, "attention_mask": mask}, analyzer)[name]) == 0


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_heads_in_half_precision_and_of_another_dtype_than_the_model():
    tokens = random_tokens(4, 12)
    wide = random_heads(2, 100, 32, dtype=torch.float32)

    expected = lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=wide))["logit_lens"]

    for model, heads in (
        (tiny_llama(), wide.to(torch.bfloat16)),
        (tiny_llama(dtype=torch.bfloat16), wide),
        (tiny_llama(dtype=torch.bfloat16), wide.to(torch.bfloat16)),
    ):
        report = lsim.analyze(model, tokens, [lsim.LogitLens(heads=heads), lsim.Saturation(heads=heads)])
        np.testing.assert_allclose(report["logit_lens"].values, expected.values, rtol=0.05)
        alone = lsim.analyze(model, tokens, lsim.Saturation(heads=heads))["saturation"]
        assert torch.equal(alone.counts, report["saturation"].counts)


def test_scale_and_soft_cap_apply_to_own_heads():
    data = residuals(tokens=9)
    heads = random_heads()
    head = own_head()
    capped = Unembed(head.norm, head.parts, "every", 0.5, 3.0, torch.float64, None, head.linear)

    result = from_views(lsim.LogitLens(heads=heads), [view(data, unembed=capped)])
    x = oracles.common.layer_norm(np.asarray(data))
    targets = oracles.next_of([data])

    for layer, (weight, bias) in enumerate(pairs(heads)):
        logits = 3 * np.tanh(0.5 * (x[layer + 1] @ weight.T + bias) / 3)
        losses = [-np.log(oracles.softmax(z)[y]) for z, y in zip(logits, targets, strict=True) if y is not None]
        assert float(result.values[layer]) == pytest.approx(np.mean(losses), rel=1e-9)


def test_the_result_says_which_heads_read_it():
    heads = random_heads(2, 100, 32, dtype=torch.float32, norm="none")
    result = lsim.analyze(tiny_llama(), random_tokens(2, 8), lsim.LogitLens(norm="none", heads=heads))["logit_lens"]

    assert result.unembedding == "heads[layer](x)"
    assert result.provenance.options["heads"] == str(heads)
    assert heads.digest[:12] in str(heads)


@each_lens
def test_heads_of_another_model_are_refused(name):
    cls = ANALYZERS[name]
    tokens = random_tokens(2, 8)
    for heads, says in (
        (random_heads(3, 100, 32), r"`heads`.* 3 .* 2\b"),
        (random_heads(2, 100, 16), r"`heads`.*\(2, 100, 16\)"),
        (random_heads(2, 99, 32), r"`heads`.*\(2, 99, 32\)"),
        (random_heads(2, 100, 32, layers=["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"]), "one of them for blocks.1"),
        (random_heads(2, 100, 32, weights_hash="0123456789ab"), "`heads`.*0123456789ab"),
    ):
        with pytest.raises(lsim.LayersimError, match=says):
            lsim.analyze(tiny_llama(), tokens, cls(heads=heads))


def test_the_norm_must_be_that_of_the_training():
    with pytest.raises(lsim.LayersimError, match=r"`norm`.*'final'.*`heads`.*'none'"):
        lsim.LogitLens(heads=random_heads(norm="none"))
    with pytest.raises(lsim.LayersimError, match="`norm` is 'none'"):
        lsim.Saturation(norm="none", heads=random_heads())


def test_layers_inside_blocks_have_no_heads():
    with pytest.raises(lsim.LayersimError, match=r"`heads`.* 2 .* 5\b"):
        lsim.analyze(
            tiny_gpt2(), random_tokens(2, 8), lsim.LogitLens(heads=random_heads(2, 100, 32)), at=["resid_mid", "resid_post"]
        )


def test_a_file_stands_for_the_heads(tmp_path):
    heads = random_heads(2, 100, 32, dtype=torch.float32)
    path = heads.save(tmp_path / "heads.safetensors")
    tokens = random_tokens(2, 8)

    by_file = lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=str(path)))["logit_lens"]

    assert worst(by_file, lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=heads))["logit_lens"]) == 0
    assert by_file.provenance.options["heads"] == str(heads)
    with pytest.raises(FileNotFoundError, match=r"nothing.safetensors"):
        lsim.ExitCurve(heads=tmp_path / "nothing.safetensors")


def test_a_checkpoint_of_other_heads_is_refused(tmp_path):
    tokens = random_tokens(4, 8)
    path = tmp_path / "run.safetensors"
    heads = random_heads(2, 100, 32, dtype=torch.float32)

    first = lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=heads), checkpoint=path)["logit_lens"]
    result = lsim.analyze(tiny_llama(), tokens, lsim.LogitLens(heads=heads), checkpoint=path)["logit_lens"]

    assert worst(first, result) == 0
    with pytest.raises(lsim.LayersimError, match="checkpoint"):
        lsim.analyze(
            tiny_llama(), tokens, lsim.LogitLens(heads=random_heads(2, 100, 32, seed=1, dtype=torch.float32)), checkpoint=path
        )


def test_attach_reads_each_layer_by_its_own_head():
    model = tiny_llama()
    tokens = random_tokens(3, 9)
    heads = random_heads(2, 100, 32, dtype=torch.float32)

    with lsim.attach(model, lsim.LogitLens(heads=heads)) as probe:
        model(tokens)
    expected = lsim.analyze(model, lsim.Data(tokens, prepend_bos=False), lsim.LogitLens(heads=heads))["logit_lens"]

    assert worst(probe.results()["logit_lens"], expected) < 1e-9


def test_models_of_nnsight_read_the_same():
    from ..training.helpers import traced

    tokens = random_tokens(3, 9)
    heads = random_heads(2, 100, 32, dtype=torch.float32)
    analyzers = [lsim.LogitLens(heads=heads), lsim.Saturation(heads=heads)]

    plain, traced_report = (
        lsim.analyze(model, lsim.Data(tokens, prepend_bos=False), analyzers) for model in (tiny_llama(), traced())
    )

    assert max(worst(plain[name], traced_report[name]) for name in plain) < 1e-6
