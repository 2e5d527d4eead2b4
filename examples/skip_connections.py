"""Why layers are alike: skip connections outweigh what blocks add (Jiang, Zhou and Zhu 2024, figure 11).

python examples/skip_connections.py
"""

from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
result = lsim.analyze(lsim.demo_model(), data, lsim.Cosine())["cosine"]
result.plot("adjacent").write_html(OUT / "adjacent_cosine.html")
result.plot("norm_ratio").write_html(OUT / "norm_ratio.html")

median = result.quantiles.index(0.5)
print("block  median COS(before, after)  |x| / |f(x)|")
for i, (cosine, ratio) in enumerate(zip(result.adjacent[median], result.norm_ratio, strict=True)):
    print(f"{i:5}  {cosine:25.3f}  {ratio:12.2f}")
