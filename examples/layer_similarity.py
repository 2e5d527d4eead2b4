"""Cosine similarity and CKA between all layers of one model (Jiang, Zhou and Zhu 2024, figure 2).

    python examples/layer_similarity.py

Panels a-b of the figure are similarity to the last layer by two measures, panels c-d the heatmap of all pairs.
"""

from pathlib import Path

import plotly.graph_objects as go

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
report = lsim.analyze(lsim.demo_model(), data, [lsim.Cosine(), lsim.CKA()])

report["cosine"].plot().write_html(OUT / "cosine_all_pairs.html")
curves = go.Figure()
for name in ("cosine", "cka"):
    curves.add_scatter(y=report[name].values[:, -1], name=name)
curves.update_layout(title="Similarity to the last layer", xaxis_title="layer (0: embedding)").write_html(OUT / "to_last.html")

print(report["cosine"].to_frame().query("column_layer == 'blocks.7.hook_resid_post'")[["row_layer", "values", "std"]])
print(f"{float(report['cosine'].monotone_share):.1%} of tokens come nearer to the last layer at every block (theorem 2.1)")
print(f"written to {OUT}")
