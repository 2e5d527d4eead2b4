"""Skipped blocks: models by hooks of the test's own, splits, padding, heads, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.blocks import layer_names
from tl_layersim.core import LayersimError, LayersimWarning

from .. import oracles
from ..inputs.own_blocks import own_calls
from ..inputs.views import from_views, residuals, view, worst
from ..models.tiny_models import family, random_tokens, tiny_gpt2, tiny_llama

FIELDS = ("values", "largest", "later", "later_largest")
OUTPUTS = tuple(f"{prefix}probability_change{suffix}" for prefix in ("", "later_") for suffix in ("", "_largest"))


def blocks_of(model) -> list[torch.nn.Module]:
    base = model.base_model
    return list(base.layers if hasattr(base, "layers") else base.h)


def skipped_run(model, row: torch.Tensor, skipped: int | None, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Contributions `layer token d_model` and probabilities `token vocabulary` of one row, by hooks of the test's own."""
    added: list[torch.Tensor] = []

    def hook(number):
        def skip(_module, args, output):
            after = (output[0] if isinstance(output, tuple) else output).clone()
            if number == skipped:
                after[:, start:stop] = args[0][:, start:stop]
            added.append(after[0].float() - args[0][0].float())
            return (after, *output[1:]) if isinstance(output, tuple) else after

        return skip

    handles = [block.register_forward_hook(hook(number)) for number, block in enumerate(blocks_of(model))]
    with torch.no_grad():
        logits = model(row[None], use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return torch.stack(added).double(), logits.double().softmax(-1)


def naive(model, rows: list[torch.Tensor], keep_first: int, splits: int) -> dict[str, np.ndarray]:
    blocks = len(blocks_of(model))
    out = {}
    for prefix in ("", "later_"):
        means, peaks = [[] for _ in range(blocks)], [[] for _ in range(blocks)]
        output_means, output_peaks = [[] for _ in range(blocks)], [[] for _ in range(blocks)]
        for row in rows:
            n = len(row)
            stops = [n * i // (splits + 1) for i in range(1, splits + 1)] if prefix else [n]
            stops = [stop for stop in stops if stop > keep_first]
            own, p = skipped_run(model, row, None, 0, 0)
            for skipped in range(blocks if stops else 0):
                change, output = [], []
                for stop in stops:
                    other, q = skipped_run(model, row, skipped, keep_first, stop)
                    where = slice(stop if prefix else keep_first, n)
                    change.append(((own - other).norm(dim=-1) / own.norm(dim=-1))[:, where])
                    output.append((p - q).norm(dim=-1)[where])
                change, output = torch.cat(change, 1), torch.cat(output)
                means[skipped].append(change)
                peaks[skipped].append(change.amax(1))
                output_means[skipped].append(output)
                output_peaks[skipped].append(output.amax())
        if not any(output_means):
            continue
        lower = np.tril(np.ones((blocks, blocks), dtype=bool))
        out[prefix or "values"] = np.where(lower, np.nan, torch.stack([torch.cat(one, 1).mean(1) for one in means]))
        out[f"{prefix}largest"] = np.where(lower, np.nan, torch.stack([torch.stack(one).mean(0) for one in peaks]))
        out[f"{prefix}probability_change"] = torch.stack([torch.cat(one).mean() for one in output_means]).numpy()
        out[f"{prefix}probability_change_largest"] = torch.stack([torch.stack(one).mean() for one in output_peaks]).numpy()
    return {"later" if name == "later_" else name: value for name, value in out.items()}


def rows_of(*lengths: int) -> list[torch.Tensor]:
    return [random_tokens(1, length, seed=length)[0] for length in lengths]


@pytest.mark.light("tiny_llama-1-1")
@pytest.mark.parametrize(("keep_first", "splits"), [(1, 1), (0, 1), (3, 2)])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, lambda: family("neox"), lambda: family("gemma2")])
def test_effects_equal_those_of_hooks(make, keep_first, splits):
    model, rows = make(), rows_of(20, 13, 9, 18)
    asked = lsim.SkipEffect(keep_first=keep_first, splits=splits)
    found = lsim.analyze(model, rows, asked)["skip_effect"]
    for name, expected in naive(model, rows, keep_first, splits).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=2e-4, atol=2e-5, err_msg=name)
    assert found.values[0].nan_to_num(0).max() > 0.01
    alone = lsim.analyze(model, lsim.Data(rows, batch_size=1), asked)["skip_effect"]
    assert worst(found, alone) < 1e-5


def test_half_precision():
    model, rows = tiny_llama(dtype=torch.bfloat16), rows_of(16)
    found = lsim.analyze(model, rows, lsim.SkipEffect())["skip_effect"]
    expected = naive(model, rows, 1, 1)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(found, name), expected[name], rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(found.probability_change, expected["probability_change"], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("keep_first", [0, 1, 4])
def test_views_equal_the_oracle(keep_first, splits):
    # A row that is too short for the second variant, and one that is not measured at all with keep_first=4.
    data = [residuals(i, tokens=n) for i, n in enumerate((17, 5, 3))]
    found = from_views(lsim.SkipEffect(keep_first=keep_first, splits=splits), [view(x) for x in data])
    for name, expected in oracles.oracle_skip_effect(data, keep_first, splits).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert bool(found.later.isnan().all()) == (splits == 0)


def test_tokens_that_are_not_counted_are_skipped_and_not_measured():
    model, rows = tiny_llama(), rows_of(20)
    found = lsim.analyze(model, lsim.Data(rows, skip_first=15), lsim.SkipEffect(splits=0))["skip_effect"]
    own, p = skipped_run(model, rows[0], None, 0, 0)
    other, q = skipped_run(model, rows[0], 1, 1, 20)
    change = ((own - other).norm(dim=-1) / own.norm(dim=-1))[2, 15:]
    torch.testing.assert_close(found.values[1, 2], change.mean(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.probability_change[1], (p - q).norm(dim=-1)[15:].mean(), rtol=1e-4, atol=1e-7)


def test_one_block_has_an_effect_on_the_output_alone():
    model, rows = tiny_llama(layers=1), rows_of(12)
    found = lsim.analyze(model, rows, lsim.SkipEffect())["skip_effect"]
    assert found.values.shape == (1, 1)
    assert bool(found.values.isnan().all() & found.later.isnan().all())
    expected = naive(model, rows, 1, 1)
    np.testing.assert_allclose(found.probability_change, expected["probability_change"], rtol=1e-4)
    assert list(found.headline().values()) == [float(found.probability_change.mean())]


def test_a_row_of_one_token():
    with pytest.raises(LayersimError, match="`keep_first`"):
        lsim.analyze(tiny_llama(), rows_of(1), lsim.SkipEffect())
    found = lsim.analyze(tiny_llama(), rows_of(1), lsim.SkipEffect(keep_first=0))["skip_effect"]
    np.testing.assert_allclose(found.values, naive(tiny_llama(), rows_of(1), 0, 0)["values"], rtol=1e-4)
    assert bool(found.later.isnan().all())


def test_a_block_that_adds_nothing_is_omitted_with_a_warning():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    with pytest.warns(LayersimWarning, match=r"blocks\.2\.hook_resid_post at 19 of 19 tokens"):
        found = lsim.analyze(model, rows_of(20), lsim.SkipEffect())["skip_effect"]
    assert bool(found.values[:2, 2].isnan().all())
    assert bool(found.values[0, 1].isfinite())
    # Its output is its input anyway.
    assert float(found.probability_change[2]) < 1e-6


def test_the_memory_for_logits_changes_no_number():
    model, rows = tiny_llama(), rows_of(20, 9)
    few, many = (lsim.analyze(model, rows, lsim.SkipEffect(lens_memory_mb=mb))["skip_effect"] for mb in (1e-6, 128))
    for field in OUTPUTS:
        torch.testing.assert_close(getattr(few, field), getattr(many, field), rtol=1e-5, atol=1e-7, equal_nan=True)


def test_a_block_on_which_nothing_depends():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    found = lsim.analyze(model, rows_of(20), lsim.SkipEffect())["skip_effect"]
    assert float(found.values[0, 1:].max()) < 1e-5


def test_a_model_without_a_head_has_no_output_probabilities():
    whole, rows = tiny_llama(), rows_of(14)
    found = lsim.analyze(whole.model, rows, lsim.SkipEffect())["skip_effect"]
    with_head = lsim.analyze(whole, rows, lsim.SkipEffect())["skip_effect"]
    torch.testing.assert_close(found.values, with_head.values, equal_nan=True)
    assert bool(found.probability_change.isnan().all() & with_head.probability_change.isfinite().all())


def test_a_classifier_is_compared_at_the_position_that_its_head_reads():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=100, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    model, rows = LlamaForSequenceClassification(config).eval(), rows_of(14, 8)
    found = lsim.analyze(model, rows, lsim.SkipEffect(splits=0))["skip_effect"]
    change = []
    for row in rows:
        with torch.no_grad():
            own = model(row[None]).logits[0].double().softmax(-1)
            handle = model.model.layers[1].register_forward_hook(
                lambda _m, args, out: torch.cat([out[:, :1], args[0][:, 1:]], 1)
            )
            other = model(row[None]).logits[0].double().softmax(-1)
            handle.remove()
        change.append((own - other).norm())
    torch.testing.assert_close(found.probability_change[1], torch.stack(change).mean(), rtol=1e-4, atol=1e-7)


def test_blocks_that_give_another_output_when_called_again_are_refused():
    x = residuals(0)
    calls = list(own_calls(torch.as_tensor(x)))
    calls[1] = replace(calls[1], block=lambda hidden, block=calls[1].block: block(hidden) + 0.1)
    with pytest.raises(LayersimError, match=r"blocks\.1\.hook_resid_post.*model\.eval"):
        from_views(lsim.SkipEffect(), [view(x, calls=tuple(calls))])


def test_what_is_refused():
    tokens = random_tokens(2, 10)
    with pytest.raises(LayersimError, match="no residual branch"):
        lsim.analyze(family("bert"), tokens, lsim.SkipEffect())
    with pytest.raises(LayersimError, match="every block"):
        lsim.analyze(lsim.open_model(tiny_llama(), layers=["model.layers.0", "model.layers.2"]), tokens, lsim.SkipEffect())


def test_numbers_that_overflow_are_refused():
    x = residuals(0)
    calls = list(own_calls(torch.as_tensor(x)))

    def overflowing(hidden, call=calls[2]):
        return call.block(hidden) + (0.0 if torch.equal(hidden, call.hidden) else torch.inf)

    calls[2] = replace(calls[2], block=overflowing)
    with pytest.raises(LayersimError, match=r"NaN.*blocks\.0\.hook_resid_post"):
        from_views(lsim.SkipEffect(), [view(x, calls=tuple(calls))])


def test_tables_and_figures_name_blocks():
    found = from_views(lsim.SkipEffect(), [view(residuals(0))])
    table = found.to_frame()
    assert list(table.columns) == ["skipped", "affected", *FIELDS]
    assert list(table["affected"].cat.categories) == list(layer_names(3)[1:])
    figure = found.plot()
    assert figure.layout.xaxis.title.text == "Affected block"
    assert figure.layout.yaxis.title.text == "Skipped block"
    assert found.plot("probability_change").layout.xaxis.title.text == "Skipped block"
    assert set(OUTPUTS) | set(FIELDS) == set(found.tensor_fields())
    halves = found.headline()
    assert halves["relative change, first half skipped"] == pytest.approx(float(found.values[:1].nanmean()))
    assert halves["relative change, second half skipped"] == pytest.approx(float(found.values[1:].nanmean()))


class Wrapped(torch.nn.Module):
    """A language model inside a module without a configuration, so that its cache cannot be turned off."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids):
        return self.inner(input_ids).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_blocks_that_fill_a_cache_are_replayed_without_it(attention):
    model = tiny_llama()
    model.set_attn_implementation(attention)
    tokens = random_tokens(4, 10)
    effect = lsim.SkipEffect(splits=0)
    expected = lsim.analyze(model, tokens, effect)["skip_effect"]
    layers = [f"inner.model.layers.{number}" for number in range(len(blocks_of(model)))]
    wrapped = lsim.open_model(Wrapped(model), layers=layers, unembed=["inner.model.norm", "inner.lm_head"])
    found = lsim.analyze(wrapped, tokens, effect)["skip_effect"]
    np.testing.assert_allclose(found.probability_change, expected.probability_change, rtol=1e-5)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-4, equal_nan=True)


class Added(torch.nn.Module):
    """A block of a norm and a matrix, whose output is added in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.mlp = torch.nn.Linear(16, 16)
        self.in_place = in_place

    def forward(self, x):
        added = torch.tanh(self.mlp(self.norm(x)))
        if not self.in_place:
            return x + added
        x += added
        return x


class OfAdded(torch.nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 16)
        self.layers = torch.nn.ModuleList([Added(in_place) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(16)
        self.lm_head = torch.nn.Linear(16, 100)
        self.double().eval()

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))


def test_blocks_that_add_in_place():
    tokens = random_tokens(4, 10)
    # The second replays the calls that the first has replayed.
    effects = {"first": lsim.SkipEffect(splits=0), "second": lsim.SkipEffect(splits=0)}
    found, expected = (lsim.analyze(OfAdded(in_place), tokens, effects) for in_place in (True, False))
    for name in effects:
        change = expected[name].probability_change
        np.testing.assert_allclose(found[name].probability_change, change, rtol=1e-10)
        assert (change > 0).all()
