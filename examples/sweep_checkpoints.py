"""Checkpoints of a training run, measured one after another: coupling, line-shape score, similarity to the last layer, lens.

python examples/sweep_checkpoints.py

A model of four blocks is trained from scratch for some seconds, and its checkpoints are written to files. `sweep` loads,
measures and frees them in turn. Nothing is downloaded.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)
STEPS = (0, 1, 3, 10, 30, 100)

tokenizer = lsim.demo_model().tokenizer
rows = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in lsim.demo_text()])
rows = rows[: len(rows) // 64 * 64].view(-1, 64)
held_out, train = rows[:16], rows[16:]

torch.manual_seed(0)
model = LlamaForCausalLM(
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
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
folder = Path(tempfile.mkdtemp())
for step in range(max(STEPS) + 1):
    if step in STEPS:
        model.save_pretrained(folder / f"step-{step}")
    batch = train[torch.randint(len(train), (16,))]
    model(batch, labels=batch).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def load(step):
    return LlamaForCausalLM.from_pretrained(folder / f"step-{step}")


analyzers = [lsim.BlockCoupling(), lsim.Trajectory(), lsim.CKA(), lsim.Cosine(center="none"), lsim.LogitLens()]
# One row in a batch, so that 16 rows make the 16 blocks from which intervals are computed.
reports = lsim.sweep(
    {step: partial(load, step) for step in STEPS},
    lsim.Data(held_out, batch_size=1),
    analyzers,
    intervals=True,
    checkpoint=folder / "reports",
)
table = lsim.stack(reports, "step")
lens, coupling = table["logit_lens"], table["block_coupling"]["mean_coupling"]
lens.to_dataset().to_netcdf(OUT / "sweep_lens.nc")

accuracy, straight = lens["accuracy"].isel(layer=-1), table["trajectory"]["lss_mean"]
print("step  coupling  line-shape score  accuracy on held-out text")
for step in reports:
    numbers = (coupling.sel(pair_kind="all pairs"), straight, accuracy)
    print("{:4}  {:8.3f}  {:16.3f}  {:8.3f}".format(step, *(float(one.sel(step=step)) for one in numbers)))
last = table["cka"].isel(column=-1)
lsim.plot(table["block_coupling"], "mean_coupling").write_html(OUT / "sweep_coupling.html")
lsim.plot(table["cosine"].sel(quantile=0.5), "to_last").write_html(OUT / "sweep_cosine.html")
lsim.plot(lens, "cross_entropy", over="layer").write_html(OUT / "sweep_lens.html")
lsim.plot(last, over=("step", "row")).write_html(OUT / "sweep_cka.html")

relation = lsim.many.relate(straight, accuracy)
relation.plot().write_html(OUT / "sweep_relation.html")
print(relation, "Steps of one run are not independent.", sep="\n")
fit = lsim.many.exponential_fit(table["trajectory"]["norm"])
for step in (STEPS[0], STEPS[-1]):
    lsim.plot(fit.sel(step=step)).write_html(OUT / f"sweep_norm_{step}.html")
print(fit[["rate", "r_squared", "linear_r_squared"]].to_dataframe())
