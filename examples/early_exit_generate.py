"""Generate with early exit: which layers are worth asking, what is promised, where tokens left; and a shorter model."""

from __future__ import annotations

import tl_layersim as lsim

model, texts = lsim.demo_model(), lsim.demo_text()

curve = lsim.analyze(model, texts, [lsim.ExitCurve()])["exit_curve"]
costs = lsim.early_exit.ExitCosts.measure(model)
counted = lsim.early_exit.ExitCosts.count(model)
print(f"a check costs {costs.check / costs.block:.2f} blocks here; by parameters {counted.check / counted.block:.2f}")

for threshold in (0.5, 0.7, 0.9):
    print(f"threshold {threshold}:", lsim.EarlyExit(model, threshold, curve=curve, costs=costs).plan)

early = lsim.EarlyExit(model, threshold=0.7, at=(2, 4))
found = early.generate("Once upon a time, there was a", max_new_tokens=40)
print(found)
for piece, layer in zip(map(model.tokenizer.decode, found.tokens[0]), found.exits[0].tolist(), strict=True):
    print(f"{layer} {'#' * layer:8} {piece!r}")

short = lsim.truncate(model, 5)
print(short.config.num_hidden_layers, "blocks:", lsim.EarlyExit(short, 1).generate("Once upon a", max_new_tokens=20).texts[0])
