"""CKA between all attention heads of a model, and cosine between the outputs of its sublayers.

    python examples/attention_heads.py [FOLDER]

FOLDER is a local folder of weights or a hub name; without it, the demo model is measured.
"""

import sys
from pathlib import Path

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

if sys.argv[1:]:
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(sys.argv[1])
else:
    model = lsim.demo_model()
data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)

heads = lsim.analyze(model, data, lsim.CKA(), at="z", per_head=True)["cka"]
heads.plot().write_html(OUT / "heads.html")
pairs = heads.to_frame().query("row_layer < column_layer").nlargest(6, "values")
print(pairs.to_string(index=False))

for family in ("attn_out", "mlp_out"):
    outputs = lsim.analyze(model, data, lsim.Cosine(), at=family)["cosine"]
    outputs.plot().write_html(OUT / f"{family}.html")
print(f"written to {OUT}")
