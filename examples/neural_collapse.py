"""How samples of a class gather, layer by layer (Jiang, Zhou and Zhu 2024, figure 16), for the ten most frequent next tokens.

python examples/neural_collapse.py
"""

from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

model = lsim.demo_model()
data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
found = lsim.analyze(model, data, lsim.NeuralCollapse(classes=10))["neural_collapse"]
found.plot().write_html(OUT / "neural_collapse.html")

print("classes:", ", ".join(repr(model.tokenizer.decode([c])) for c in found.labels))
print("layer     NC1")
for name, value in zip(found.layers, found.nc1, strict=True):
    print(f"{name:<28} {value:6.2f}")
