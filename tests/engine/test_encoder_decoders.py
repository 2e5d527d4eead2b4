"""Encoder-decoders: `at=` names sites of one stack, whose tokens, mask and positions count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_tokenizer
from ..oracles.cka import oracle_cka
from ..running.options import called
from ..user_loops.test_attach_stacks import bart, pair, t5

MODELS = {"T5": t5, "BART": bart}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
COSINE = lsim.Cosine(center="none")
TOKEN_CKA = lsim.CKA()
SITES = {
    ("T5", "encoder.resid_post"): [("encoder.block.0", True), *((f"encoder.block.{i}", False) for i in range(3))],
    ("T5", "resid_post"): [("decoder.block.0", True), *((f"decoder.block.{i}", False) for i in range(3))],
    ("T5", "decoder.attn_out"): [(f"decoder.block.{i}.layer.0.SelfAttention", False) for i in range(3)],
    ("T5", "decoder.cross_attn_out"): [(f"decoder.block.{i}.layer.1.EncDecAttention", False) for i in range(3)],
    ("T5", "encoder.z"): [(f"encoder.block.{i}.layer.0.SelfAttention.o", True) for i in range(3)],
    ("BART", "encoder.resid_post"): [
        ("model.encoder.layers.0", True),
        *((f"model.encoder.layers.{i}", False) for i in range(3)),
    ],
    ("BART", "resid_post"): [("model.decoder.layers.0", True), *((f"model.decoder.layers.{i}", False) for i in range(3))],
    ("BART", "decoder.attn_out"): [(f"model.decoder.layers.{i}.self_attn", False) for i in range(3)],
    ("BART", "decoder.cross_attn_out"): [(f"model.decoder.layers.{i}.encoder_attn", False) for i in range(3)],
    ("BART", "encoder.z"): [(f"model.encoder.layers.{i}.self_attn.out_proj", True) for i in range(3)],
}
each_site = pytest.mark.parametrize(("key", "at"), SITES, ids=lambda x: x)


def mask_of(lengths, width):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def rows(width: int = 9, targets: int = 7) -> dict[str, torch.Tensor]:
    """Five rows with padding on the right in both stacks."""
    return {
        "input_ids": random_tokens(5, width),
        "attention_mask": mask_of([9, 4, 6, 2, 7], width),
        "decoder_input_ids": random_tokens(5, targets, seed=1),
        "decoder_attention_mask": mask_of([3, 7, 5, 7, 2], targets),
    }


def side(at):
    return "encoder" if at.startswith("encoder") else "decoder"


def counted(inputs, at, positions="all"):
    mask = inputs["attention_mask" if side(at) == "encoder" else "decoder_attention_mask"].bool()
    if positions == "last":
        mask = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return mask


def by_hand(model, sites, inputs, keep, heads=0):
    """Activations `site token width` in float64, by hooks placed by hand; each site's heads apart where there are any."""
    captured = {}
    handles = []
    first = lambda x: x if isinstance(x, torch.Tensor) else x[0]  # noqa: E731
    for number, (path, incoming) in enumerate(sites):
        module = model.get_submodule(path)
        if incoming:
            hook = lambda _m, a, k, number=number: captured.update({number: first((*a, *k.values()))})  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(lambda _m, _a, o, number=number: captured.update({number: first(o)})))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    activations = [captured[number][keep].double() for number in range(len(sites))]
    if not heads:
        return activations
    parts = []
    for activation in activations:
        parts += activation.chunk(heads, -1)
    return parts


def cosine(values):
    unit = [torch.nn.functional.normalize(x, dim=-1) for x in values]
    rows_of_cosines = []
    for a in unit:
        rows_of_cosines.append(torch.stack([(a * b).sum(-1).mean() for b in unit]))
    return torch.stack(rows_of_cosines)


def cka(keep, values, values_of_other_model=None):
    batches = [None if v is None else [np.stack([x.numpy() for x in v])] for v in (values, values_of_other_model)]
    return torch.from_numpy(oracle_cka(*batches, row=[keep.nonzero()[:, 0].numpy()])["values"])


def wrapped(model):
    return pytest.importorskip("nnsight").NNsight(model)


@pytest.mark.light("T5-decoder.cross_attn_out")
@each_site
def test_every_source_equals_hooks_placed_by_hand_with_padding_in_both_stacks(key, at):
    model = MODELS[key]()
    inputs = rows()
    heads = 4 * at.endswith("z")
    options = {"at": at, "per_head": bool(heads)}
    expected = by_hand(model, SITES[key, at], inputs, counted(inputs, at), heads)
    analyzers = [COSINE, lsim.CKA()]
    reports = {
        "hooked": called(lsim.analyze, model, inputs, analyzers, **options),
        "one by one": called(lsim.analyze, model, inputs, analyzers, batch_size=1, **options),
        "nnsight": called(lsim.analyze, wrapped(model), inputs, analyzers, batch_size=2, **options),
        "simulated server": called(lsim.analyze, wrapped(model), inputs, analyzers, remote="local", **options),
    }
    with torch.no_grad(), called(lsim.attach, model, analyzers, **options) as probe:
        model(**inputs)
    reports["attached"] = probe.results()

    for name, report in reports.items():
        torch.testing.assert_close(report["cosine"].values, cosine(expected), atol=1e-6, rtol=0, msg=name)
        torch.testing.assert_close(report["cka"].values, cka(counted(inputs, at), expected), atol=1e-5, rtol=0, msg=name)
        assert all(site.startswith(f"{side(at)}.blocks.") for site in report["cosine"].layers)
        assert report["cosine"].provenance.tokens == int(counted(inputs, at).sum())
    assert len({report["cka"].provenance.data for name, report in reports.items() if name != "attached"}) == 1

    if not heads:
        first = f"{side(at)}.blocks.0.hook_" + ("resid_pre" if at.endswith("resid_post") else at.partition(".")[2])
        assert reports["hooked"]["cosine"].layers[0] == first


@pytest.mark.light(
    "T5-encoder.resid_post",
    "T5-decoder.attn_out",
    "T5-encoder.z",
    "BART-encoder.resid_post",
    "BART-decoder.attn_out",
    "BART-encoder.z",
)
@each_site
def test_the_last_position_is_that_of_the_stack_that_is_read(key, at):
    if at.endswith("z"):
        pytest.skip("heads are measured above")
    model = MODELS[key]()
    inputs = rows()
    expected = cosine(by_hand(model, SITES[key, at], inputs, counted(inputs, at, "last")))

    result = lsim.analyze(model, lsim.Data(inputs, positions="last"), COSINE, at=at)["cosine"]

    torch.testing.assert_close(result.values, expected, atol=1e-6, rtol=0)
    assert result.provenance.tokens == 5


@pytest.mark.light("T5")
@each_model
def test_rows_of_lists_and_of_left_padded_tensors_are_those_of_right_padded_tensors(make):
    model = make()
    inputs = rows()
    lists = [
        {
            "input_ids": inputs["input_ids"][i][inputs["attention_mask"][i].bool()].tolist(),
            "decoder_input_ids": inputs["decoder_input_ids"][i][inputs["decoder_attention_mask"][i].bool()].tolist(),
        }
        for i in range(5)
    ]
    left_padded = {}
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        shifts = inputs[mask].shape[1] - inputs[mask].sum(1)
        left_padded[ids] = torch.stack([row.roll(int(n)) for row, n in zip(inputs[ids], shifts, strict=True)])
        left_padded[mask] = inputs[mask].flip(1)
    together = {name: [row[name] for row in lists] for name in lists[0]}

    for at in ("resid_post", "encoder.resid_post"):
        values = lsim.analyze(model, inputs, COSINE, at=at)["cosine"].values
        for form in (lists, left_padded, together):
            result = lsim.analyze(model, lsim.Data(form, batch_size=3), COSINE, at=at)["cosine"]
            torch.testing.assert_close(result.values, values, atol=1e-6, rtol=0)


@pytest.mark.light("T5")
@each_model
def test_the_lens_gives_the_models_own_loss_at_its_last_layer(make):
    model = make()
    inputs = rows()
    with torch.no_grad():
        logits = model(**inputs).logits.double()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), inputs["decoder_input_ids"][:, 1:].flatten(), reduction="none"
    )
    keep = (inputs["decoder_attention_mask"][:, 1:] > 0).flatten()

    for result in (
        lsim.analyze(model, inputs, lsim.LogitLens())["logit_lens"],
        lsim.analyze(lsim.open_model(wrapped(model), remote="local"), inputs, lsim.LogitLens())["logit_lens"],
    ):
        assert float(result.cross_entropy[-1]) == pytest.approx(float(losses[keep].mean()), abs=1e-5)

    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model(**inputs)
    assert float(probe.results()["logit_lens"].cross_entropy[-1]) == pytest.approx(float(losses[keep].mean()), abs=1e-5)
    with pytest.raises(lsim.LayersimError, match="head"):
        lsim.analyze(model, inputs, lsim.LogitLens(), at="encoder.resid_post")


def test_the_scale_of_tied_embeddings_is_part_of_the_lens():
    from tl_layersim.sources.hooked_module import HookedSource

    tied = t5()
    untied = t5()
    untied.config.scale_decoder_outputs = False
    heads = [HookedSource(model).model.head for model in (tied, untied)]
    assert [head.scale for head in heads] == [32**-0.5, 1.0]
    inputs = rows()
    losses = [lsim.analyze(model, inputs, lsim.LogitLens())["logit_lens"].cross_entropy[-1] for model in (tied, untied)]
    assert losses[0] != losses[1]


def test_a_bias_of_the_logits_that_the_lens_lacks_is_refused():
    model = bart()
    model.final_logits_bias += torch.randn(1, 100)
    with pytest.raises(lsim.LayersimError, match=r"lm_head\(.* \d.*unembed="):
        lsim.analyze(model, rows(), lsim.LogitLens())


@pytest.mark.light("T5")
@each_model
def test_texts_are_read_by_the_encoder_and_refused_for_the_decoder(make):
    model = make()
    tokenizer = tiny_tokenizer()
    texts = ["a cat sat", "the dog ran far away", "birds"]

    result = lsim.analyze(model, lsim.Data(texts, tokenizer=tokenizer), COSINE, at="encoder.resid_post")["cosine"]
    wrap = lsim.analyze(
        lsim.open_model(wrapped(model), remote="local"), lsim.Data(texts, tokenizer=tokenizer), COSINE, at="encoder.resid_post"
    )["cosine"]

    torch.testing.assert_close(result.values, wrap.values, atol=1e-6, rtol=0)
    for data in (
        texts,
        random_tokens(2, 5),
        {"text": texts},
        {"input_ids": random_tokens(2, 5)},
        {"labels": random_tokens(2, 5)},
    ):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*decoder_input_ids.*encoder\.resid"):
            lsim.analyze(model, lsim.Data(data, tokenizer=tokenizer), COSINE)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*`decoder_input_ids`"):
        lsim.analyze(model, {"decoder_input_ids": random_tokens(2, 5)}, COSINE)


def test_padding_without_a_mask_is_left_out_and_a_start_token_is_not():
    """T5 starts its decoder with the padding id."""
    model = t5()
    inputs = rows()
    inputs["decoder_input_ids"] = torch.where(inputs["decoder_input_ids"] == 0, 5, inputs["decoder_input_ids"])
    inputs["input_ids"] = torch.where(inputs["input_ids"] == 0, 5, inputs["input_ids"])
    inputs["decoder_input_ids"][:, 0] = 0
    plain = lsim.analyze(model, inputs, COSINE)["cosine"]
    bare = {
        name: values * inputs[name.replace("input_ids", "attention_mask")] for name, values in inputs.items() if "ids" in name
    }
    with pytest.warns(lsim.LayersimWarning, match="without an attention mask"):
        result = lsim.analyze(model, bare, COSINE)["cosine"]

    torch.testing.assert_close(result.values, plain.values, atol=1e-6, rtol=0)

    bare["decoder_input_ids"] = torch.tensor([[0, 0, 0, 5, 6]]).expand(5, -1)
    with pytest.raises(lsim.LayersimError, match=r"`decoder_attention_mask`.* 5 of 5 rows"):
        lsim.analyze(model, bare, COSINE)


BOTH = {
    "families": ["encoder.attn_out", "decoder.attn_out"],
    "a family without a stack": ["encoder.attn_out", "attn_out"],
    "names": ["encoder.blocks.0.hook_resid_pre", "decoder.blocks.0.hook_resid_pre"],
    "a pattern": "*.hook_attn_out",
    "a function": lambda name: name.endswith("hook_attn_out"),
}


@pytest.mark.parametrize("at", BOTH.values(), ids=BOTH)
def test_sites_of_both_stacks_in_one_call_are_refused(at):
    for call in (lambda: lsim.analyze(t5(), rows(), TOKEN_CKA, at=at), lambda: lsim.attach(t5(), TOKEN_CKA, at=at)):
        with pytest.raises(lsim.LayersimError, match=r"`at`.*\bencoder\b.*\bdecoder\b"):
            call()


def test_names_patterns_and_module_paths_choose_their_stack():
    model = t5()
    inputs = rows()
    family = lsim.analyze(model, inputs, TOKEN_CKA, at="encoder.attn_out")["cka"]
    paths = [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(3)]

    for at in (
        "encoder.blocks.*.hook_attn_out",
        [*family.layers],
        lambda n: "encoder" in n and n.endswith("hook_attn_out"),
        paths,
    ):
        result = lsim.analyze(model, inputs, TOKEN_CKA, at=at)["cka"]
        assert torch.equal(result.values, family.values)
        assert result.provenance.tokens == 28

    head = lsim.analyze(model, inputs, TOKEN_CKA, at=["encoder.blocks.1.attn.hook_z[2]", "encoder.ln_final"])["cka"]
    assert head.layers == ("encoder.blocks.1.attn.hook_z[2]", "encoder.ln_final.hook_normalized")
    with pytest.raises(lsim.LayersimError, match=r"does not have(.|\n)*blocks of its encoder have none"):
        lsim.analyze(model, inputs, TOKEN_CKA, at="encoder.cross_attn_out")
    for path in ("decoder.block.0.layer.1.EncDecAttention.k", "decoder.block.1.layer.1.EncDecAttention.v"):
        with pytest.raises(lsim.LayersimError, match=f"`at`.*{path}"):
            lsim.analyze(model, inputs, TOKEN_CKA, at=[path])


@pytest.mark.light("T5")
@each_model
def test_layers_of_one_stack_are_named_and_read_as_that_stack(make):
    model = make()
    inputs = rows()
    for stack in ("encoder", "decoder"):
        table = lsim.sites(model)
        chosen = (
            table[(table.family == "resid_post") & table.name.str.startswith(stack)]
            .module.str.removesuffix(" (output)")
            .tolist()
        )
        named = lsim.analyze(lsim.open_model(model, layers=chosen), inputs, [COSINE, lsim.Trajectory()])
        plain = lsim.analyze(model, inputs, [COSINE, lsim.Trajectory()], at=f"{stack}.resid_post")
        assert named["cosine"].layers == plain["cosine"].layers
        assert torch.equal(named["cosine"].values, plain["cosine"].values)
        assert torch.equal(named["cosine"].norm_ratio, plain["cosine"].norm_ratio)
        assert torch.equal(named["trajectory"].values, plain["trajectory"].values)
        other_stack = "decoder" if stack == "encoder" else "encoder"
        with pytest.raises(
            lsim.LayersimError,
            match=f"`at`.*{other_stack}.*`layers`.*{stack}",
        ):
            lsim.analyze(lsim.open_model(model, layers=chosen), inputs, COSINE, at=f"{other_stack}.resid_post")


def test_layers_of_both_stacks_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`layers` .*decoder.block"):
        lsim.analyze(lsim.open_model(t5(), layers=["encoder.block.0", "decoder.block.0"]), rows(), TOKEN_CKA)


def test_a_model_that_is_used_again_reads_its_own_stack():
    from tl_layersim.sources.hooked_module import HookedSource

    inputs = rows()
    for model, at in ((lsim.open_model(t5()), "encoder.attn_out"), (HookedSource(t5()), "attn_out")):
        first = lsim.analyze(model, inputs, COSINE)["cosine"]
        lsim.analyze(model, inputs, COSINE, at=at)
        repeated = lsim.analyze(model, inputs, COSINE)["cosine"]
        assert first.layers == repeated.layers
        assert torch.equal(first.values, repeated.values)


def test_two_models_are_compared_at_one_stack():
    a = t5()
    b = bart()
    inputs = rows()
    keep = {at: counted(inputs, at) for at in ("encoder.resid_post", "resid_post")}
    for at, mask in keep.items():
        x, y = (by_hand(m, SITES[key, at], inputs, mask) for m, key in ((a, "T5"), (b, "BART")))
        result = lsim.compare(a, b, inputs, TOKEN_CKA, at=at)
        torch.testing.assert_close(result.values, cka(mask, x, y), atol=1e-5, rtol=0)
    from ..models.tiny_models import tiny_gpt2

    with pytest.raises(lsim.LayersimError, match="read different inputs of the data"):
        lsim.compare(a, tiny_gpt2(), inputs, TOKEN_CKA)


def test_the_sublayers_of_a_decoder_are_added_to_the_stream_before_each():
    model = t5()
    inputs = rows()
    result = lsim.analyze(model, inputs, lsim.Contribution())["contribution"]
    assert result.sublayers[:3] == tuple(f"decoder.blocks.0.hook_{part}_out" for part in ("attn", "cross_attn", "mlp"))

    sites = [
        (f"decoder.block.0.layer.{i}{end}", incoming)
        for i, end in enumerate((".SelfAttention", ".EncDecAttention", ".DenseReluDense"))
        for incoming, end in ((False, end), (True, ""))
    ]
    values = by_hand(model, sites, inputs, counted(inputs, "resid_post"))

    for number in range(3):
        added = values[2 * number]
        stream = values[2 * number + 1]
        ratio = (added.norm(dim=-1) / stream.norm(dim=-1)).mean()
        assert float(result.values[number]) == pytest.approx(float(ratio), rel=1e-5)

    labels = [trace.name for trace in result.plot().data]
    assert labels == ["Attention", "Attention to the encoder", "MLP"]


def test_the_basis_says_whether_blocks_end_in_a_norm():
    bases = [lsim.analyze(make(), rows(), COSINE)["cosine"].provenance.basis for make in (t5, bart)]
    assert ["post-norm" in basis for basis in bases] == [False, True]
    config = hf.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=100, max_position_embeddings=32)
    result = lsim.analyze(hf.DistilBertForMaskedLM(config).eval(), random_tokens(2, 6), COSINE)["cosine"]
    assert "post-norm" in result.provenance.basis


def test_a_pair_of_other_models_has_two_stacks():
    model = pair()
    inputs = rows()
    for at, path in (("resid_post", "decoder.bert.encoder.layer"), ("encoder.resid_post", "encoder.encoder.layer")):
        sites = [(f"{path}.0", True), *((f"{path}.{i}", False) for i in range(3))]
        result = lsim.analyze(model, inputs, COSINE, at=at)["cosine"]
        torch.testing.assert_close(result.values, cosine(by_hand(model, sites, inputs, counted(inputs, at))), atol=1e-6, rtol=0)


def whisper():
    torch.manual_seed(0)
    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 100, "num_mel_bins": 8, "max_source_positions": 10}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **tokens, max_target_positions=16)).eval()


def test_both_stacks_of_a_model_of_speech():
    model = whisper()
    inputs = {"input_features": torch.randn(3, 8, 20), "decoder_input_ids": random_tokens(3, 6)}
    for at, path, keep in (
        ("resid_post", "model.decoder.layers", torch.ones(3, 6).bool()),
        ("encoder.resid_post", "model.encoder.layers", torch.ones(3, 10).bool()),
    ):
        sites = [(f"{path}.0", True), (f"{path}.0", False), (f"{path}.1", False)]
        result = lsim.analyze(model, inputs, COSINE, at=at)["cosine"]
        torch.testing.assert_close(result.values, cosine(by_hand(model, sites, inputs, keep)), atol=1e-6, rtol=0)

    alone = lsim.analyze(model, inputs["input_features"], COSINE, at="encoder.resid_post")["cosine"]
    assert torch.equal(alone.values, result.values)
