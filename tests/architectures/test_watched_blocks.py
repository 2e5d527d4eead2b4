"""Blocks that run several times, never or out of order, and blocks that pass on several streams: right or refused."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim

from ..models.own_models import AddingBlock
from ..models.tiny_models import random_tokens, tiny_llama

COSINE = lsim.Cosine(center="none")
PATHS = ["parts.0", "parts.1", "parts.2"]


class Blocks(torch.nn.Module):
    """Three blocks that run in an order."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.words = order, torch.nn.Embedding(100, 16)
        self.parts = torch.nn.ModuleList(AddingBlock(16) for _ in range(3))
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 100)

    def run(self, x):
        for number in self.order:
            x = self.parts[number](x)
        return x

    def forward(self, tokens, attention_mask=None):
        return self.head(self.norm(self.run(self.words(tokens))))


class Stack(Blocks):
    def forward(self, x):
        return self.run(x)


class Outer(torch.nn.Module):
    """Calls a stack of blocks three times, each time on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.stack = torch.nn.Embedding(100, 16), Stack()

    def forward(self, tokens, attention_mask=None):
        x = self.words(tokens)
        for _ in range(3):
            x = self.stack(x)
        return x


class Streams(Blocks):
    """Passes on four copies of the embeddings."""

    def __init__(self, spread) -> None:
        super().__init__()
        self.spread = spread

    def forward(self, tokens, attention_mask=None):
        return self.run(self.spread(self.words(tokens)))


def opened(model, paths=PATHS):
    return lsim.open_model(model.eval(), layers=list(paths))


def looped_llama():
    """A Llama whose stack runs three times, as those of looped models do."""
    model = tiny_llama(3)
    once = model.model.forward

    def looped(input_ids=None, inputs_embeds=None, **options):
        x = model.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for _ in range(3):
            out = once(inputs_embeds=x, **options)
            x = out.last_hidden_state
        return out

    model.model.forward = looped
    return model


LOOPS = {
    "all": ((0, 1, 2, 0, 1, 2), "parts.0"),
    "each": ((0, 0, 1, 1, 2, 2), "parts.0"),
    "one": ((0, 1, 1, 1, 2), "parts.1"),
    "last": ((0, 1, 2, 2), "parts.2"),
}


def shared_block_llama():
    """A Llama that runs block 1 as blocks 1 and 2."""
    model = tiny_llama(3)
    model.model.layers[2] = model.model.layers[1]
    return model


@pytest.mark.parametrize("make", [looped_llama, shared_block_llama])
def test_blocks_that_run_several_times_are_not_trained(make):
    rows = random_tokens(4, 6)
    with pytest.raises(lsim.LayersimError, match=r"layers\.[012]\b"):
        lsim.training.aligned_loss(make(), rows)
    with pytest.raises(lsim.LayersimError, match=r"layers\.[012]\b"):
        lsim.finetune_aligned(make(), rows, lsim.AlignedTraining(steps=1, warmup=0))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_block_that_runs_several_times_is_refused(loop):
    order, path = LOOPS[loop]
    with pytest.raises(lsim.LayersimError, match=rf"{path}\b") as refused:
        lsim.analyze(opened(Blocks(order)), random_tokens(4, 6), COSINE)
    # Naming other blocks would not give the layers of a loop.
    assert "layers=" not in str(refused.value)

    with torch.no_grad(), lsim.attach(opened(Blocks(order)), COSINE) as probe:
        probe._source.module(random_tokens(4, 6))
    with pytest.raises(lsim.LayersimError, match=rf"{path}\b"):
        probe.results()


def test_a_stack_that_is_called_several_times_is_refused():
    paths = [f"stack.{path}" for path in PATHS]
    with pytest.raises(lsim.LayersimError, match=r"stack\.parts\.0"):
        lsim.analyze(opened(Outer(), paths), random_tokens(4, 6), COSINE)

    with torch.no_grad(), lsim.attach(opened(Outer(), paths), COSINE) as probe:
        probe._source.module(random_tokens(4, 6))
    with pytest.raises(lsim.LayersimError, match=r"stack\.parts\.0"):
        probe.results()


@pytest.mark.parametrize("measure", [lsim.LogitLens(), COSINE], ids=["lens", "cosine"])
def test_a_looped_model_of_a_known_layout_is_refused(measure):
    with pytest.raises(lsim.LayersimError, match=r"model\.layers\.0 *.* 3 "):
        lsim.analyze(looped_llama(), random_tokens(4, 6), measure)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: lsim.truncate(model, 2),
        lambda model: lsim.EarlyExit(model, 0.5),
        lambda model: lsim.stitch(model, model, random_tokens(8, 6), at=(0, 0), adapter="identity"),
    ],
    ids=["truncate", "EarlyExit", "stitch"],
)
def test_a_looped_model_is_not_split(call):
    with pytest.raises(lsim.LayersimError, match=r"model\.layers\.0"):
        call(looped_llama())


def test_a_block_that_several_entries_of_the_list_share_is_refused():
    model = tiny_llama(3)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]] * 3)
    with pytest.raises(lsim.LayersimError, match=r"model\.layers\.0"):
        lsim.analyze(model, random_tokens(4, 6), COSINE)


@pytest.mark.parametrize(("order", "path"), [((0, 2), "parts.1"), ((0, 2, 1), "parts.1")])
def test_blocks_that_do_not_run_or_run_in_another_order_are_refused(order, path):
    with pytest.raises(lsim.LayersimError, match=rf"{path}\b"):
        lsim.analyze(opened(Blocks(order)), random_tokens(4, 6), COSINE)


SPREADS = {
    "before the batch": lambda x: torch.stack([x] * 4),
    "before the positions": lambda x: torch.stack([x] * 4, 1),
    "before the width": lambda x: torch.stack([x] * 4, 2),
    "on the axis of the batch": lambda x: x.repeat(4, 1, 1),
    "on the axis of positions": lambda x: x.repeat(1, 4, 1),
    "positions first": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize("shape", [(4, 4), (4, 5), (1, 4)], ids=str)
@pytest.mark.parametrize("spread", SPREADS)
def test_several_streams_are_refused_whatever_their_sizes(spread, shape):
    """Four rows of four tokens have as many rows, tokens and streams."""
    if spread == "positions first" and shape == (1, 4):
        return
    model = Streams(SPREADS[spread])
    tokens = random_tokens(*shape)

    with pytest.raises(lsim.LayersimError, match=r"parts\.0"):
        lsim.analyze(opened(model), lsim.Data(tokens, batch_size=4), lsim.EffectiveRank())


@pytest.mark.parametrize("spread", ["before the batch", "before the positions", "before the width"])
def test_several_streams_are_refused_in_a_loop_of_the_user(spread):
    with torch.no_grad(), lsim.attach(opened(Streams(SPREADS[spread])), COSINE) as probe:
        probe._source.module(random_tokens(4, 4))
    with pytest.raises(lsim.LayersimError, match=r"parts\.0.* 4 x 4 x 4 x 16"):
        probe.results()


def gemma3n():
    config = transformers.Gemma3nTextConfig(
        **{"vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 32, "hidden_size_per_layer_input": 8},
        **{"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"altup_num_inputs": 4, "num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    )
    torch.manual_seed(0)
    return transformers.Gemma3nForCausalLM(config).eval()


@pytest.mark.parametrize("at", ["default", "resid_post"])
def test_the_streams_of_gemma_3n_are_refused(at):
    options = {} if at == "default" else {"at": at}
    with pytest.raises(lsim.LayersimError, match=r"4 x 1 x \d+ x 32"):
        lsim.analyze(gemma3n(), random_tokens(4, 4), COSINE, **options)


def test_modules_beside_the_streams_can_be_read():
    paths = ["model.layers.0.mlp", "model.layers.1.mlp"]
    model = gemma3n()
    tokens = random_tokens(4, 4)
    outputs = []
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda _module, _args, output: outputs.append(output))
    with torch.no_grad():
        model(tokens)
    expected = torch.nn.functional.cosine_similarity(outputs[0].double(), outputs[1].double(), dim=-1).mean()

    result = lsim.analyze(gemma3n(), tokens, COSINE, at=paths)["cosine"]

    assert float(result.values[0, 1]) == pytest.approx(float(expected), abs=1e-6)


def test_a_model_that_pads_to_its_window_is_read_where_rows_fill_windows():
    config = transformers.LongformerConfig(
        **{"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
        **{"max_position_embeddings": 40, "attention_window": [4, 4], "pad_token_id": 1},
    )
    torch.manual_seed(0)
    model = transformers.LongformerModel(config).eval()
    tokens = random_tokens(4, 12).clamp(min=3)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    expected = torch.nn.functional.cosine_similarity(states[0].double(), states[-1].double(), dim=-1).mean()

    assert float(lsim.analyze(model, tokens, COSINE)["cosine"].values[0, -1]) == pytest.approx(float(expected), abs=1e-6)
    with pytest.raises(lsim.LayersimError, match=r"1 x 12 x 32 for one row of 11"):
        lsim.analyze(model, tokens[:, :11], COSINE)


def test_a_constant_number_of_positions_is_not_taken_for_that_of_the_rows():
    class Latents(Blocks):
        def forward(self, tokens, attention_mask=None):
            return self.run(self.words.weight[None, :4] + self.words(tokens).mean(1, keepdim=True))

    with pytest.raises(lsim.LayersimError, match=r"1 x 4 x 16"):
        lsim.analyze(opened(Latents()), random_tokens(4, 4), COSINE)


def test_the_basis_of_blocks_that_end_in_a_norm_is_found_by_a_forward_pass():
    class Normed(AddingBlock):
        def __init__(self) -> None:
            super().__init__(16)
            self.last = torch.nn.LayerNorm(16)

        def forward(self, x):
            return self.last(super().forward(x))

    model = Blocks()
    model.parts = torch.nn.ModuleList(Normed() for _ in range(3))
    assert "post-norm" in lsim.analyze(opened(model), random_tokens(4, 6), COSINE)["cosine"].provenance.basis
    assert "post-norm" not in lsim.analyze(opened(Blocks()), random_tokens(4, 6), COSINE)["cosine"].provenance.basis
    with pytest.raises(lsim.LayersimError, match="Blocks have no residual branch"):
        lsim.analyze(opened(model), random_tokens(4, 6), lsim.BlockCoupling(k=2))
