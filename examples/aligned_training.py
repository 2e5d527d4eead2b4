"""Aligned training and its ablations on the model that ships: what each layer knows of held-out text afterwards.

Standard training, aligned training with linear and with uniform weights, the cosine regulariser, and heads of their own with
and without the KL term (Jiang, Zhou and Zhu 2024, equation 5, figures 14 and 15, appendix C.2): the same budget, the same
data. A few dozen steps of a small model: enough to see which way each of them goes. Writes a figure to examples/out.
"""

from __future__ import annotations

from pathlib import Path

import pandas
import plotly.express as px

import tl_layersim as lsim

STEPS = 40
ARMS = {
    "standard": lsim.AlignedTraining(objective="standard", steps=STEPS, lr=1e-3),
    "aligned, alternating": lsim.AlignedTraining(steps=STEPS, lr=1e-3),
    "aligned, always": lsim.AlignedTraining(schedule="always", steps=STEPS, lr=1e-3),
    "aligned, uniform weights": lsim.AlignedTraining(schedule="always", weights="uniform", steps=STEPS, lr=1e-3),
    "cosine regulariser": lsim.AlignedTraining(objective="cosine-reg", steps=STEPS, lr=1e-3),
    "own heads": lsim.AlignedTraining(objective="multi-head", schedule="always", steps=STEPS, lr=1e-3),
    "own heads and KL": lsim.AlignedTraining(objective="multi-head", schedule="always", kl=1.0, steps=STEPS, lr=1e-3),
}


def main() -> None:
    data = lsim.Data(lsim.demo_text(), batch_size=4, seq_len=64)
    rows = []
    for name, training in ARMS.items():
        model = lsim.demo_model()
        result = lsim.finetune_aligned(model, data, training)
        if not rows:
            rows += [
                {"arm": "before", "block": i, "held-out loss": float(loss)} for i, loss in enumerate(result.held_out_loss[0])
            ]
        rows += [{"arm": name, "block": i, "held-out loss": float(loss)} for i, loss in enumerate(result.held_out_loss[-1])]
    table = pandas.DataFrame(rows)
    print(table.pivot(index="arm", columns="block", values="held-out loss").loc[["before", *ARMS]].round(2).to_string())
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    figure = px.line(table, x="block", y="held-out loss", color="arm", markers=True, title="Held-out loss by block")
    figure.write_html(out / "aligned_training.html", include_plotlyjs=True)
    print(f"Figure: {out / 'aligned_training.html'}")


if __name__ == "__main__":
    main()
