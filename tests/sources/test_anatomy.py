"""The anatomy of a model: what a watched forward pass shows, against the modules' own formulas."""

from __future__ import annotations

import nnsight
import pytest
import torch

import tl_layersim as lsim
from tests.architectures.causal_families import causal_model
from tl_layersim.sources.open_local import open_local

TOKENS = torch.randint(5, 97, (3, 9), generator=torch.Generator().manual_seed(0))


class Sublayers(torch.nn.Module):
    """A block of two matrices, whose additions a test chooses."""

    def __init__(self, width: int, add) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = Shift(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
        self.add = add

    def forward(self, x):
        return self.add(self, x)


class Shift(torch.nn.Linear):
    """A sublayer that mixes positions: each reads the one before."""

    def forward(self, x):
        return super().forward(x.roll(1, dims=1))


class Stack(torch.nn.Module):
    """A language model of such blocks."""

    def __init__(self, add) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(97, 16)
        self.layers = torch.nn.ModuleList([Sublayers(16, add) for _ in range(3)])
        self.final = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 97, bias=False)
        self.eval()

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.layers:
            x = block(x)
        return self.head(self.final(x))


def sequential(block, x):
    x = x + 0.22 * block.attention(block.norm(x))
    return x + 0.22 * block.mlp(x)


def parallel(block, x):
    y = block.norm(x)
    return x + block.attention(y) + block.mlp(y)


def post_norm(block, x):
    x = block.norm(x + block.attention(x))
    return block.norm(x + block.mlp(x))


def product(block, x):
    return x * block.mlp(x)


def anatomy_of(model):
    return open_local(model, layers=[f"layers.{number}" for number in range(3)], unembed=["final", "head"]).watched_anatomy


def test_sublayers_have_their_multiplier_and_the_stream_to_which_they_are_added():
    for block in anatomy_of(Stack(sequential)).blocks:
        found = [(s.family, s.path, round(s.multiplier, 6)) for s in block.sublayers]
        assert found == [("attn_out", "attention", 0.22), ("mlp_out", "mlp", 0.22)]
        assert [(s.stream.path, s.stream.incoming) for s in block.sublayers] == [("", True), ("mlp", True)]
        assert (block.norms, block.parallel, block.runs) == ("before", False, 1)
        assert block.gap < 1e-6


def test_parallel_blocks_read_one_stream():
    for block in anatomy_of(Stack(parallel)).blocks:
        assert [s.family for s in block.sublayers] == ["attn_out", "mlp_out"]
        assert block.parallel
        assert "resid_mid" in block.layout.lacks


def test_a_block_that_is_no_sum_has_no_sublayers():
    anatomy = anatomy_of(Stack(product))
    assert all(not block.sums for block in anatomy.blocks)
    assert all("mlp_out" in layout.lacks for layout in anatomy.layouts.values())


def test_modules_before_and_behind_the_blocks_are_found():
    anatomy = anatomy_of(Stack(sequential))
    assert (anatomy.embedding, anatomy.final_norm, anatomy.tail) == ("words", "final", ("final", "head"))
    assert anatomy.shape == (1, 8, 16)


@pytest.mark.parametrize(
    ("family", "names", "multiplier"),
    [
        ("granite", ["attn_out", "mlp_out"], 0.22),
        ("gemma3_text", ["attn_out", "mlp_out"], 1.0),
        ("lfm2", ["mixer_out", "mlp_out"], 1.0),
        ("falcon_h1", ["mixer_out", "attn_out", "mlp_out"], 1.0),
        ("camembert", ["attn_out", "mlp_out"], 1.0),
        ("gemma4_text", ["attn_out", "mlp_out", ""], 1.0),
    ],
)
def test_families_of_transformers(family, names, multiplier):
    block = open_local(causal_model(family)).watched_anatomy.blocks[0]
    assert [sublayer.family for sublayer in block.sublayers] == names
    assert {sublayer.multiplier for sublayer in block.sublayers} == {multiplier}


def test_what_is_added_is_read_with_its_multiplier():
    model = causal_model("granite")
    outputs = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda _m, _a, output: outputs.append(0.22 * output))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    expected = outputs[0].double().flatten(0, 1)
    found = lsim.analyze(model, TOKENS, lsim.Cosine(center="none"), at=["blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"])
    assert found["cosine"].layers == ("blocks.1.hook_mlp_out", "blocks.1.hook_resid_post")
    contribution = lsim.analyze(model, TOKENS, lsim.Contribution())["contribution"]
    place = contribution.sublayers.index("blocks.1.hook_mlp_out")
    streams = []
    handle = model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(lambda _m, args: streams.append(args[0]))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    ratio = (expected.norm(dim=-1) / streams[0].double().flatten(0, 1).norm(dim=-1)).mean()
    assert contribution.values[place] == pytest.approx(float(ratio), rel=1e-5)


@pytest.mark.parametrize("family", ["falcon_h1", "modernbert-decoder", "inkling_text", "granite"])
def test_the_lens_gives_the_model_s_own_loss(family):
    model = causal_model(family)
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten())
    found = lsim.analyze(model, TOKENS, lsim.LogitLens())["logit_lens"].cross_entropy[-1]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_give_the_same_anatomy(dtype):
    expected = open_local(causal_model("granite")).watched_anatomy
    found = open_local(causal_model("granite").to(dtype)).watched_anatomy
    assert [block.sublayers for block in found.blocks] == [block.sublayers for block in expected.blocks]


def test_later_blocks_are_no_part_of_a_head():
    model = Stack(sequential)
    model.output = model.head
    del model.head
    model.forward = lambda input_ids: model.output(
        model.final(model.layers[2](model.layers[1](model.layers[0](model.words(input_ids)))))
    )
    lower = lsim.open_model(model, layers=["layers.0", "layers.1"])
    with pytest.raises(lsim.LayersimError, match="layers="):
        lsim.analyze(lower, TOKENS, lsim.LogitLens())
    lens = lsim.analyze(model, TOKENS, lsim.LogitLens())["logit_lens"]
    with torch.no_grad():
        logits = model(TOKENS)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten())
    assert float(lens.cross_entropy[-1]) == pytest.approx(float(expected), rel=1e-5)


class Shifted(Stack):
    """A model whose logits at a position also depend on the position before."""

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.layers:
            x = block(x)
        return self.head(self.final(x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]))


@pytest.mark.parametrize("first", [[7], [7] * 9])
def test_a_first_row_of_one_token_does_not_verify_a_head(first):
    rows = lsim.Data([first, *TOKENS.tolist()], batch_size=1)
    with pytest.raises(lsim.LayersimError, match="differs by"):
        lsim.analyze(lsim.open_model(Shifted(sequential), unembed=["final", "head"]), rows, lsim.LogitLens())
    model = Stack(sequential)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(row[None])[0, :-1].double(), row[1:], reduction="sum")
            for row in (torch.tensor(first), *TOKENS)
        ]
    expected = sum(losses) / (len(first) - 1 + TOKENS.numel() - len(TOKENS))
    found = lsim.analyze(lsim.open_model(model, unembed=["final", "head"]), rows, lsim.LogitLens())["logit_lens"]
    assert float(found.cross_entropy[-1]) == pytest.approx(float(expected), rel=1e-5)


def test_a_norm_inside_the_head_is_not_left_out():
    model = Stack(sequential)
    model.lm_head = torch.nn.Sequential(model.final, model.head)
    del model.final, model.head
    model.forward = lambda input_ids: model.lm_head(model.layers[2](model.layers[1](model.layers[0](model.words(input_ids)))))
    assert lsim.analyze(model, TOKENS, lsim.LogitLens())
    with pytest.raises(lsim.LayersimError, match="`norm` is 'none'"):
        lsim.analyze(model, TOKENS, lsim.LogitLens(norm="none"))


class Fused(Sublayers):
    """A block that returns its last branch and the stream apart."""

    def forward(self, x, stream=None):
        stream = x if stream is None else stream + x
        stream = stream + self.attention(self.norm(stream))
        return self.mlp(self.norm(stream)), stream


class FusedStack(Stack):
    def __init__(self) -> None:
        super().__init__(sequential)
        self.layers = torch.nn.ModuleList([Fused(16, sequential) for _ in range(3)])

    def forward(self, input_ids):
        x, stream = self.words(input_ids), None
        for block in self.layers:
            x, stream = block(x, stream)
        return self.head(self.final(x + stream))


def test_a_branch_is_not_taken_for_the_stream():
    with pytest.raises(lsim.LayersimError, match="Fused returns two tensors"):
        lsim.analyze(FusedStack(), TOKENS, lsim.Cosine())


class Misleading(Sublayers):
    """The MLP is named after what it follows."""

    def __init__(self, width: int, add) -> None:
        super().__init__(width, add)
        self.mix, self.post_attention_ff = self.attention, self.mlp
        del self.attention, self.mlp

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.post_attention_ff(self.norm(x))


def test_the_name_of_a_module_itself_counts_before_what_it_follows():
    model = Stack(sequential)
    model.layers = torch.nn.ModuleList([Misleading(16, sequential) for _ in range(3)])
    for block in anatomy_of(model).blocks:
        assert [(s.family, s.path) for s in block.sublayers] == [("mixer_out", "mix"), ("mlp_out", "post_attention_ff")]


class Multiplied(Stack):
    """A model that multiplies what its head reads and what its head returns."""

    def __init__(self, before: float, behind: float) -> None:
        super().__init__(sequential)
        self.lm_head = self.head
        del self.head
        self.before, self.behind = before, behind

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.layers:
            x = block(x)
        return self.behind * self.lm_head(self.before * self.final(x))


@pytest.mark.parametrize("behind", [1.0, 0.25])
@pytest.mark.parametrize("before", [1.0, 0.5])
def test_multiples_before_and_behind_the_head_are_found(before, behind):
    model = Multiplied(before, behind)
    head = open_local(model).watched_anatomy.head
    assert head.tail is None
    assert head.scale == pytest.approx(before * behind)
    with torch.no_grad():
        logits = model(TOKENS)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten())
    found = lsim.analyze(model, TOKENS, lsim.LogitLens())["logit_lens"].cross_entropy[-1]
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("source", ["attach", "trace"])
def test_every_reader_multiplies_what_is_added(source):
    model = causal_model("granite")
    at = ["blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"]
    expected = lsim.analyze(model, TOKENS, lsim.Cosine(center="none"), at=at)["cosine"].norm_ratio
    if source == "attach":
        with lsim.attach(model, lsim.Cosine(center="none"), at=at) as probe:
            model(TOKENS)
        found = probe.results()["cosine"].norm_ratio
    else:
        traced = lsim.open_model(nnsight.NNsight(model), remote="local")
        found = lsim.analyze(traced, TOKENS, lsim.Cosine(center="none"), at=at)["cosine"].norm_ratio
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
