"""What early exit would emit and save, by threshold (Jiang, Zhou and Zhu 2024, figure 7 and section 3).

python examples/early_exit.py
"""

from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
curve = lsim.analyze(lsim.demo_model(), data, lsim.ExitCurve())["exit_curve"]
curve.plot("exits").write_html(OUT / "exits.html")
curve.plot("speedup").write_html(OUT / "exit_speedup.html")

print("threshold  exit early  accuracy  agreement  perplexity  blocks saved as speed-up")
for threshold in (0.0, 0.5, 0.9, 0.99, 1.0):
    at = curve.at(threshold)
    early = float(at.exits[:-1].sum() / at.exits.sum())
    print(f"{threshold:9}  {early:10.1%}  {at.accuracy:8.3f}  {at.agreement:9.3f}  {at.perplexity:10.1f}  {at.speedup:.2f}")
best = curve.threshold_for(agreement=0.95)
point = curve.at(best, held_out=True)
print(
    f"threshold {best:g}, on rows that did not choose it: {point.agreement:.1%} agreement, {point.speedup:.2f} times the speed"
)
