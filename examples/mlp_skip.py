"""MLPs of 9 layers with and without skip connections: accuracy, cosine and CKA by layer (Jiang, Zhou and Zhu 2024, figure 12).

python examples/mlp_skip.py [--mnist mnist.npz]

Without a file (`x_train`, `y_train`, `x_test`, `y_test`), scikit-learn's 8 x 8 digits are the data.
"""

import argparse
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)
DEPTH, WIDTH = 9, 128
# The matrices are so small that more threads would only wait for one another.
torch.set_num_threads(1)


class Layer(nn.Module):
    """A linear layer with ReLU, with or without a skip connection."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.linear, self.skip = nn.Linear(WIDTH, WIDTH), skip

    def forward(self, x: Tensor) -> Tensor:
        """Vectors `row feature` to vectors of the same width."""
        change = torch.relu(self.linear(x))
        return x + change if self.skip else change


class MLP(nn.Module):
    """Layers of one width, and a linear classifier after the last."""

    def __init__(self, pixels: int, skip: bool) -> None:
        super().__init__()
        self.first = nn.Linear(pixels, WIDTH)
        self.layers = nn.ModuleList(Layer(skip) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images `row pixel` to logits `row class`."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def digits(path: str | None) -> tuple[str, Tensor, Tensor, Tensor, Tensor]:
    """Name of the data, training images and labels, test images and labels."""
    if path is None:
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x / 16 - 0.3).float(), torch.tensor(y)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        train, test = order[:1300], order[1300:]
        return "scikit-learn's digits (8 x 8 pixels)", x[train], y[train], x[test], y[test]
    found = np.load(path)
    x_train, x_test = (torch.tensor(found[name]).flatten(1).float() / 255 - 0.13 for name in ("x_train", "x_test"))
    y_train, y_test = (torch.tensor(found[name]).long() for name in ("y_train", "y_test"))
    return f"MNIST ({path})", x_train, y_train, x_test, y_test


def trained(x: Tensor, y: Tensor, skip: bool, steps: int, seed: int) -> MLP:
    """An MLP trained on the loss of its last layer."""
    torch.manual_seed(seed)
    model = MLP(x.shape[1], skip)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (128,))
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
    return model


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mnist")
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
data, x_train, y_train, x_test, y_test = digits(options.mnist)

figure = make_subplots(1, 2, subplot_titles=("Without skip connections", "With skip connections"), shared_yaxes=True)
for column, skip in enumerate((False, True), 1):
    model = trained(x_train, y_train, skip, options.steps, options.seed)
    opened = lsim.open_model(model, layers=[f"layers.{i}" for i in range(DEPTH)], unembed=["head"])
    images = lsim.Data({"x": x_test, "labels": y_test}, batch_size=256)
    report = lsim.analyze(opened, images, [lsim.LogitLens(labels="data"), lsim.Cosine(), lsim.CKA()])
    curves = {
        "accuracy": report["logit_lens"].accuracy,
        "COS to the last layer": report["cosine"].values[1:, -1],
        "CKA to the last layer": report["cka"].values[1:, -1],
    }
    print(f"\n{data}, {'with' if skip else 'without'} skip connections\nlayer  " + "  ".join(curves))
    for layer in range(DEPTH):
        print(f"{layer + 1:5}  " + "  ".join(f"{float(curve[layer]):{len(name)}.3f}" for name, curve in curves.items()))
    for (name, curve), colour in zip(curves.items(), ("#1b6ca8", "#d1495b", "#66a182"), strict=True):
        line = go.Scatter(
            x=list(range(1, DEPTH + 1)), y=curve.tolist(), name=name, line_color=colour, legendgroup=name, showlegend=skip
        )
        figure.add_trace(line, row=1, col=column)
figure.update_xaxes(title_text="Layer", dtick=1)
figure.update_yaxes(range=[-0.25, 1.05])
figure.update_layout(title=f"MLP of {DEPTH} layers, {data.split(' (')[0]}", width=900, height=420)
figure.write_html(OUT / "mlp_skip.html")
