"""Generation from all layers at once: every continuation is that of its layer and its prompt alone."""

from __future__ import annotations

import functools

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit import early_exit
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.early_exit.truncate import truncate

from ..models.tiny_models import VOCABULARY, tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import classifier, deep, naive_generate
from .test_heads import naive_heads, near_heads

TOKENIZER = tiny_tokenizer()
# Of different lengths, so that rows are padded.
PROMPTS = ["w5 w9 w33 w8 w14 w21 w7", "w40", "w17 w3 w29", "w6 w6 w11 w50 w12"]
NEW = 12
# With a nucleus this small the most probable token is always drawn.
GREEDY = 1e-9


def ids_of(prompt):
    """Token ids of a prompt, after the token at which texts begin."""
    return [1, *TOKENIZER(prompt)["input_ids"]]


def written(model, prompts=PROMPTS, top_p=0.95, heads=None, seed=3, new=NEW, **options):
    early = EarlyExit(model, 0.0, at="all", heads=heads)
    return early.generate_from_layers(prompts, max_new_tokens=new, top_p=top_p, seed=seed, tokenizer=TOKENIZER, **options)


def one_layer(model, layer, prompts=PROMPTS, heads=None, seed=3):
    """The same by the public interface, at one layer."""
    last = layer == len(model.model.layers)
    early = EarlyExit(model, 1.0, heads=heads) if last else EarlyExit(model, 0.0, at=(layer - 1,), heads=heads)
    generated = early.generate(prompts, max_new_tokens=NEW, do_sample=True, top_p=0.95, seed=seed, tokenizer=TOKENIZER)
    assert {int(layer) for row in generated.exits for layer in row} == {layer}
    return generated


def in_groups(monkeypatch, model, layers, prompts=PROMPTS):
    """Room for the keys and values of this many layers and no more; returns the number of runs that were made."""
    columns = len(prompts) * (max(len(ids_of(prompt)) for prompt in prompts) + NEW)
    # Keys and values of all blocks, float32; the models are 32 wide.
    size = 2 * model.config.num_hidden_layers * columns * 32 * 4
    monkeypatch.setattr(early_exit, "KEYS_AND_VALUES_BYTES", layers * size)
    runs = []
    generate_rows = early_exit.generate_rows
    monkeypatch.setattr(early_exit, "generate_rows", lambda *args: runs.append(args[1]) or generate_rows(*args))
    return runs


def ending(model, tokens):
    """These tokens end a row."""
    model.generation_config.eos_token_id = list(tokens)
    return model


# Some rows of every layer end before the others, and some do not end.
ENDS = range(10, 20)


@functools.cache
def one_at_a_time(heads):
    """(tokens, texts) by layer."""
    model = ending(deep(), ENDS)
    layer_heads = near_heads(model) if heads else None
    by_layer = [one_layer(model, layer, heads=layer_heads) for layer in range(1, 7)]
    return [([row.tolist() for row in generated.tokens], generated.texts) for generated in by_layer]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("layers", "runs", "heads"), [(1, [1, 2, 3, 4, 5, 6], False), (4, [4, 6], True), (100, [6], False)])
def test_sampled_as_one_layer_at_a_time(monkeypatch, layers, runs, heads):
    model = ending(deep(), ENDS)
    layer_heads = near_heads(model) if heads else None
    groups = in_groups(monkeypatch, model, layers)
    lengths = set()
    by_layer = written(model, heads=layer_heads)

    assert [ends[-1] for ends in groups] == runs
    assert len(by_layer) == 6

    for rows, (tokens, texts) in zip(by_layer, one_at_a_time(heads), strict=True):
        assert [row.tolist() for row, _ in rows] == tokens
        assert tuple(text for _, text in rows) == texts
        lengths |= {len(row) for row, _ in rows}
        assert all(int(row[-1]) in ENDS or len(row) == NEW for row, _ in rows)

    assert NEW in lengths
    assert len(lengths) > 3
    assert len({tuple(rows[0][0].tolist()) for rows in by_layer}) > 3


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("heads", [None, "final", "none"])
def test_greedy_the_naive_way(monkeypatch, heads):
    model = ending(deep(), [EOS := 11])
    layer_heads = None if heads is None else near_heads(model, heads)
    naive = () if layer_heads is None else naive_heads(model, layer_heads)
    in_groups(monkeypatch, model, 4)

    for layer, rows in enumerate(written(model, top_p=GREEDY, heads=layer_heads), 1):
        for prompt, (row, text) in list(zip(PROMPTS, rows, strict=True))[1:3]:
            ids = torch.tensor(ids_of(prompt))
            # No probability is above 1, so the last layer is reached.
            at, threshold = ((0,), 1.0) if layer == 6 else ((layer - 1,), 0.0)
            said, _ = naive_generate(model, ids, NEW, at, "max-prob", threshold, eos=EOS, heads=naive)
            assert row.tolist() == said
            assert text == TOKENIZER.decode(said, skip_special_tokens=True)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_greedy_as_generate_of_a_truncated_model(monkeypatch):
    model = tiny_gpt2()
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    groups = in_groups(monkeypatch, model, 2)
    by_layer = written(model, top_p=GREEDY)

    assert [ends[-1] for ends in groups] == [2, 3]
    for layer, rows in enumerate(by_layer, 1):
        short = truncate(model, layer)
        for prompt, (row, _) in zip(PROMPTS, rows, strict=True):
            ids = torch.tensor([ids_of(prompt)])
            said = short.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
            assert row.tolist() == said.tolist()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_demo_model():
    model = lsim.demo_model()
    prompts = ["Once upon a time", "The dog"]
    early = EarlyExit(model, 0.0, at="all")
    counted = []
    by_layer = early.generate_from_layers(prompts, max_new_tokens=8, top_p=0.9, seed=0, on_tokens=counted.append)

    for layer in (1, 3, 8):
        alone = EarlyExit(model, 0.0, at=(layer - 1,)) if layer < 8 else EarlyExit(model, 1.0)
        said = alone.generate(prompts, max_new_tokens=8, do_sample=True, top_p=0.9, seed=0)
        assert [tokens.tolist() for tokens, _ in by_layer[layer - 1]] == [row.tolist() for row in said.tokens]
        assert tuple(text for _, text in by_layer[layer - 1]) == said.texts
    assert sum(counted) == sum(len(row) for rows in by_layer for row, _ in rows)


class TestEdges:
    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_one_prompt_is_as_beside_others(self):
        model = deep()
        alone = written(model, PROMPTS[:1])
        assert [len(rows) for rows in alone] == [1] * 6
        assert [rows[0][0].tolist() for rows in alone] == [rows[0][0].tolist() for rows in written(model)]

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_one_block_and_one_token(self):
        model = ending(tiny_llama(1), ENDS)
        (rows,) = written(model)
        assert [tokens.tolist() for tokens, _ in rows] == [row.tolist() for row in one_layer(model, 1).tokens]
        assert [[len(row) for row, _ in rows] for rows in written(deep(), new=1)] == [[1] * len(PROMPTS)] * 6

    def test_rows_that_all_end_at_once(self):
        found = written(ending(deep(), range(VOCABULARY)))
        assert [[len(row) for row, _ in rows] for rows in found] == [[1] * len(PROMPTS)] * 6

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_nothing_stays_behind(self):
        model = deep().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        first = written(model)
        other_seed = written(model, seed=4)

        assert [text for rows in first for _, text in rows] != [text for rows in other_seed for _, text in rows]
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "new", "words"),
    [
        (lambda: classifier("llama")[0], NEW, "LlamaForSequenceClassification cannot generate"),
        (lambda: classifier("masked")[0], NEW, "cannot generate"),
        (deep, 64, "`max_new_tokens` is 64"),
    ],
)
def test_what_cannot_be_generated_is_refused(make, new, words):
    with pytest.raises(lsim.LayersimError, match=words):
        written(make(), new=new)


def test_texts_need_a_tokenizer():
    early = EarlyExit(deep(), 0.0, at="all")
    with pytest.raises(lsim.LayersimError, match="tokenizer"):
        early.generate_from_layers(PROMPTS, max_new_tokens=2, top_p=0.9, seed=0)
