"""Measure from inside a TransformerLens loop of your own, here while the model generates.

python examples/own_loop.py
"""

from transformer_lens.model_bridge.sources import build_bridge_from_module

import tl_layersim as lsim

hf_model = lsim.demo_model()
tokenizer = hf_model.tokenizer
model = build_bridge_from_module(hf_model, "LlamaForCausalLM", hf_config=hf_model.config)

with lsim.attach(model, [lsim.Cosine(center="none"), lsim.CKA(minibatch=64)]) as probe:
    # The tokens of one text depend on each other, so CKA compares tokens of different texts and needs several.
    for text in lsim.demo_text()[:8]:
        tokens = tokenizer(text, return_tensors="pt")["input_ids"][:, :8]
        out = model.generate(tokens, max_new_tokens=40, stop_at_eos=False, do_sample=False, verbose=False)
        print(tokenizer.decode(out[0]))

print(probe.results())
