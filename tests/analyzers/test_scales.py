"""Measures that do not depend on the scale of activations, at scales near both ends of float32."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

LABELS = torch.randint(0, 3, (24, 8), generator=torch.Generator().manual_seed(1))
MEASURES = {
    "cka": lsim.CKA(minibatch=32),
    "mean of ratios": lsim.CKA(minibatch=32, average="cka"),
    "exact cka": lsim.CKA(estimator="exact"),
    "biased cka": lsim.CKA(minibatch=32, estimator="biased"),
    "null of cka": lsim.CKA(minibatch=32, permutations=19),
    "rsa": lsim.RSA(minibatch=32),
    "cosine": lsim.Cosine(),
    "procrustes": lsim.Procrustes(),
    "cca": lsim.CCA(),
    "mutual knn": lsim.MutualKNN(minibatch=32),
    "predictivity": lsim.LinearPredictivity(),
    "rank": lsim.EffectiveRank(),
    "collapse": lsim.NeuralCollapse(labels=LABELS),
}


class Block(torch.nn.Module):
    """A block that is homogeneous and not linear: a scaled input gives a scaled output."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return x + self.linear(x).abs()


class Scaled(torch.nn.Module):
    def __init__(self, scale: float, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(9)
        self.embed = torch.nn.Embedding(1000, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        with torch.no_grad():
            self.embed.weight.mul_(scale)
        self.to(dtype)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


def measured(names: list[str], scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Values of measures, by name; of several measures in one run."""
    tokens = torch.randint(3, 1000, (24, 8), generator=torch.Generator().manual_seed(0))
    model = lsim.open_model(Scaled(scale, dtype).eval(), layers=[f"blocks.{i}" for i in range(3)])
    results = lsim.analyze(model, tokens, {name.replace(" ", "_"): MEASURES[name] for name in names})
    return {name: results[name.replace(" ", "_")].values for name in names}


def check_scales(names: list[str], powers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Powers of two scale activations without rounding."""
    plain = measured(names, 1.0, dtype)
    for power in powers:
        scaled = measured(names, 2.0**power, dtype)
        for name in names:
            assert not bool(plain[name].isnan().all())
            assert torch.allclose(scaled[name], plain[name], atol=1e-6, equal_nan=True), (name, power)


FAR = (-100, 100)
NEAR = (-63, -33, 33, 63)
warned = pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")


@warned
@pytest.mark.parametrize(
    ("names", "powers", "dtype"),
    [
        (["cka", "cosine"], FAR, torch.float32),
        (["rank"], NEAR, torch.float32),
        (["predictivity"], NEAR, torch.bfloat16),
    ],
)
def test_a_scale_changes_nothing(names, powers, dtype):
    check_scales(names, powers, dtype)


@pytest.mark.heavy("all measures")
@warned
@pytest.mark.parametrize("powers", [FAR, NEAR], ids=["far", "near"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_changes_no_measure(dtype, powers):
    check_scales(list(MEASURES), powers, dtype)
