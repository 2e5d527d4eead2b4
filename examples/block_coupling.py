"""Coupling of blocks through training, and across depth and tokens (Aubry et al. 2025, figures 1 to 4).

python examples/block_coupling.py

A model of four blocks is trained from scratch for some seconds, and measured at some of its steps; then the pictures of one
prompt, for the demo model and for the same model with fresh random weights. Nothing is downloaded.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tl_layersim as lsim
from tl_layersim.many import plot_adjacency

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)
STEPS = (0, 5, 15, 40, 100)

demo = lsim.demo_model()
tokenizer, texts = demo.tokenizer, lsim.demo_text()
rows = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
rows = rows[: len(rows) // 64 * 64].view(-1, 64)
held_out, train = rows[:8], rows[8:]

torch.manual_seed(0)
small = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=176,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
optimiser = torch.optim.AdamW(small.parameters(), lr=3e-3)
coupling, accuracy = {}, {}
for step in range(max(STEPS) + 1):
    if step in STEPS:
        small.eval()
        report = lsim.analyze(small, held_out, [lsim.BlockCoupling(), lsim.LogitLens()])
        coupling[step], accuracy[step] = report["block_coupling"], float(report["logit_lens"].accuracy[-1])
        small.train()
    batch = train[torch.randint(len(train), (16,))]
    loss = small(batch, labels=batch).loss
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()

print("step  coupling  random vectors  accuracy on held-out text")
for step, found in coupling.items():
    print(f"{step:4}  {found.mean():8.3f}  {found.mean('null_coupling'):14.3f}  {accuracy[step]:8.3f}")

# Figure 1 b: over training; 1 c to e: who is coupled with whom; 1 a: against a score, here over the steps of one model.
lsim.plot(lsim.stack(coupling, "step"), "mean_coupling").write_html(OUT / "coupling_training.html")
for step in (STEPS[0], STEPS[-1]):
    plot_adjacency(coupling[step], title=f"After {step} steps").write_html(OUT / f"coupling_adjacency_{step}.html")
relation = lsim.many.relate({step: one.mean() for step, one in coupling.items()}, accuracy)
relation.plot().write_html(OUT / "coupling_accuracy.html")
print(relation, "Steps of one run are not independent.", sep="\n")

# Figures 2 to 4: the matrices themselves.
torch.manual_seed(0)
fresh = AutoModelForCausalLM.from_config(demo.config).eval()
fresh.tokenizer = tokenizer
prompt = "Once upon a time there was a little girl who"
for name, model in (("trained", demo), ("random", fresh)):
    for along in ("depth", "self", "fixed-input", "fixed-output"):
        found = lsim.prompts.coupling_matrices(model, prompt, along=along)
        found.plot().write_html(OUT / f"coupling_{along}_{name}.html")
        values = found.headline()
        print(f"{name:8} {along:13} " + "  ".join(f"{key} {value:.3f}" for key, value in values.items()))
    lsim.prompts.block_jacobians(model, prompt).plot().write_html(OUT / f"singular_values_{name}.html")
