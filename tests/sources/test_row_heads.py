"""Which positions a classifier of whole rows reads: found by watching its forward pass, whatever its modules are called."""

from __future__ import annotations

import pytest
import torch
from nnsight import NNsight
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Wav2Vec2Config, Wav2Vec2ForSequenceClassification

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Pool
from tl_layersim.sources.row_heads import _pooling

ROWS, POSITIONS, WIDTH, CLASSES = 6, 7, 8, 3
TOKENS = torch.randint(0, 50, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(ROWS) % CLASSES
POOLINGS = {
    "first": lambda states: states[:, 0],
    "last": lambda states: states[:, -1],
    "mean": lambda states: states.mean(1),
    "mean after one": lambda states: states[:, 1:].mean(1),
    "max": lambda states: states.amax(1),
}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return states + torch.tanh(self.mix(states + states.mean(1, keepdim=True)))


class RowClassifier(torch.nn.Module):
    """A classifier whose last module has a name that says nothing about its pooling."""

    def __init__(self, pooling: str, name: str, pools_before_norm: bool = False, projector: torch.nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(50, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        torch.nn.init.normal_(self.norm.weight)
        self.projector = projector or torch.nn.Identity()
        self.add_module(name, torch.nn.Linear(WIDTH, CLASSES))
        self.pooling = pooling
        self.head_name = name
        self.pools_before_norm = pools_before_norm

    def tail(self, states: Tensor) -> Tensor:
        pool = POOLINGS[self.pooling]
        if self.pools_before_norm:
            states = pool(states)
        states = self.projector(self.norm(states))
        if not self.pools_before_norm:
            states = pool(states)
        return self.get_submodule(self.head_name)(states)

    def states(self, tokens: Tensor) -> list[Tensor]:
        states = [self.embed_tokens(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tail(self.states(tokens)[-1])


def norms_by_hand(model: RowClassifier, positions: slice) -> Tensor:
    with torch.no_grad():
        return torch.stack([states[:, positions].double().norm(dim=-1).mean() for states in model.states(TOKENS)])


@pytest.mark.parametrize("open_with", [lambda model: model, NNsight], ids=["module", "NNsight"])
@pytest.mark.parametrize("name", ["classifier", "score"])
@pytest.mark.parametrize(
    ("pooling", "positions"),
    [
        ("first", slice(0, 1)),
        ("last", slice(-1, None)),
        ("mean", slice(None)),
        ("mean after one", slice(None)),
        ("max", slice(None)),
    ],
)
def test_the_stream_is_read_where_the_head_reads_it(pooling, positions, name, open_with):
    model = RowClassifier(pooling, name)
    norm = lsim.analyze(open_with(model), TOKENS, lsim.Trajectory())["trajectory"].norm
    torch.testing.assert_close(norm, norms_by_hand(model, positions), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("projects", [False, True], ids=["", "projector"])
@pytest.mark.parametrize("before_norm", [False, True], ids=["norm-pool", "pool-norm"])
@pytest.mark.parametrize("pooling", ["first", "last", "mean", "mean after one"])
def test_the_lens_of_a_row_is_the_rest_of_the_forward_pass(pooling, before_norm, projects):
    torch.manual_seed(1)
    projector = torch.nn.Linear(WIDTH, WIDTH) if projects else None
    model = RowClassifier(pooling, "classifier", before_norm, projector)
    data = {"tokens": TOKENS, "label": LABELS}
    result = lsim.analyze(model, data, lsim.LogitLens(labels="data"))["logit_lens"]
    with torch.no_grad():
        logits = [model.tail(states).double() for states in model.states(TOKENS)[1:]]
    expected = torch.stack([torch.nn.functional.cross_entropy(layer, LABELS) for layer in logits])
    torch.testing.assert_close(result.cross_entropy, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "projector"), [("max", None), ("mean", torch.nn.Tanh())], ids=["largest", "mean after an activation"]
)
def test_a_lens_of_another_pooling_is_refused(pooling, projector):
    data = {"tokens": TOKENS, "label": LABELS}
    with pytest.raises(lsim.LayersimError, match="classifier"):
        lsim.analyze(RowClassifier(pooling, "classifier", projector=projector), data, lsim.LogitLens(labels="data"))


def test_means_that_agree_up_to_the_rounding_of_half_precision_are_told_apart():
    """States with a common direction, as in trained models: one token more or less hardly changes their mean."""
    torch.manual_seed(0)
    states = (torch.randn(1, 197, 64) + 3 * torch.randn(64)).bfloat16()
    for start in (0, 1):
        vector = states[:, start:].mean(1)
        assert _pooling(states, vector, torch.bfloat16) == Pool(mean_from=start)


def test_a_head_that_reads_one_position_is_kept_where_one_vector_is_all_it_reads():
    """The rest of the forward pass gives the logits of any one vector too, but would take it for a model of tokens."""
    report = lsim.analyze(
        RowClassifier("last", "classifier"), {"tokens": TOKENS, "label": LABELS}, lsim.NeuralCollapse(labels="data")
    )
    assert report["neural_collapse"].nc1.isfinite().all()


def test_blocks_before_the_last_one_are_read_where_the_head_reads():
    """Behind them come other blocks, which are no part of a head."""
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, num_labels=CLASSES
    )
    model = BertForSequenceClassification(config).eval()
    # No padding ids.
    tokens = TOKENS + 1
    lower = lsim.open_model(model, layers=["bert.encoder.layer.0", "bert.encoder.layer.1"])
    norm = lsim.analyze(lower, tokens, lsim.Trajectory())["trajectory"].norm
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states[:3]
    expected = torch.stack([layer[:, 0].double().norm(dim=-1).mean() for layer in states])
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)


def test_a_classifier_of_speech_reads_the_mean_of_its_frames():
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_kernel=(3, 3),
        conv_stride=(2, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=CLASSES,
    )
    model = Wav2Vec2ForSequenceClassification(config).eval()
    waves = torch.randn(ROWS, 200)
    result = lsim.analyze(model, {"input_values": waves, "label": LABELS}, lsim.LogitLens(labels="data"))["logit_lens"]
    with torch.no_grad():
        states = model(waves, output_hidden_states=True).hidden_states[1:]
        logits = [model.classifier(model.projector(layer).mean(1)).double() for layer in states]
    expected = torch.stack([torch.nn.functional.cross_entropy(layer, LABELS) for layer in logits])
    torch.testing.assert_close(result.cross_entropy, expected, rtol=1e-5, atol=1e-5)
