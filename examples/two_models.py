"""CKA between the layers of two models, and their arccos distance (Brown et al. 2023, appendix C).

    python examples/two_models.py [MODEL_A MODEL_B]

Without arguments: the demo model against itself with its blocks' weights shuffled, so that embeddings agree and blocks do not.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)


def load(path: str):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(path)
    return model


if len(sys.argv) == 3:
    a, b = load(sys.argv[1]), load(sys.argv[2])
else:
    a, b = lsim.demo_model(), lsim.demo_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in b.model.layers.parameters():
            shuffled = parameter.flatten()[torch.randperm(parameter.numel(), generator=generator)]
            parameter.copy_(shuffled.view_as(parameter))

data = lsim.Data(lsim.demo_text(), pack=True, skip_first=2)
across = lsim.compare(a, b, data, lsim.CKA())
across.plot().write_html(OUT / "cka_two_models.html")
print("CKA of each layer with the same layer of the other model:")
print("  ".join(f"{value:.3f}" for value in across.values.diagonal()))
print(f"distance {across.distance():.3f} (0: the same up to rotation and scale)")
