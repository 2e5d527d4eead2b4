"""Does stitching see the activation function? GeLU and SoLU models, two seeds each (Brown et al. 2023, figure 1).

python examples/gelu_and_solu.py
python examples/gelu_and_solu.py --text stories.txt --steps 3000 --fit-steps 1000 --out folder

Four GPT-2-shaped models are trained that differ in the activation of their feed-forward layers and in their seed alone, then
stitched
at every layer in every direction. Without `--text` they learn the text that ships, for seconds: enough to see how it goes, and
too little to mean anything. docs/stitching.md has the numbers of a longer run.
"""

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tl_layersim as lsim

CONTEXT, BATCH, LAYERS = 128, 16, 4


class SoLU(nn.Module):
    """x softmax(x) over the neurons of a token, and a layer norm behind it, as in Elhage et al. 2022 and their open models."""

    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(neurons)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * x.softmax(-1))


def build(activation: str, seed: int, tokenizer) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=128,
        n_layer=LAYERS,
        n_head=4,
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        activation_function="gelu",
    )
    config.name_or_path = f"{activation}-{seed}"
    model = GPT2LMHeadModel(config)
    if activation == "solu":
        for block in model.transformer.h:
            block.mlp.act = SoLU(4 * config.n_embd)
    return model


def train(model: GPT2LMHeadModel, rows: torch.Tensor, steps: int, seed: int) -> GPT2LMHeadModel:
    """AdamW, 3e-3 at its highest after a tenth of the steps, down to nothing along a cosine."""
    torch.manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps, pct_start=0.1)
    start = time.time()
    model.train()
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,))]
        loss = model(batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"  step {step}: loss {loss.item():.3f} ({time.time() - start:.0f} s)", flush=True)
    return model.eval()


def prepared(arguments: argparse.Namespace) -> tuple[dict[str, GPT2LMHeadModel], torch.Tensor]:
    """The four models, trained or read from where an earlier call left them, and rows that none of them was trained on."""
    tokenizer = lsim.demo_model().tokenizer
    texts = [path.read_text(encoding="utf-8") for path in arguments.text] or [" ".join(lsim.demo_text())]
    ids = torch.cat([torch.tensor(tokenizer(text, verbose=False)["input_ids"]) for text in texts])
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    held_out = min(arguments.stitch_rows, len(rows) // 2)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    learned, unseen = rows[order[held_out:]], rows[order[:held_out]]
    print(f"{learned.numel():,} tokens to learn, {unseen.numel():,} to stitch on")
    models = {}
    for activation, seed in (("gelu", 0), ("gelu", 1), ("solu", 0), ("solu", 1)):
        name = f"{activation}-{seed}"
        models[name] = build(activation, seed, tokenizer)
        weights = arguments.out / f"{name}.safetensors"
        if arguments.text and weights.exists():
            load_model(models[name], weights)
        else:
            print(name, flush=True)
            train(models[name], learned, arguments.steps, seed)
            if arguments.text:
                save_model(models[name], weights)
    return models, unseen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain text files; default: the text that ships")
    parser.add_argument("--steps", type=int, default=20, help="of training each model")
    parser.add_argument("--fit-steps", type=int, default=8, help="of training each adapter")
    parser.add_argument("--stitch-rows", type=int, default=1200, help="rows that adapters are fitted and judged on")
    parser.add_argument("--layers", type=int, nargs="*", default=[0, LAYERS - 1], help="after which blocks to stitch, from 0")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True, parents=True)

    models, unseen = prepared(arguments)
    grid = lsim.stitch_grid(
        models,
        lsim.Data(unseen, batch_size=8 if arguments.text else 2),
        layers=arguments.layers,
        adapter="affine-norm",
        fit="sgd",
        training=lsim.stitching.StitchTraining(steps=arguments.fit_steps, warmup=arguments.fit_steps // 10),
        checkpoint=arguments.out / "gelu_and_solu_checkpoint.safetensors" if arguments.text else None,
    )
    grid.save(arguments.out / "gelu_and_solu.safetensors")
    grid.plot().write_html(arguments.out / "gelu_and_solu.html")

    # Figure 1: by what is stitched into what, over seeds.
    table = grid.to_frame()
    same = table.front == table.back
    table["stitch"] = table.front.str[:4] + " into " + table.back.str[:4] + same.map({True: " (itself)", False: ""})
    print(
        table.pivot_table(index="stitch", columns="seam", values="penalty", aggfunc="mean", observed=True).round(3).to_string()
    )
    print("\nwhat each model loses by itself")
    print(table.groupby("back", observed=True).back_loss.first().round(3).to_string())
    for a in ("gelu-0", "gelu-1"):
        for b in ("solu-0", "solu-1"):
            print(f"\n{b} into {a}, minus {a} into {b}")
            print(grid.penalty_difference((b, a), (a, b)).to_dataframe().round(3).to_string())


if __name__ == "__main__":
    main()
