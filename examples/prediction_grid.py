"""Token by layer, the word that each layer would say (Jiang, Zhou and Zhu 2024, figure 20).

python examples/prediction_grid.py ["a prompt"]
"""

import sys
from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time there was a little girl who lived in a small house"
grid = lsim.prompts.prediction_grid(lsim.demo_model(), prompt)
grid.plot().write_html(OUT / "prediction_grid.html")

for token, words, final in zip(grid.tokens, grid.words, grid.saturation_layer, strict=True):
    cells = [f"[{w.strip()}]" if i == int(final) else w.strip() for i, w in enumerate(words)]
    print(f"{token.strip():>14} -> " + "  ".join(f"{cell:<9}" for cell in cells))
print("[word]: from that block on the prediction is final")
