"""`attach` on nnsight models: `probe.read()` inside the user's own traces."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import tl_layersim as lsim

from ..models.input_models import VectorModel, image_vit, pixels
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer

TOKENS = random_tokens(24, 20)
ANALYZERS = [lsim.Cosine(center="none"), lsim.CKA(minibatch=32), lsim.LogitLens(), lsim.Saturation(), lsim.Trajectory()]
QUICK = [lsim.Cosine(center="none"), lsim.Saturation()]
REMOTE = pytest.mark.parametrize("remote", [False, "local"])


def traced(module, **options):
    from nnsight import TransformersModel

    return TransformersModel(module, task="text-generation", tokenizer=tiny_tokenizer(), **options)


def differences(report, expected):
    """The fields of two reports that are not equal to the last bit."""
    assert report.keys() == expected.keys()
    differing = []
    for name in report:
        for field in fields(report[name]):
            a = getattr(report[name], field.name)
            b = getattr(expected[name], field.name)
            if isinstance(a, torch.Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                differing.append((name, field.name))
    return differing


def run_trace(model, probe, tokens, remote=False, scale=None):
    with model.trace(remote=remote) as tracer:
        with tracer.invoke(tokens):
            if scale is not None:
                model.model.layers[1].mlp.output[:] = model.model.layers[1].mlp.output * scale
        with tracer.invoke():
            probe.read()


def hooked(module, tokens, analyzers, scale=0.0, **options):
    """The report of a Hugging Face model whose second MLP is scaled by a hook."""
    handle = module.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * scale)
    report = lsim.analyze(module, tokens, analyzers, **options)
    handle.remove()
    return report


@pytest.mark.light("False")
@REMOTE
def test_a_trace_without_intervention_equals_analyze_to_the_last_bit(remote):
    model = traced(tiny_llama())
    probe = lsim.attach(model, ANALYZERS)
    run_trace(model, probe, TOKENS, remote)
    report = probe.results()

    assert differences(report, lsim.analyze(model, TOKENS, ANALYZERS)) == []

    provenance = report["cosine"].provenance
    assert (provenance.tokens, provenance.sequences) == (480, 24)
    assert provenance.options["in_traces"] is True


@pytest.mark.light("0.0-False")
@REMOTE
@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_trace_with_an_intervention_equals_a_hooked_model(remote, scale):
    module = tiny_llama()
    model = traced(module)

    probe = lsim.attach(model, ANALYZERS)
    run_trace(model, probe, TOKENS, remote, scale)

    assert differences(probe.results(), hooked(module, TOKENS, ANALYZERS, scale)) == []

    plain = lsim.analyze(module, TOKENS, QUICK)["cosine"].values
    assert float((probe.results()["cosine"].values - plain).abs().max()) > 0.01


@pytest.mark.light("sublayers-False")
@REMOTE
@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({"at": ["attn_out", "mlp_out"]}, {}),
        ({"at": "z", "per_head": True}, {}),
        ({"positions": slice(2, -1)}, {"positions": slice(2, -1)}),
        ({"positions": "last"}, {"positions": "last"}),
        ({"positions": "mean"}, {"positions": "mean"}),
        ({"positions": lambda row: row % 2 == 0}, {"positions": lambda row: row % 2 == 0}),
    ],
    ids=["sublayers", "heads", "slice", "last", "mean", "function"],
)
def test_sites_and_positions_equal_analyze(options, data, remote):
    module = tiny_llama()
    model = traced(module)
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16)]

    probe = lsim.attach(model, analyzers, **options)
    run_trace(model, probe, TOKENS, remote, 0.5)
    sites = {name: value for name, value in options.items() if name != "positions"}
    expected = hooked(module, lsim.Data(TOKENS, **data), analyzers, 0.5, **sites)

    assert differences(probe.results(), expected) == []
    assert probe.results()["cosine"].layers == expected["cosine"].layers


def test_invokes_and_traces_add_up():
    module = tiny_llama()
    model = traced(module)

    probe = lsim.attach(model, ANALYZERS)
    for part in TOKENS[:16].split(8):
        with model.trace() as tracer:
            with tracer.invoke(part[:3]):
                model.model.layers[1].mlp.output[:] = 0
            with tracer.invoke(part[3:]):
                model.model.layers[1].mlp.output[:] = 0
            with tracer.invoke():
                probe.read()
    report = probe.results()
    cosine = hooked(module, TOKENS[:16], QUICK)["cosine"]

    torch.testing.assert_close(report["cosine"].values, cosine.values, rtol=0, atol=1e-6)
    assert (report["cosine"].provenance.tokens, report["cosine"].provenance.sequences) == (320, 16)

    probe.reset()
    with pytest.raises(lsim.LayersimError, match=r"probe\.read"):
        probe.results()


def test_an_intervention_in_one_invoke_leaves_the_rows_of_others():
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK)
    plain = lsim.attach(model, QUICK)
    with model.trace() as tracer:
        with tracer.invoke(TOKENS[:8]):
            model.model.layers[1].mlp.output[:] = 0
        with tracer.invoke(TOKENS[8:16]):
            pass
        with tracer.invoke():
            probe.read()
        with tracer.invoke():
            # The output of the head is still there for others.
            logits = model.lm_head.output.save()
    edited = hooked(model._module, TOKENS[:8], QUICK)["saturation"].counts
    run_trace(model, plain, TOKENS[8:16])

    torch.testing.assert_close(probe.results()["saturation"].counts, edited + plain.results()["saturation"].counts)
    assert logits.shape == (16, 20, 100)


@REMOTE
def test_padding_of_nnsight_is_not_measured(remote):
    texts = [" ".join(f"w{i}" for i in row[: 5 + number]) for number, row in enumerate(TOKENS[:8].tolist())]
    model = traced(tiny_llama())

    probe = lsim.attach(model, [lsim.Cosine(center="none"), lsim.LogitLens()])
    run_trace(model, probe, texts, remote)
    report = probe.results()
    expected = lsim.analyze(model, lsim.Data(texts, prepend_bos=False), [lsim.Cosine(center="none"), lsim.LogitLens()])

    assert report["cosine"].provenance.tokens == expected["cosine"].provenance.tokens == sum(range(5, 13))
    for name, field in (("cosine", "values"), ("logit_lens", "cross_entropy")):
        torch.testing.assert_close(getattr(report[name], field), getattr(expected[name], field), rtol=0, atol=1e-5)


def test_a_mask_of_the_user():
    mask = (torch.arange(20) < torch.arange(12, 20)[:, None]).long()
    data = {"input_ids": TOKENS[:8], "attention_mask": mask}
    model = traced(tiny_llama())

    probe = lsim.attach(model, QUICK)
    run_trace(model, probe, data)
    results = probe.results()
    expected = lsim.analyze(model, data, QUICK)

    # `analyze` cuts rows to the longest, and products of other shapes round otherwise.
    torch.testing.assert_close(results["cosine"].values, expected["cosine"].values, rtol=0, atol=1e-6)
    assert torch.equal(results["saturation"].counts, expected["saturation"].counts)
    assert results["cosine"].provenance.tokens == int(mask.sum())


def test_attended_padding_is_named():
    module = tiny_llama()
    module.config.pad_token_id = 0
    model = traced(module)
    tokens = TOKENS[:4].clone()
    tokens[1, -3:] = 0

    probe = lsim.attach(model, QUICK)
    with pytest.warns(lsim.LayersimWarning, match=r"1 rows.*attention_mask"):
        run_trace(model, probe, tokens)

    assert probe.results()["cosine"].provenance.options["rows_with_attended_padding"] == 1


@REMOTE
def test_each_new_token_of_a_generation(remote):
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK)
    with model.generate(max_new_tokens=4, do_sample=False, remote=remote) as tracer:
        with tracer.invoke(TOKENS[:4, :10]):
            pass
        with tracer.invoke():
            for _ in tracer.iter[:4]:
                probe.read()
    result = probe.results()["saturation"]
    with lsim.attach(model._module, QUICK) as loop, torch.no_grad():
        model._module.generate(TOKENS[:4, :10], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(4, 10))
    expected = loop.results()["saturation"]

    assert result.provenance.tokens == expected.provenance.tokens == 4 * 10 + 3 * 4
    assert result.provenance.sequences == 4
    assert torch.equal(result.counts, expected.counts)


def test_steps_of_a_generation_are_no_whole_rows():
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK, positions=slice(2, None))

    def generate():
        with model.generate(max_new_tokens=3) as tracer:
            with tracer.invoke(TOKENS[:4, :10]):
                pass
            with tracer.invoke():
                for _ in tracer.iter[:3]:
                    probe.read()

    with pytest.raises(lsim.LayersimError, match=r"`positions` is 2:"):
        generate()


def test_intervals_are_those_of_traces():
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK, intervals=True)
    for part in TOKENS.split(2):
        run_trace(model, probe, part, scale=0.0)
    interval = probe.results()["cosine"].interval("values")

    assert bool((interval.low <= interval.high).all())
    assert probe.results()["cosine"].provenance.tokens == 480


def test_a_wrapped_module():
    from nnsight import NNsight

    module = tiny_gpt2()
    model = NNsight(module)

    probe = lsim.attach(model, ANALYZERS)
    with model.trace() as tracer:
        with tracer.invoke(TOKENS):
            pass
        with tracer.invoke():
            probe.read()

    assert differences(probe.results(), lsim.analyze(model, TOKENS, ANALYZERS)) == []


def test_sites_are_chosen_by_either_name_of_a_renamed_module():
    from nnsight import NNsight

    # Given a model whose modules have further names, at the root and inside each block.
    model = NNsight(tiny_gpt2(), rename={"transformer.h": "layers", "attn": "self_attn"})
    paths = tuple(f"transformer.h.{block}.attn" for block in range(3))
    names = [f"layers.{block}.self_attn" for block in range(3)]
    analyzer = lsim.Cosine(center="none")
    expected = lsim.analyze(model, TOKENS[:4], analyzer, at=list(paths))
    for at in (names, "layers.*.self_attn", [names[0], *paths[1:]]):
        # When the sites are named by either name.
        report = lsim.analyze(model, TOKENS[:4], analyzer, at=at)
        # Then they are the same sites.
        assert report["cosine"].layers == paths
        assert differences(report, expected) == []
    probe = lsim.attach(model, analyzer, at=names)
    with model.trace() as tracer:
        with tracer.invoke(TOKENS[:4]):
            pass
        with tracer.invoke():
            probe.read()
    assert differences(probe.results(), expected) == []
    # And names of sites and families keep their meaning.
    assert lsim.analyze(model, TOKENS[:4], analyzer, at="attn_out")["cosine"].layers[0] == "blocks.0.hook_attn_out"
    with pytest.raises(lsim.LayersimError, match=r"layers\.7\.self_attn"):
        lsim.attach(model, analyzer, at="layers.7.self_attn")


def report_of_trace(module, inputs, analyzers, **options):
    """The report of one trace whose inputs are no token ids."""
    from nnsight import NNsight

    model = NNsight(module)
    probe = lsim.attach(model, analyzers, **options)
    with model.trace(**inputs):
        probe.read()
    return probe.results()


def report_of_loop(module, inputs, analyzers, **options):
    """The report of one forward pass of the torch module itself."""
    with torch.no_grad(), lsim.attach(module, analyzers, **options) as probe:
        module(**inputs)
    return probe.results()


def test_embeddings_in_place_of_token_ids():
    # Given embeddings, alone or with a mask.
    module = tiny_llama()
    embeddings = module.get_input_embeddings()(TOKENS[:4, :9]).detach()
    mask = torch.ones(4, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    analyzers = [*QUICK, lsim.CKA(minibatch=8), lsim.LogitLens()]
    for inputs, tokens in (({"inputs_embeds": embeddings}, 36), ({"inputs_embeds": embeddings, "attention_mask": mask}, 33)):
        # When a trace and a loop run the same forward pass.
        report = report_of_trace(tiny_llama(), inputs, analyzers)
        expected = report_of_loop(module, inputs, analyzers)
        # Then they measure the same, and no position has a next token.
        assert differences(report, expected) == []
        assert report["cosine"].provenance.tokens == tokens
        assert bool(report["logit_lens"].cross_entropy.isnan().all())
        assert not bool(report["logit_lens"].agreement.isnan().any())
    with pytest.raises(lsim.LayersimError, match=r"`positions`"):
        report_of_trace(tiny_llama(), {"inputs_embeds": embeddings}, QUICK, positions=lambda row: row > 3)


@pytest.mark.parametrize("positions", ["all", "mean"])
def test_images_in_place_of_token_ids(positions):
    analyzer = lsim.Cosine(center="none")
    images = {"pixel_values": pixels(4)}
    report = report_of_trace(image_vit(), images, analyzer, positions=positions)
    assert differences(report, report_of_loop(image_vit(), images, analyzer, positions=positions)) == []


def test_inputs_that_no_row_of_the_probe_can_stand_for_are_refused():
    from nnsight import NNsight

    opened = lsim.open_model(NNsight(VectorModel()), layers=["steps.0", "steps.1", "steps.2"])
    with pytest.raises(lsim.LayersimError, match=r"VectorModel.*token ids.*lsim\.analyze"):
        lsim.attach(opened, lsim.Cosine(center="none"))


def test_values_that_are_not_finite_are_named_with_their_site():
    model = traced(tiny_llama())
    with pytest.raises(lsim.LayersimError, match=r"blocks\.1\.hook_resid_post"):
        run_trace(model, lsim.attach(model, QUICK), TOKENS[:4], scale=float("nan"))


@pytest.mark.parametrize(
    ("analyzer", "word"),
    [(lsim.Cosine(), 'Cosine.*center="none"'), (lsim.BlockCoupling(), "BlockCoupling.*replays")],
    ids=["centred", "coupling"],
)
def test_analyzers_that_need_more_are_refused(analyzer, word):
    with pytest.raises(lsim.LayersimError, match=word):
        lsim.attach(traced(tiny_llama()), analyzer)


@pytest.mark.light("False")
@REMOTE
def test_a_read_behind_a_later_module_names_the_sites_of_the_probe(remote):
    from nnsight.intervention.interleaver import OutOfOrderError

    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK)

    def read_behind_the_last_block():
        with model.trace(TOKENS[:2], remote=remote):
            model.model.layers[1].output.save()
            probe.read()

    sites = r"blocks\.0\.hook_resid_pre.*blocks\.\d\.hook_resid_post"
    with pytest.raises(OutOfOrderError, match=rf"probe\.read\(\).*{sites}.*model\.input.*tracer\.invoke\(\)"):
        read_behind_the_last_block()


def test_a_loop_over_more_steps_than_a_generation_has_keeps_the_steps_that_ran():
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK)

    def read_five_steps():
        with model.generate(max_new_tokens=2, do_sample=False, eos_token_id=None) as tracer:
            with tracer.invoke(TOKENS[:4, :10]):
                pass
            with tracer.invoke():
                for _ in tracer.iter[:5]:
                    probe.read()

    with pytest.warns(UserWarning, match="never reached"):
        read_five_steps()
    assert probe.results()["cosine"].provenance.tokens == 4 * 10 + 4


def test_each_kind_of_probe_refuses_the_use_of_the_other():
    model = traced(tiny_llama())
    probe = lsim.attach(model, QUICK)

    with pytest.raises(lsim.LayersimError, match=r"probe\.read\(\)"), probe:
        pass
    with pytest.raises(lsim.LayersimError, match=r"probe\.mask"):
        probe.mask = torch.ones(2, 2)
    with pytest.raises(lsim.LayersimError, match=r"probe\.read\(\)"):
        lsim.attach(model._module, QUICK).read()
    with pytest.raises(lsim.LayersimError, match=r"`every` is 2.*probe\.read\(\)"):
        lsim.attach(model, QUICK, every=2)


def test_the_gradients_of_a_trace_are_those_without_a_probe():
    def gradient(with_reading):
        model = traced(tiny_llama())
        probe = lsim.attach(model, QUICK)
        with model.trace() as tracer:
            with tracer.invoke(TOKENS[:2, :10]):
                hidden = model.model.layers[0].output.save()
                loss = model.output.logits.float().square().mean().save()
            with tracer.invoke():
                if with_reading:
                    probe.read()
        assert torch.is_grad_enabled()
        return torch.autograd.grad(loss, hidden)[0]

    assert torch.equal(gradient(True), gradient(False))
