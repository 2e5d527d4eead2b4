"""From which layer on the model knows its answer (Jiang, Zhou and Zhu 2024, figures 3 and 6).

python examples/saturation.py
"""

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
found = lsim.analyze(lsim.demo_model(), data, lsim.Saturation())["saturation"]

# The figure: events as bars, and how near their residual is to the last layer's as a line.
figure = make_subplots(specs=[[{"secondary_y": True}]])
figure.add_trace(go.Bar(y=found.counts, name="saturation events"))
figure.add_trace(go.Scatter(y=found.cosine_to_last, name="cosine to the last layer"), secondary_y=True)
figure.update_layout(title="Saturation events by block", xaxis_title="block").write_html(OUT / "saturation.html")

print(found.to_frame())
print(f"{float(found.early_share):.1%} of tokens have their final answer before the last block")
print(f"correlation with the cosine to the last layer: {float(found.correlation):.2f}")
