"""Modules named with `layers=`: where results say they were measured, and what needs whole blocks."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures import layer_names

from ..models.tiny_models import VOCABULARY, random_tokens, tiny_gpt2, tiny_llama
from ..running.options import called

MLPS = [f"model.layers.{i}.mlp" for i in range(3)]
NEEDS_BLOCKS = {
    "logit lens": lsim.LogitLens,
    "saturation": lsim.Saturation,
    "exit curve": lsim.ExitCurve,
    "trajectory": lsim.Trajectory,
    "coupling": lambda: lsim.BlockCoupling(k=2),
}


class Block(torch.nn.Module):
    def __init__(self, skip: bool = True) -> None:
        super().__init__()
        self.norm, self.linear, self.skip = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) + (x if self.skip else 0)


class Own(torch.nn.Module):
    """An architecture that nobody knows. Its parts are blocks, or what is added to a stream that they do not hand on."""

    def __init__(self, name: str = "part", outside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.name, self.outside = torch.nn.Embedding(VOCABULARY, 16), name, outside
        self.add_module(name, torch.nn.ModuleList([Block(skip=not outside) for _ in range(3)]))
        self.polish, self.lm_head = torch.nn.LayerNorm(16), torch.nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in getattr(self, self.name):
            # In place, as some code does it: the module's own output changes after it was read.
            x = part(x).add_(x) if self.outside else part(x)
        return self.lm_head(self.polish(x))


PARTS = [f"part.{i}" for i in range(3)]
HEAD = {"unembed": ["polish", "lm_head"]}


def wrapped(model: torch.nn.Module):
    nnsight = pytest.importorskip("nnsight")
    return nnsight.NNsight(model)


def naive_cosine(values: list[torch.Tensor]) -> torch.Tensor:
    unit = [torch.nn.functional.normalize(v.double().flatten(0, 1), dim=-1) for v in values]
    return torch.stack([torch.stack([(a * b).sum(-1).mean() for b in unit]) for a in unit])


@pytest.mark.parametrize("wrap", [lambda m: m, wrapped], ids=["module", "nnsight"])
def test_mlps_are_called_by_their_paths_and_no_residual_stream(wrap):
    model = tiny_llama()
    tokens = random_tokens()
    stream: list[torch.Tensor] = []
    mlps = [model.get_submodule(path) for path in MLPS]
    handles = [mlps[0].register_forward_pre_hook(lambda _m, a: stream.append(a[0]))]
    handles += [m.register_forward_hook(lambda _m, _a, o: stream.append(o)) for m in mlps]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    result = lsim.analyze(lsim.open_model(wrap(model), layers=MLPS), tokens, lsim.Cosine(center="none"))["cosine"]

    assert result.layers == ("model.layers.0.mlp.input", *MLPS)
    assert "before the final norm" not in result.provenance.basis
    assert "modules" in result.provenance.basis
    torch.testing.assert_close(result.values, naive_cosine(stream), atol=1e-6, rtol=0)
    # What a block adds, of modules that are no blocks.
    assert result.norm_ratio.isnan().all()

    figure = result.plot()
    assert figure.layout.xaxis.title.text == "After module"
    assert list(figure.layout.xaxis.ticktext) == ["into 0.mlp", "0.mlp", "1.mlp", "2.mlp"]


def attach(model, tokens, layers):
    with lsim.attach(lsim.open_model(model, layers=layers), lsim.Saturation()):
        pass


CALLS = {
    "attach": attach,
    "prediction_grid": lambda m, t, **o: called(lsim.prompts.prediction_grid, m, t[0], **o),
    "trajectory_pca": lambda m, t, **o: called(lsim.prompts.trajectory_pca, m, t[0], **o),
    "block_jacobians": lambda m, t, layers: lsim.prompts.block_jacobians(lsim.open_model(m, layers=layers), t[0]),
    "coupling_matrices": lambda m, t, layers: lsim.prompts.coupling_matrices(lsim.open_model(m, layers=layers), t[0], k=2),
    "EarlyExit": lambda m, t, **o: called(lsim.EarlyExit, m, 0.5, **o),
    "aligned_loss": lambda m, t, **o: called(lsim.training.aligned_loss, m, t, **o),
    "stitch": lambda m, t, layers: lsim.stitch(lsim.open_model(m, layers=layers), m, t, at=(0, 0)),
    "stitch into": lambda m, t, layers: lsim.stitch(m, lsim.open_model(m, layers=layers), t, at=(0, 0)),
    "evaluate_layers": lambda m, t, **o: called(lsim.evaluate_layers, m, m, t, **o),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_needs_blocks_refuses_mlps(call):
    with pytest.raises(lsim.LayersimError, match=r"needs the residual stream.*model\.layers\.0\.mlp"):
        CALLS[call](tiny_llama(), random_tokens(), layers=MLPS)


@pytest.mark.parametrize("name", NEEDS_BLOCKS)
def test_every_analyzer_that_needs_blocks_refuses_mlps_and_some_blocks(name):
    for model in (tiny_llama(), wrapped(tiny_llama())):
        with pytest.raises(lsim.LayersimError, match=r"needs the residual stream.*model\.layers\.0\.mlp"):
            lsim.analyze(lsim.open_model(model, layers=MLPS), random_tokens(), NEEDS_BLOCKS[name]())
    if name in ("saturation", "exit curve", "trajectory"):
        some = lsim.open_model(tiny_gpt2(), layers=["transformer.h.0", "transformer.h.2"])
        with pytest.raises(lsim.LayersimError, match=r"needs every block(.|\n)*blocks\.2\.hook_resid_post"):
            lsim.analyze(some, random_tokens(), NEEDS_BLOCKS[name]())


def test_some_blocks_keep_their_own_numbers():
    model = tiny_gpt2()
    tokens = random_tokens()
    whole = lsim.analyze(model, tokens, [lsim.Cosine(center="none"), lsim.LogitLens(), lsim.Trajectory()])
    some = lsim.analyze(
        lsim.open_model(model, layers=["transformer.h.0", "transformer.h.2"]),
        tokens,
        [lsim.Cosine(center="none"), lsim.LogitLens()],
    )
    names = ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.2.hook_resid_post")

    assert some["cosine"].layers == names

    rows = [whole["cosine"].layers.index(name) for name in names]
    torch.testing.assert_close(some["cosine"].values, whole["cosine"].values[rows][:, rows])
    # Between the two sites stand two blocks, and no ratio of either.
    assert some["cosine"].norm_ratio.isnan().tolist() == [False, True]
    torch.testing.assert_close(some["cosine"].norm_ratio[0], whole["cosine"].norm_ratio[0])
    torch.testing.assert_close(some["logit_lens"].cross_entropy, whole["logit_lens"].cross_entropy[[0, 2]])

    late = lsim.analyze(
        lsim.open_model(model, layers=["transformer.h.1", "transformer.h.2"]),
        tokens,
        [lsim.Cosine(center="none"), lsim.Trajectory()],
    )

    assert late["cosine"].layers == ("blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")
    assert late["cosine"].norm_ratio.isfinite().all()
    torch.testing.assert_close(late["trajectory"].norm[..., -1], whole["trajectory"].norm[..., -1])


def test_blocks_out_of_order_or_twice_are_refused_before_anything_runs():
    model = tiny_llama()
    with pytest.raises(lsim.LayersimError, match=r"`layers`.*'model\.layers\.0'.*'model\.layers\.2'"):
        lsim.analyze(lsim.open_model(model, layers=["model.layers.2", "model.layers.0"]), random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match=r"`layers`.*'model\.layers\.1'"):
        lsim.analyze(lsim.open_model(model, layers=["model.layers.1", "model.layers.1"]), random_tokens(), "cka")


@pytest.mark.parametrize("wrap", [lambda m: m, wrapped], ids=["module", "nnsight"])
def test_blocks_of_an_unknown_architecture_are_known_by_what_they_hand_on(wrap):
    tokens = random_tokens()
    model = Own()
    asked = [lsim.Cosine(center="none"), lsim.LogitLens(), lsim.Trajectory(), lsim.BlockCoupling(k=2)]
    report = called(lsim.analyze, wrap(model), tokens, asked, layers=PARTS, **HEAD)

    assert report["logit_lens"].layers == ("part.0.input", *PARTS)
    assert report["cosine"].norm_ratio.isfinite().all()

    logits = model(tokens)[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits.double(), tokens[:, 1:].flatten())
    torch.testing.assert_close(report["logit_lens"].cross_entropy[-1], expected.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrap", [lambda m: m, wrapped], ids=["module", "nnsight"])
@pytest.mark.parametrize("name", ["saturation", "trajectory", "coupling"])
def test_modules_of_an_unknown_architecture_that_hand_nothing_on_are_refused(wrap, name):
    with pytest.raises(lsim.LayersimError, match="needs the residual stream"):
        called(lsim.analyze, wrap(Own(outside=True)), random_tokens(), NEEDS_BLOCKS[name](), layers=PARTS, **HEAD)
    result = lsim.analyze(lsim.open_model(wrap(Own(outside=True)), layers=PARTS), random_tokens(), "cosine")["cosine"]
    assert result.layers == ("part.0.input", *PARTS)
    assert result.norm_ratio.isnan().all()


def test_a_list_called_layers_that_holds_no_blocks_is_not_taken_for_blocks():
    whole = lsim.analyze(Own("layers"), random_tokens(), "cosine")["cosine"]
    assert whole.layers == layer_names(3)
    with pytest.raises(
        lsim.LayersimError, match=r"layers of Own are not known(.|\n)*layers\.1 does not take the output of the module before"
    ):
        lsim.analyze(Own("layers", outside=True), random_tokens(), "cosine")

    named = lsim.analyze(
        lsim.open_model(Own("layers", outside=True), layers=["layers.0", "layers.1"]), random_tokens(), "cosine"
    )["cosine"]
    assert named.layers == ("layers.0.input", "layers.0", "layers.1")


def test_attach_learns_from_the_first_forward_pass_what_the_modules_hand_on():
    tokens = random_tokens()
    model = Own()
    with lsim.attach(lsim.open_model(model, layers=PARTS), lsim.Trajectory()) as probe:
        model(tokens)
    alone = lsim.analyze(lsim.open_model(Own(), layers=PARTS), tokens, "trajectory")["trajectory"]

    torch.testing.assert_close(probe.results()["trajectory"].values, alone.values)

    broken = Own(outside=True)
    with lsim.attach(lsim.open_model(broken, layers=PARTS), lsim.Trajectory()) as probe:
        broken(tokens)
    with pytest.raises(lsim.LayersimError, match="needs the residual stream"):
        probe.results()

    with lsim.attach(lsim.open_model(broken, layers=PARTS), lsim.Cosine(center="none")) as probe:
        broken(tokens)
    assert probe.results()["cosine"].layers == ("part.0.input", *PARTS)


def test_a_resumed_run_knows_its_modules_too(tmp_path):
    asked = {"layers": PARTS, "checkpoint": tmp_path / "sums"}
    first = called(lsim.analyze, Own(), random_tokens(), "cosine", **asked)["cosine"]
    again = called(lsim.analyze, Own(), random_tokens(), "cosine", **asked)["cosine"]
    assert torch.equal(first.norm_ratio, again.norm_ratio)
    assert again.norm_ratio.isfinite().all()


@pytest.mark.heavy("many runs")
def test_stitching_and_training_of_an_unknown_architecture_look_before_they_start():
    tokens = random_tokens(16)
    good = lsim.stitch(
        lsim.open_model(Own(), layers=PARTS), lsim.open_model(Own(), layers=PARTS), tokens, at=("part.0", 0), adapter="identity"
    )

    assert abs(good.penalty) < 1e-6
    with pytest.raises(lsim.LayersimError, match="Stitching needs the residual stream"):
        lsim.stitch(
            lsim.open_model(Own(outside=True), layers=PARTS),
            lsim.open_model(Own(), layers=PARTS),
            tokens,
            at=(0, 0),
            adapter="identity",
        )
    with pytest.raises(lsim.LayersimError, match="Aligned training needs the residual stream"):
        called(lsim.training.aligned_loss, Own(outside=True), tokens, layers=PARTS, **HEAD)


def test_compare_names_the_modules_of_each_model():
    result = lsim.compare(lsim.open_model(tiny_llama(), layers=MLPS), tiny_llama(seed=1), random_tokens(), lsim.CKA())
    assert result.layers == ("model.layers.0.mlp.input", *MLPS)
    assert result.column_layers == layer_names(3)
