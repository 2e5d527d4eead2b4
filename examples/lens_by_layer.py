"""What each layer would say, with and without the final norm (Jiang, Zhou and Zhu 2024, figures 2 a-b and 9).

python examples/lens_by_layer.py
"""

from pathlib import Path

import plotly.graph_objects as go

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
found = {}
for norm in ("final", "none"):
    analyzer = lsim.LogitLens(norm=norm)
    found[norm] = lsim.analyze(lsim.demo_model(), data, analyzer)["logit_lens"]
found["final"].plot().write_html(OUT / "lens_cross_entropy.html")
accuracy = go.Figure()
for norm, lens in found.items():
    accuracy.add_scatter(y=lens.accuracy, name=f'norm="{norm}"')
accuracy.update_layout(title="Accuracy of each layer's prediction", xaxis_title="block").write_html(OUT / "lens_accuracy.html")

lens, bare = found["final"], found["none"]
print(f"{lens.targets} next tokens; the lens is {lens.unembedding}")
print("block  loss   without norm  accuracy  agreement  KL to last")
for i in range(len(lens.values)):
    print(
        f"{i:5}  {lens.cross_entropy[i]:5.2f}  {bare.cross_entropy[i]:12.2f}  {lens.accuracy[i]:8.3f}  "
        f"{lens.agreement[i]:9.3f}  {lens.kl_to_final[i]:10.3f}"
    )
print(f"p(target) rises at every block for {float(lens.monotone_share):.1%} of them (theorem 2.2)")
print(f"effective depth for an accuracy of 25 %: {lens.effective_depth(0.75)} blocks (definition 3.1)")
