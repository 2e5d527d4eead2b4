"""The shape of tokens' paths through the layers (Aubry et al. 2025, figures 17, 24 and 25).

python examples/trajectories.py
"""

from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

model = lsim.demo_model()
data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
found = lsim.analyze(model, data, lsim.Trajectory(window=3))["trajectory"]
for field in ("norm_quantiles", "update_norm_quantiles", "growth", "windowed_lss"):
    found.plot(field).write_html(OUT / f"trajectory_{field}.html")
prompt = lsim.Data("Once upon a time there was a little girl who lived in a small house", skip_first=1)
paths = lsim.prompts.trajectory_pca(model, prompt)
paths.plot().write_html(OUT / "trajectory_pca.html")

median = found.quantiles.index(0.5)
print(f"line-shape score {float(found.lss.mean):.2f} +- {float(found.lss.std):.2f}   (1: a straight line)")
print(f"expodistance     {float(found.expodistance.quantiles[median]):.2f} in the median token   (0: exponential growth)")
print(f"equidistance     {float(found.equidistance.mean):.2f}   (0: equal steps)")
print("block    norm after   what it adds   ln growth")
for i in range(len(found.growth)):
    print(f"{i:5}  {found.norm[i + 1]:12.1f}  {found.update_norm[i]:13.1f}  {found.growth[i]:10.2f}")
