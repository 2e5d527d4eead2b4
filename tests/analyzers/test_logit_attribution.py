"""Attributions of a logit: they add up to it, equal those of hooks and of TransformerLens, and other tails are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.logit_attribution import LogitAttributionResult

from .. import oracles
from ..engine.test_encoder_decoders import rows as rows_of_pairs
from ..engine.test_run_positions import causal_classifier
from ..inputs.views import from_views, residuals, view, with_sublayers
from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge, lively
from ..user_loops.test_attach_stacks import t5


def attributed(model, data, *tokens, **options) -> LogitAttributionResult:
    return lsim.analyze(model, data, lsim.LogitAttribution(*tokens), **options)["logit_attribution"]


def built(name: str):
    model = {"llama": tiny_llama, "gpt2": tiny_gpt2}.get(name, lambda: family(name))()
    return lively(model)


@pytest.mark.light("llama", "gpt2", "neox", "gemma3")
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma3", "opt", "phi", "falcon", "bloom", "gptj", "mpt", "qwen2"])
def test_terms_add_up_to_the_logit_of_the_model(name):
    """Norms with and without centring, weight and bias; heads with and without bias; parallel and sequential blocks."""
    model = built(name)
    tokens = random_tokens(3, 9)
    with torch.no_grad():
        logits = model(tokens).logits.double()
    of_next = logits[:, :-1].gather(-1, tokens[:, 1:, None]).mean()

    result = attributed(model, tokens)
    size = float(result.values.abs().sum())

    assert float(result.logit) == pytest.approx(float(of_next), abs=1e-6 * size)
    assert float(result.values.sum()) == pytest.approx(float(of_next), abs=1e-6 * size)

    blocks = result.values[0] + result.by_block.sum() + result.values[-1]
    assert float(blocks) == pytest.approx(float(of_next), abs=1e-6 * size)
    assert result.positions == 24
    assert result.terms[0] == "blocks.0.hook_resid_pre"
    assert result.terms[1:3] == ("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out")
    assert result.terms[-1] == "bias"
    assert len(result.terms) == 8


def test_a_layer_norm_with_weight_and_bias_equals_the_formula():
    """By hooks of the test's own on a GPT-2, in float64, with the embedding taken from the input of block 0."""
    model = lively(tiny_gpt2()).double()
    row = random_tokens(1, 7)[0]
    captured: list[torch.Tensor] = []
    blocks = model.transformer.h
    handles = [blocks[0].register_forward_pre_hook(lambda m, a: captured.append(a[0][0, -1]))]
    for block in blocks:
        for part in (block.attn, block.mlp):
            handles.append(
                part.register_forward_hook(lambda m, a, o: captured.append((o[0] if isinstance(o, tuple) else o)[0, -1]))
            )
    with torch.no_grad():
        model(row[None])
    for handle in handles:
        handle.remove()
    norm = model.transformer.ln_f
    final = torch.stack(captured).sum(0)
    sigma = torch.sqrt(final.var(unbiased=False) + norm.eps)
    weight = norm.weight.detach()
    direction = (model.lm_head.weight[7] - model.lm_head.weight[9]).detach()
    expected = [float((direction * weight * (part - part.mean()) / sigma).sum()) for part in captured]
    expected.append(float((direction * norm.bias.detach()).sum()))

    result = attributed(model, lsim.Data(row, positions="last"), 7, 9)

    np.testing.assert_allclose(result.values, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_attributions_equal_those_of_transformer_lens(make):
    from transformer_lens.tools.analysis import direct_logit_attribution

    wrapped = bridge(lively(make()))
    tokens = random_tokens(1, 9)

    before = attributed(wrapped, lsim.Data(tokens, positions="last"), 7, 9)
    wrapped.enable_compatibility_mode(disable_warnings=True)
    from_transformer_lens = direct_logit_attribution(wrapped, tokens, answer_tokens=7, incorrect_tokens=9)
    values = dict(
        zip(from_transformer_lens.labels, from_transformer_lens.attribution.detach().flatten().double().tolist(), strict=True)
    )
    embedding = values.pop("embed") + values.pop("pos_embed", 0.0)
    after = attributed(wrapped, lsim.Data(tokens, positions="last"), 7, 9)

    # They ask for folded weights, which change no attribution of a difference of two tokens.
    for result in (before, after):
        np.testing.assert_allclose(result.values[:-1], [embedding, *values.values()], rtol=1e-4, atol=1e-5)
        names = [name.replace("blocks.", "").replace(".hook", "") for name in result.terms[1:-1]]
        assert names == list(values)


# The run of `from_views` has one row.
@pytest.mark.filterwarnings("ignore:`(target|against)` has 39 rows")
@pytest.mark.parametrize("against", [None, [5, 9, 250] * 13], ids=["alone", "against"])
def test_a_token_for_each_row_and_one_against_it(against):
    x = residuals(3, tokens=39)
    ids = [(7 * row) % 300 for row in range(39)]
    analyzer = lsim.LogitAttribution(torch.tensor(ids), None if against is None else torch.tensor(against))
    sample_view = with_sublayers(view(x, rows=39, row=torch.arange(39), column=torch.zeros(39).long()), x)

    result = from_views(analyzer, [sample_view])
    expected = oracles.oracle_logit_attribution([x], ids, against)

    for name, values in expected.items():
        np.testing.assert_allclose(getattr(result, name), values, rtol=1e-9, atol=1e-11, err_msg=name)


def test_text_intervals_files_and_figures(tmp_path):
    model = lively(tiny_llama())
    model.tokenizer = tiny_tokenizer()
    rows = random_tokens(20, 6)
    data = lsim.Data(rows, positions="last")

    report = lsim.analyze(model, data, lsim.LogitAttribution("w7", against="w9"), intervals=True)
    result = report["logit_attribution"]

    torch.testing.assert_close(result.values, attributed(model, data, 7, 9).values)

    parts = [attributed(model, lsim.Data(row[None], positions="last"), 7, 9).values for row in rows]
    torch.testing.assert_close(result.values, torch.stack(parts).mean(0), rtol=1e-5, atol=1e-6)
    # The standard error of a mean of 20 rows.
    torch.testing.assert_close(result.interval("values").error, torch.stack(parts).std(0) / 20**0.5, rtol=1e-4, atol=1e-6)

    loaded = lsim.load(result.save(tmp_path / "found.safetensors"))
    assert torch.equal(loaded.values, result.values)
    assert loaded.terms == result.terms
    np.testing.assert_allclose(result.plot().data[0].y, result.values)
    assert result.to_frame()["attribution"].sum() == pytest.approx(float(result.logit), rel=1e-5)
    assert result.headline()["logit"] == float(result.logit)
    assert "Direct attribution" in report.to_html(tmp_path / "page.html").read_text()


def test_a_probe_and_a_decoder_of_two_stacks():
    model = lively(tiny_llama())
    tokens = random_tokens(3, 9)

    with torch.no_grad(), lsim.attach(model, lsim.LogitAttribution(5)) as probe:
        model(tokens)

    torch.testing.assert_close(probe.results()["logit_attribution"].values, attributed(model, tokens, 5).values)

    result = attributed(t5(), rows_of_pairs())
    assert result.terms[1:4] == tuple(f"decoder.blocks.0.hook_{part}_out" for part in ("attn", "cross_attn", "mlp"))
    assert float(result.values.sum()) == pytest.approx(float(result.logit), abs=1e-6 * float(result.values.abs().sum()))


def test_a_block_whose_sublayers_miss_a_part_of_it_is_one_term():
    x = residuals(1, tokens=9)
    whole = with_sublayers(view(x), x)
    activations = whole.activations.clone()
    activations[whole.sites.index("blocks.1.hook_mlp_out")] *= 0.5

    result = from_views(lsim.LogitAttribution(), [type(whole)(**{**vars(whole), "activations": activations})])
    expected = oracles.oracle_logit_attribution([x])

    assert result.terms[3:5] == ("blocks.1.hook_resid_post", "blocks.2.hook_attn_out")
    assert float(result.values[3]) == pytest.approx(expected["by_block"][1])
    assert float(result.values.sum()) == pytest.approx(float(expected["logit"]))


class Bent(torch.nn.Module):
    """A head with a function that is not linear."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, self.weight))


def test_tails_that_are_not_a_norm_and_a_linear_layer_are_refused():
    tokens = random_tokens(2, 9)
    with pytest.raises(lsim.LayersimError, match=r"Gemma2.*caps its logits at 30"):
        attributed(family("gemma2"), tokens)
    with pytest.raises(lsim.LayersimError, match="no residual branch"):
        attributed(family("bert"), tokens)
    with pytest.raises(lsim.LayersimError, match="whole rows"):
        attributed(causal_classifier(), tokens)

    bent = tiny_llama()
    bent.lm_head = Bent(bent.lm_head)
    with pytest.raises(lsim.LayersimError, match=r"not linear.*\b16 of 16\b"):
        attributed(bent, tokens)


def test_tokens_that_are_missing_or_none_are_refused():
    model = tiny_llama()
    tokens = random_tokens(2, 9)

    with pytest.raises(lsim.LayersimError, match=r"`target` has the id 100"):
        attributed(model, tokens, 100)
    with pytest.raises(lsim.LayersimError, match=r"`against` is 'w3'.*tokenizer"):
        attributed(model, tokens, 5, "w3")
    with pytest.raises(lsim.LayersimError, match=r"`against` has 1 tokens.*\b2 rows"):
        attributed(model, tokens, 5, [3])
    with pytest.raises(lsim.LayersimError, match="next token"):
        attributed(model, lsim.Data(tokens, positions="last"))
