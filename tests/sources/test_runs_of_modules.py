"""Modules that run several times in a forward pass: each run is a site of its own."""

from __future__ import annotations

import pytest
import torch
from transformers import AlbertConfig, AlbertModel

import tl_layersim as lsim

TOKENS = torch.randint(3, 90, (6, 10), generator=torch.Generator().manual_seed(0))
ALBERT_BLOCK = "encoder.albert_layer_groups.0.albert_layers.0"


class Block(torch.nn.Linear):
    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class Looped(torch.nn.Module):
    """Three blocks that run twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 16)
        self.layers = torch.nn.ModuleList([Block(16, 16) for _ in range(3)])
        self.eval()

    def forward(self, input_ids):
        x = self.words(input_ids)
        for _ in range(2):
            for block in self.layers:
                x = block(x)
        return x


def streams(model: Looped, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream after the embedding and after each run of a block."""
    with torch.no_grad():
        found = [model.words(tokens)]
        for _ in range(2):
            for block in model.layers:
                found.append(block(found[-1]))
    return found


def cosines(stream: list[torch.Tensor]) -> torch.Tensor:
    rows = torch.stack([x.double().flatten(0, 1) for x in stream])
    return torch.cosine_similarity(rows[:, None], rows[None], dim=-1).mean(-1)


EVERY_RUN = [f"blocks.{block}.hook_resid_post[{run}]" for run in range(2) for block in range(3)]


def test_every_run_is_a_site():
    model = Looped()
    at = ["blocks.0.hook_resid_pre[0]", *EVERY_RUN]
    found = lsim.analyze(model, lsim.Data(TOKENS, batch_size=4), lsim.Cosine(center="none"), at=at)["cosine"]
    assert found.layers == tuple(at)
    torch.testing.assert_close(found.values, cosines(streams(model, TOKENS)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("at", [["layers.1[1]", "layers.2.input[1]", "layers.0[0]"]])
def test_runs_are_named_by_paths_too(at):
    model = Looped()
    stream = streams(model, TOKENS)
    found = lsim.analyze(model, TOKENS, lsim.Cosine(center="none"), at=at)["cosine"]
    expected = cosines([stream[5], stream[5], stream[1]])
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-6)


def test_attach_reads_runs_in_every_forward_pass():
    model = Looped()
    expected = lsim.analyze(model, TOKENS, lsim.Cosine(center="none"), at=EVERY_RUN)["cosine"]
    with lsim.attach(model, lsim.Cosine(center="none"), at=EVERY_RUN) as probe:
        for rows in TOKENS.split(2):
            model(rows)
    torch.testing.assert_close(probe.results()["cosine"].values, expected.values, rtol=0, atol=1e-12)


def test_layers_that_share_one_block():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    model = AlbertModel(AlbertConfig(**size, num_hidden_layers=3)).eval()
    at = [f"{ALBERT_BLOCK}[{run}]" for run in range(3)]
    found = lsim.analyze(model, TOKENS, lsim.Cosine(center="none"), at=at)["cosine"]
    with torch.no_grad():
        hidden = model(TOKENS, output_hidden_states=True).hidden_states[1:]
    torch.testing.assert_close(found.values, cosines(list(hidden)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (None, r"2 times.*hook_resid_pre\[0\]"),
        ("blocks.1.hook_resid_post", r"more than once.*`\[0\]`"),
        (["blocks.1.hook_resid_post[0]", "blocks.1.hook_resid_post[2]"], r"resid_post\[2\].* 2 times"),
    ],
)
def test_a_run_that_is_not_named_or_does_not_exist_is_refused(at, says):
    with pytest.raises(lsim.LayersimError, match=says):
        lsim.analyze(Looped(), TOKENS, lsim.Cosine(), **({} if at is None else {"at": at}))


def test_traces_do_not_read_runs():
    nnsight = pytest.importorskip("nnsight")
    model = lsim.open_model(nnsight.NNsight(Looped()), remote="local")
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_post\[0\]"):
        lsim.analyze(model, TOKENS, lsim.Cosine(), at=EVERY_RUN)
