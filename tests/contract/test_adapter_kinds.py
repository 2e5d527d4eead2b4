"""The laws of adapters, over every kind that is discovered: a new file in `stitching/adapters/` needs no edit here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial

import nnsight
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnsight.intervention.serialization import dumps

import tl_layersim as lsim
from tl_layersim.core import Sums
from tl_layersim.stitching import adapters
from tl_layersim.stitching.adapters import ADAPTER_KINDS
from tl_layersim.stitching.fitting import cross_moments, feature_moments, solve

from ..models.tiny_models import tiny_gpt2, tiny_llama
from ..stitching.helpers import gpt2_of_kind, rows

KINDS = sorted(ADAPTER_KINDS.all())
WIDTHS = [(6, 6), (6, 4), (4, 6)]
QUICK = lsim.stitching.StitchTraining(steps=4, warmup=1)
each_kind = pytest.mark.parametrize("name", KINDS)


def residuals(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator, dtype=torch.float64) * torch.arange(1, width + 1) + 3


def parameters(name: str, widths: tuple[int, int], seed: int = 1) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A random weight and bias, as far as the kind has them."""
    kind = ADAPTER_KINDS.named(name)()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(widths[1], widths[0], generator=generator, dtype=torch.float64) if kind.has_weight else None
    return weight, torch.randn(widths[1], generator=generator, dtype=torch.float64) if kind.has_bias else None


def moments(name: str, hidden: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    kind = ADAPTER_KINDS.named(name)()
    return feature_moments(kind.features, hidden) | cross_moments(kind.features, kind.adds_residual, hidden, target)


def possible(name: str, widths: tuple[int, int]) -> bool:
    return widths[0] == widths[1] or ADAPTER_KINDS.named(name).has_weight


def wide() -> torch.nn.Module:
    """A model whose residual stream is wider than those of the other tiny models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100)
    return LlamaForCausalLM(config).eval()


@each_kind
def test_it_declares_what_it_is(name):
    cls = ADAPTER_KINDS.all()[name]
    assert cls.name == name
    assert "$" in (cls.__doc__ or ""), "the docstring gives the formula"
    assert cls.has_weight or not cls.has_bias
    assert not any(cls.adds_residual(*widths) for widths in WIDTHS if widths[0] != widths[1])


@each_kind
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_closed_form_reaches_a_planted_map(name, widths):
    kind = ADAPTER_KINDS.named(name)()
    if not possible(name, widths):
        pytest.skip("widths that this kind refuses")
    hidden, (weight, bias) = residuals(300, widths[0]), parameters(name, widths)
    target = lsim.stitching.Adapter(name, weight, bias)(hidden)

    assert target.shape == (300, widths[1])

    if not kind.has_weight:
        return
    fitted_weight, fitted_bias, explained = solve(moments(name, hidden, target), 0.0, kind.has_bias)
    assert (fitted_bias is not None) == kind.has_bias

    fitted = lsim.stitching.Adapter(name, fitted_weight, fitted_bias)
    torch.testing.assert_close(fitted(hidden), target, rtol=1e-9, atol=1e-9)
    assert explained == pytest.approx(1.0, abs=1e-12)


def test_features_of_very_different_sizes_below_one_keep_their_digits():
    # The smallest is a hundred thousandth of the rounding of the largest one's square.
    hidden = residuals(300, 4) * torch.tensor([1.0, 1e-3, 1e-6, 1e-10])
    weight = residuals(4, 4, seed=3) / torch.tensor([1.0, 1e-3, 1e-6, 1e-10])
    fitted, _, explained = solve(moments("linear", hidden, hidden @ weight.T), 0.0, False)
    torch.testing.assert_close(fitted, weight, rtol=1e-8, atol=0)
    assert explained == pytest.approx(1.0, abs=1e-12)


@each_kind
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_map_is_the_formula(name, widths):
    kind = ADAPTER_KINDS.named(name)()
    if not possible(name, widths):
        pytest.skip("widths that this kind refuses")
    hidden, (weight, bias) = residuals(7, widths[0]), parameters(name, widths)
    features = kind.features(hidden).numpy()

    assert features.shape == hidden.shape

    expected = np.zeros((7, widths[1]))
    for token in range(7):
        for row in range(widths[1]):
            for column in range(widths[0]):
                factor = float(row == column) if weight is None else float(weight[row, column])
                expected[token, row] += factor * features[token, column]
            expected[token, row] += 0.0 if bias is None else float(bias[row])
            expected[token, row] += float(hidden[token, row]) if kind.adds_residual(*widths) else 0.0
    mapped = lsim.stitching.Adapter(name, weight, bias)(hidden)

    np.testing.assert_allclose(mapped.numpy(), expected, rtol=1e-12, atol=1e-12)


@each_kind
def test_gradients_reach_weight_bias_and_residual(name):
    kind, hidden, (weight, bias) = ADAPTER_KINDS.named(name)(), residuals(5, 6), parameters(name, (6, 6))
    inputs = [part.requires_grad_() for part in (hidden, weight, bias) if part is not None]
    learnt = len(inputs) - 1
    assert learnt == kind.has_weight + kind.has_bias

    adapter = lsim.stitching.Adapter(name, weight, bias)

    def apply(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(adapter, dict(zip(("weight", "bias"), tensors[1:], strict=False)), tensors[0])

    assert torch.autograd.gradcheck(apply, inputs)
    for gradient in torch.autograd.grad(apply(*inputs).square().sum(), inputs):
        assert gradient.abs().max() > 0


@each_kind
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(40)), cut=st.integers(1, 39))
def test_order_and_grouping_of_tokens_do_not_change_the_moments(name, order, cut):
    hidden = residuals(40, 6)
    target = residuals(40, 6, seed=2)
    total = Sums.of(moments(name, hidden, target))
    shuffled = torch.tensor(order)
    parts = (shuffled[:cut], shuffled[cut:])
    merged = Sums()
    for part in parts:
        merged = merged + Sums.of(moments(name, hidden[part], target[part]))

    for key, value in total.fields.items():
        torch.testing.assert_close(merged[key], value, rtol=1e-11, atol=1e-11)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_residuals(name, dtype):
    hidden = residuals(40, 6).to(dtype)
    target = residuals(40, 6, seed=2).to(dtype)
    for key, value in moments(name, hidden, target).items():
        assert value.dtype == (torch.int64 if key == "count" else torch.float64)
        assert torch.equal(value, moments(name, hidden.double(), target.double())[key])

    weight, bias = (None if part is None else part.float() for part in parameters(name, (6, 6)))
    adapter = lsim.stitching.Adapter(name, weight, bias)
    assert adapter(hidden).dtype == (dtype if weight is None else torch.float32)

    options = {} if weight is None else {"fit": "lstsq"}
    models = (tiny_llama(dtype=dtype), tiny_llama(seed=1))
    data = lsim.Data(rows(60), batch_size=6)
    result = lsim.stitch(*models, data, at=(1, 1), adapter=name, **options)
    full_precision = lsim.stitch(tiny_llama(), models[1], data, at=(1, 1), adapter=name, **options)

    assert result.penalty == pytest.approx(full_precision.penalty, abs=0.05)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_kind
def test_a_stitch_survives_save_and_load_exactly(name, tmp_path):
    options = {"fit": "lstsq+sgd", "training": QUICK} if ADAPTER_KINDS.named(name)().has_weight else {}
    data = lsim.Data(rows(60), batch_size=6)
    result = lsim.stitch(tiny_llama(), tiny_llama(seed=1), data, at=(1, 0), adapter=name, **options)
    loaded = lsim.load(result.save(tmp_path / "stitch.safetensors"))

    for field in result.tensor_fields():
        assert torch.equal(getattr(loaded, field), getattr(result, field)), field
    assert (loaded.kind, loaded.fit, loaded.provenance) == (name, result.fit, result.provenance)
    assert loaded.adapter.digest() == result.adapter.digest()

    if result.adapter.weight is not None:
        # On several threads the last bits of a product depend on the order in memory.
        assert loaded.adapter.weight.stride() == result.adapter.weight.stride()
    hidden = residuals(5, 32).float()

    assert torch.equal(loaded.adapter(hidden), result.adapter(hidden))

    again = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(60)[48:], at=(1, 0), adapter=loaded.adapter)
    with torch.no_grad():
        assert torch.equal(again.model(rows(2)).logits, result.model(rows(2)).logits)


@pytest.mark.light("affine-norm", "identity")
@each_kind
def test_widths_that_differ_are_refused_or_work(name):
    kind = ADAPTER_KINDS.named(name)()
    options = {"fit": "lstsq"} if kind.has_weight else {}
    data = lsim.Data(rows(60), batch_size=6)
    call = partial(lsim.stitch, wide(), tiny_llama(), data, at=(0, 1), adapter=name, **options)
    if not kind.has_weight:
        with pytest.raises(lsim.LayersimError, match=f"`adapter`.*{name}"):
            call()
        return
    result = call()

    assert result.weight.shape == (32, 48)
    assert np.isfinite(result.penalty)


@pytest.mark.heavy("a process of its own")
def test_moments_are_computed_where_this_package_is_not_installed(tmp_path):
    hidden = residuals(20, 6)
    target = residuals(20, 6, seed=2)
    nnsight.register("tl_layersim")
    kinds = {name: ADAPTER_KINDS.named(name)() for name in KINDS}
    functions = {name: partial(cross_moments, kind.features, kind.adds_residual) for name, kind in kinds.items()}
    for name, function in functions.items():
        (tmp_path / name).write_bytes(dumps((function, hidden, target)))
    script = (
        "import sys, pathlib\n"
        "for name in ('tl_layersim', 'jaxtyping', 'beartype'): sys.modules[name] = None\n"
        "from nnsight.intervention.serialization import loads\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    moments_of, hidden, target = loads(path.read_bytes())\n"
        "    print(path.name, {key: float(value.sum()) for key, value in moments_of(hidden, target).items()})\n"
    )
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)

    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        f"{name} { {key: float(value.sum()) for key, value in functions[name](hidden, target).items()} }" for name in KINDS
    ]


@pytest.mark.parametrize("name", ["twisted", "Affine", ""])
def test_an_unknown_name_is_refused_with_all_kinds(name):
    with pytest.raises(lsim.LayersimError, match="`kind`") as refused:
        lsim.stitching.Adapter(name)
    assert all(kind in str(refused.value) for kind in KINDS)
    with pytest.raises(lsim.LayersimError, match="`adapter`"):
        lsim.stitch(tiny_llama(), tiny_llama(), rows(), at=(0, 0), adapter=name)
    with pytest.raises(lsim.LayersimError, match="`adapter`"):
        lsim.stitch_grid({"a": tiny_llama()}, rows(), adapter=name)


NEW_KIND = '''
"""Linear adapters of the residual divided by its root mean square."""

from torch import Tensor

from . import AdapterKind


class LinearRMS(AdapterKind):
    """$y = W h / \\\\mathrm{rms}(h)$."""

    name = "linear-rms"
    has_bias = False

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden / hidden.square().mean(-1, keepdim=True).sqrt()
'''


class TestOneNewFile:
    @pytest.fixture
    def new(self, tmp_path, monkeypatch):
        """The name of a kind whose only trace is one file in a folder of the package's path."""
        (tmp_path / "linear_rms.py").write_text(NEW_KIND)
        monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        yield "linear-rms"
        sys.modules.pop(f"{adapters.__name__}.linear_rms", None)
        vars(adapters).pop("linear_rms", None)

    def test_is_discovered(self, new):
        assert sorted(ADAPTER_KINDS.all()) == sorted([*KINDS, new])

    @pytest.mark.heavy("a training")
    def test_is_stitched_saved_and_loaded(self, new, tmp_path):
        models = (tiny_gpt2(0), tiny_gpt2(1))
        data = lsim.Data(rows(60), batch_size=6)
        at = (1, 0)
        result = lsim.stitch(*models, data, at=at, adapter=new, fit="lstsq+sgd", training=QUICK)

        assert (result.kind, result.adapter.bias) == (new, None)

        hidden = residuals(4, 32).float()
        by_hand = (hidden / hidden.square().mean(-1, keepdim=True).sqrt()) @ result.adapter.weight.T
        torch.testing.assert_close(result.adapter(hidden), by_hand)

        loaded = lsim.load(result.save(tmp_path / "stitch.safetensors"))
        again = lsim.stitch(*models, data.like(rows(60)[48:]), at=at, adapter=loaded.adapter)
        assert again.loss == pytest.approx(result.loss, abs=1e-6)

        grid = lsim.stitch_grid({"a": tiny_gpt2(0), "b": tiny_gpt2(1)}, rows(60), layers=[0], adapter=new, fit="lstsq")
        assert grid.kind == new

    @pytest.mark.heavy("a simulated server")
    def test_is_fitted_beside_a_model_in_nnsights_simulation_of_a_server(self, new):
        options = {"at": (1, 0), "adapter": new, "fit": "lstsq"}
        data = lsim.Data(rows(60), batch_size=6)
        far = lsim.open_model(gpt2_of_kind("nnsight", 1), remote="local")
        here = lsim.stitch(tiny_gpt2(0), tiny_gpt2(1), data, **options)
        there = lsim.stitch(tiny_gpt2(0), far, data, **options)

        assert there.loss == pytest.approx(here.loss, abs=1e-6)

    def test_is_unknown_without_its_file(self):
        with pytest.raises(lsim.LayersimError, match=r"`kind`.*linear-rms"):
            lsim.stitching.Adapter("linear-rms", torch.eye(2))
