"""Heads: what each family's logits are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import CONFIGS, GROUPED, LAYOUTS, LENSES, build, lively, nnsight
from ..running.options import called


def heads() -> dict:
    builders = {name: (lambda name=name: build(name)) for name in LAYOUTS}
    for name, config in (("Gemma2", {"final_logit_softcapping": 3.0}), ("Gemma3", {"final_logit_softcapping": 2.0})):

        def capped(name=name, config=config):
            torch.manual_seed(0)
            cls = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
            return getattr(transformers, f"{name}ForCausalLM")(cls(**GROUPED, **config)).eval()

        builders[f"{name} with soft-cap"] = capped
    for name, config in (("Cohere", {"logit_scale": 0.25}), ("Granite", {"logits_scaling": 4.0}), ("Phi", {}), ("Olmo2", {})):

        def other(name=name, config=config):
            torch.manual_seed(0)
            return getattr(transformers, f"{name}ForCausalLM")(
                getattr(transformers, f"{name}Config")(**GROUPED, **config, pad_token_id=0, bos_token_id=1, eos_token_id=2)
            ).eval()

        builders[name] = other
    return builders


HEADS = heads()


@pytest.mark.light("Llama", "Gemma2", "OPT", "Gemma3 with soft-cap", "Olmo2")
@pytest.mark.filterwarnings("ignore:The targets of .* are next tokens")
@pytest.mark.parametrize("family", HEADS)
def test_the_last_layer_says_what_the_model_says(family):
    """Loss of the last layer, against the model's own; and every known layout is found without help."""
    model = lively(HEADS[family]())
    tokens = random_tokens(4, 12)

    result = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with torch.no_grad():
        logits = model(tokens).logits
    model_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())

    np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5)
    assert result.kl_to_final[-1] == 0
    assert result.agreement[-1] == 1
    assert (result.kl_to_final[:-1] > 0).all()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:The targets of .* are next tokens")
@pytest.mark.parametrize("family", ["Gemma2 with soft-cap", "OPT", "Bert"])
def test_nnsight_reads_the_same_heads(family):
    tokens = random_tokens(4, 12)
    every = [cls() for cls in LENSES]

    expected = lsim.analyze(lively(HEADS[family]()), tokens, every)

    for options in ({}, {"remote": "local"}):
        report = called(lsim.analyze, nnsight(lively(HEADS[family]())), tokens, every, **options)
        for name in expected:
            np.testing.assert_allclose(report[name].values, expected[name].values, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_bridge_of_a_capped_model_reads_the_cap():
    from ..models.wrapped_models import bridge

    tokens = random_tokens(4, 12)
    expected = lsim.analyze(lively(HEADS["Gemma2 with soft-cap"]()), tokens, lsim.LogitLens())["logit_lens"]
    model = bridge(lively(HEADS["Gemma2 with soft-cap"]()))
    result = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]

    np.testing.assert_allclose(result.cross_entropy, expected.cross_entropy, rtol=1e-5)
    assert "3 tanh(" in result.unembedding


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_bridge_in_compatibility_mode_still_says_what_it_says():
    from ..models.wrapped_models import bridge

    model = bridge(lively(tiny_gpt2()))
    model.enable_compatibility_mode()
    tokens = random_tokens(4, 12)

    result = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with torch.no_grad():
        model_loss = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())

    np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5)


def test_a_tied_head_and_a_head_with_a_bias():
    tied = tiny_llama()
    tied.config.tie_word_embeddings = True
    tied.lm_head.weight = tied.model.embed_tokens.weight
    biased = tiny_llama()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(0)))
    tokens = random_tokens(4, 12)

    for model in (tied, biased):
        with torch.no_grad():
            logits = model(tokens).logits
        model_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
        result = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
        np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5)


class PartialSums(torch.nn.Linear):
    """A block that hands on the residual stream."""

    def forward(self, x):
        return x + super().forward(x)


class Odd(torch.nn.Module):
    """A layout that no table knows: its final norm is called `polish`, its head `speak`, and logits are doubled."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 16)
        self.parts = torch.nn.ModuleList(PartialSums(16, 16) for _ in range(3))
        self.polish = torch.nn.LayerNorm(16)
        self.speak = torch.nn.Linear(16, 100)
        self.twice = twice

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        logits = self.speak(self.polish(x))
        return 2 * logits if self.twice else logits


def test_a_head_that_no_table_knows_can_be_named():
    layers = ["parts.0", "parts.1", "parts.2"]
    tokens = random_tokens(4, 12)

    with pytest.raises(lsim.LayersimError, match=r"LogitLens.* Odd .*unembed="):
        lsim.analyze(lsim.open_model(Odd(), layers=layers), tokens, lsim.LogitLens())
    for model in (Odd(), nnsight(Odd())):
        result = lsim.analyze(lsim.open_model(model, layers=layers, unembed=["polish", "speak"]), tokens, lsim.LogitLens())[
            "logit_lens"
        ]
        assert result.unembedding == "speak(polish(x))"
        assert result.provenance.options["unembed"] == ["polish", "speak"]
    with pytest.raises(lsim.LayersimError, match=r"`unembed` is .*'polis'.* Odd\b.*'polish'"):
        lsim.analyze(lsim.open_model(Odd(), layers=layers, unembed=["polis", "speak"]), tokens, lsim.LogitLens())


@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["hooked", "nnsight"])
def test_a_lens_that_is_not_the_models_is_refused(lens, wrap):
    layers = ["parts.0", "parts.1", "parts.2"]
    tokens = random_tokens(4, 12)

    with pytest.raises(lsim.LayersimError, match=r"speak\(polish\(x\)\) .* 0\.\d+ .*unembed="):
        lsim.analyze(lsim.open_model(wrap(Odd(twice=True)), layers=layers, unembed=["polish", "speak"]), tokens, lens())
    with pytest.raises(lsim.LayersimError, match=r"speak\(x\) .* 0\.\d+ .*unembed="):
        lsim.analyze(lsim.open_model(wrap(Odd()), layers=layers, unembed=["speak"]), tokens, lens())


def test_a_model_without_a_head_is_refused_before_it_runs():
    model = tiny_llama().model
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=r"needs an unembedding(.|\n)*AutoModelForCausalLM"):
            lsim.analyze(model, random_tokens(), lens())
    assert lsim.analyze(model, random_tokens(), [lsim.Trajectory(), lsim.NeuralCollapse()])


def test_hooks_on_the_head_see_the_model_and_not_the_lens():
    model = tiny_llama()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    model.model.norm.register_forward_pre_hook(lambda *_: calls.append("norm"))

    lsim.analyze(model, random_tokens(4, 12), [lsim.LogitLens(), lsim.Saturation(norm="none")])

    # The watched forward pass, and the one that compares the lens with the logits.
    assert calls == ["norm", "head", "norm", "head"]


def classifier(family: str):
    torch.manual_seed(0)
    options = {"num_labels": 3, "pad_token_id": 2}
    if family in ("Bert", "Roberta", "MPNet"):
        small = LAYOUTS["Bert"] | options | ({"max_position_embeddings": 80, "pad_token_id": 1} if family != "Bert" else {})
        return lively(
            getattr(transformers, f"{family}ForSequenceClassification")(getattr(transformers, f"{family}Config")(**small))
        ).eval()
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(LAYOUTS[family] | options))
    return lively(getattr(transformers, f"{family}ForSequenceClassification")(config)).eval()


@pytest.mark.light("Llama", "Bert", "MPNet")
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "Roberta", "MPNet"])
def test_classifiers_are_read_where_they_classify(family):
    model = classifier(family)
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7, 9)]
    label = torch.tensor([0, 2, 1, NO_LABEL])
    model_tokens = []
    with torch.no_grad():
        for row, y in zip(rows, label, strict=True):
            logits = model(row[None]).logits[0].double()
            model_tokens.append((float(-logits.log_softmax(0)[y]) if y != NO_LABEL else None, int(logits.argmax())))

    report = lsim.analyze(
        model, rows, [lsim.LogitLens(labels=label, top_k=(1, 2)), lsim.Saturation(), lsim.ExitCurve(labels=label)]
    )
    lens = report["logit_lens"]

    assert (lens.positions, lens.targets) == (4, 3)
    np.testing.assert_allclose(lens.cross_entropy[-1], np.mean([ce for ce, _ in model_tokens if ce is not None]), rtol=1e-5)

    right = [predicted == y for (_, predicted), y in zip(model_tokens, label.tolist(), strict=True) if y != NO_LABEL]
    assert lens.accuracy[-1] == np.mean(right)
    assert report["saturation"].counts.sum() == 4
    assert report["exit_curve"].at(1.0).accuracy == lens.accuracy[-1]
    with pytest.raises(lsim.LayersimError, match=r"ForSequenceClassification .*LogitLens\(labels='data'\)"):
        lsim.analyze(model, rows, lsim.LogitLens())
    with (
        pytest.raises(lsim.LayersimError, match=r"^Saturation .*ForSequenceClassification"),
        lsim.attach(model, lsim.Saturation()),
    ):
        pass


@pytest.mark.parametrize("family", ["Bert", "Llama", "GPT2"])
def test_token_classifiers_are_read_at_every_token(family):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(LAYOUTS[family] | {"num_labels": 3}))
    model = lively(getattr(transformers, f"{family}ForTokenClassification")(config)).eval()
    rows = [torch.tensor([5]), *random_tokens(2, 9)]
    labels = torch.randint(0, 3, (3, 9), generator=torch.Generator().manual_seed(0))

    result = lsim.analyze(model, rows, lsim.LogitLens(labels=labels, top_k=(1,)))["logit_lens"]
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[0] for row in rows]).double()
    model_loss = torch.nn.functional.cross_entropy(logits, torch.cat([labels[0, :1], labels[1], labels[2]]))

    np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5)
    assert result.positions == 19


def test_a_head_that_also_reads_the_pooled_output_gives_the_model_s_own_loss():
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**LAYOUTS["Bert"])).eval()
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        logits = model(tokens).prediction_logits.double()
    model_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    for opened in (model, lsim.open_model(model, unembed=["cls.predictions"])):
        result = lsim.analyze(opened, tokens, lsim.LogitLens())["logit_lens"]
        np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5)


def test_the_opt_that_projects_out_without_a_norm():
    torch.manual_seed(0)
    options = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**(LAYOUTS["OPT"] | options))).eval()

    result = lsim.analyze(lively(model), random_tokens(2, 9), lsim.LogitLens())["logit_lens"]

    assert result.unembedding == "lm_head(model.decoder.project_out(x))"
