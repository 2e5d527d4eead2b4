"""Rows that padding or other rows of a batch would change: measured as each row alone, whatever the batch size."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.data.batches import Batch
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources.open_local import OpenedModel

from ..models.own_models import TwoBlocks
from ..models.tiny_models import family, random_tokens, tiny_llama

ROWS = [row[:length].tolist() for row, length in zip(random_tokens(8, 12), (11, 7, 9, 3, 12, 8, 11, 4), strict=True)]
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0}
HEADS = SIZES | {"num_attention_heads": 4}
COSINE = lsim.Cosine(center="none")


def to_last(model, rows=ROWS):
    """Mean cosine of each residual layer to the last, from plain hooks on each row alone."""
    opened = OpenedModel.of(model)
    module, paths = opened.model, open_source(model).paths
    seen = [[] for _ in range(len(paths) + 1)]

    def first(value):
        return value if isinstance(value, torch.Tensor) else value[0]

    handles = [
        module.get_submodule(paths[0]).register_forward_pre_hook(
            lambda _m, args, kwargs: seen[0].append(first((*args, *kwargs.values()))), with_kwargs=True
        )
    ]
    for layer, path in enumerate(paths, start=1):
        handles.append(
            module.get_submodule(path).register_forward_hook(
                lambda _m, _args, output, layer=layer: seen[layer].append(first(output))
            )
        )
    with torch.no_grad():
        for row in rows:
            module(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    x = [torch.cat([part[0] for part in parts]).double() for parts in seen]
    return [float(torch.nn.functional.cosine_similarity(one, x[-1], dim=-1).mean()) for one in x]


def measured(model, size, rows=ROWS):
    return lsim.analyze(model, lsim.Data(rows, batch_size=size), COSINE)["cosine"].values[:, -1].tolist()


def own(mix):
    return lsim.open_model(TwoBlocks(mix).eval(), layers=["parts.0", "parts.1"], unembed=["head"])


def encoder(config, kind):
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    return model


# Ways in which padding or other rows reach a row.
MIXES = {
    "a convolution without a mask": lambda x: x + 0.5 * torch.roll(x, -1, 1),
    "a mean over all positions": lambda x: x + x.mean(1, keepdim=True),
    "a norm over all positions": lambda x: (x - x.mean((1, 2), keepdim=True)) / x.std((1, 2), keepdim=True),
    "a mean over the batch": lambda x: x + x.mean((0, 1), keepdim=True),
}
ENCODERS = {
    "FNet": lambda: encoder(transformers.FNetConfig(**SIZES), transformers.FNetModel),
    "Nystromformer": lambda: encoder(transformers.NystromformerConfig(**HEADS), transformers.NystromformerModel),
    "ConvBERT": lambda: encoder(transformers.ConvBertConfig(**HEADS, embedding_size=32), transformers.ConvBertModel),
    "NLLB-MoE": lambda: (
        encoder(
            transformers.NllbMoeConfig(
                **{"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "num_experts": 4},
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
                **{"encoder_sparse_step": 1, "max_position_embeddings": 64},
            ),
            transformers.NllbMoeModel,
        ).encoder
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_that_change_one_another_run_apart(mix, size):
    model = own(MIXES[mix])
    assert measured(model, size) == pytest.approx(to_last(model), abs=1e-6)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_that_mix_padding_into_shorter_rows(name):
    model = ENCODERS[name]()
    assert measured(model, 8) == pytest.approx(to_last(model), abs=1e-6)


def test_rows_of_one_length_run_together(caplog):
    model, sizes = own(MIXES["a mean over all positions"]), []
    model.model.parts[0].register_forward_hook(lambda _m, _args, output: sizes.append(len(output)))
    with caplog.at_level(logging.WARNING, "tl_layersim"):
        measured(model, 8)
    # The row that is watched, the batch, one row beside it and copies of it; then one group for each length.
    assert sizes == [1, 8, 1, 8, 2, 1, 1, 1, 1, 1, 1, 1]
    assert len(caplog.messages) == 1


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "neox", "opt", "bloom", "gemma3", "falcon", "gptj"])
def test_rounding_is_no_change(name, dtype, caplog):
    model = family(name).to(dtype)
    with caplog.at_level(logging.WARNING, "tl_layersim"):
        measured(model, 8)
    assert caplog.messages == []


def test_a_random_model_is_not_run_row_by_row(caplog):
    """Hashes of rows that differ in each forward pass are no effect of other rows."""

    def noise(x):
        return x + 0.1 * torch.randn_like(x)

    with caplog.at_level(logging.WARNING, "tl_layersim"):
        measured(own(noise), 8)
    assert caplog.messages == []


def test_blocks_that_are_called_again_need_rows_that_may_run_together():
    model = own(MIXES["a mean over all positions"])
    with pytest.raises(lsim.LayersimError, match=r"`batch_size`"):
        lsim.analyze(model, lsim.Data(ROWS, batch_size=8), lsim.BlockCoupling(k=2))
    lsim.analyze(model, lsim.Data(ROWS, batch_size=1), lsim.BlockCoupling(k=2))


def test_a_stitch_needs_rows_that_may_run_together():
    model = own(MIXES["a mean over all positions"])
    with pytest.raises(lsim.LayersimError, match=r"`batch_size`"):
        lsim.stitch(model, model, lsim.Data(ROWS, batch_size=8), at=(0, 0), adapter="identity", eval_data=ROWS * 4)


def test_a_batch_of_some_rows_is_cut_to_the_longest_of_them():
    lengths = torch.tensor([5, 2, 3])
    attention = torch.arange(5) < lengths[:, None]
    batch = Batch(torch.arange(15).view(3, 5), attention, attention, 7, origins=((7, 0), (8, 1), (9, 0)))
    some = batch.chosen([2, 1])
    assert batch.lengths.tolist() == [5, 2, 3]
    assert some.tokens.tolist() == [[10, 11, 12], [5, 6, 7]]
    assert some.origins == ((9, 0), (8, 1))


def test_models_of_equal_rows_are_compared_with_a_row_alone_once():
    model, sizes = tiny_llama(), []
    model.model.layers[0].register_forward_hook(lambda _m, _args, output: sizes.append(len(output)))
    measured(model, 4, random_tokens(12, 6).tolist())
    assert sizes == [1, 4, 1, 4, 4]
