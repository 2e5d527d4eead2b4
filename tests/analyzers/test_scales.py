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


def measured(name: str, scale: float, dtype: torch.dtype) -> torch.Tensor:
    tokens = torch.randint(3, 1000, (24, 8), generator=torch.Generator().manual_seed(0))
    model = lsim.open_model(Scaled(scale, dtype).eval(), layers=[f"blocks.{i}" for i in range(3)])
    [result] = lsim.analyze(model, tokens, MEASURES[name]).values()
    return result.values


@pytest.mark.light("far-cka-float32", "far-cosine-float32", "near-predictivity-bfloat16", "near-rank-float32")
@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("powers", [(-100, 100), (-63, -33, 33, 63)], ids=["far", "near"])
def test_a_scale_changes_nothing(name, dtype, powers):
    # Powers of two scale activations without rounding.
    plain = measured(name, 1.0, dtype)
    assert not bool(plain.isnan().all())
    for power in powers:
        assert torch.allclose(measured(name, 2.0**power, dtype), plain, atol=1e-6, equal_nan=True), power
