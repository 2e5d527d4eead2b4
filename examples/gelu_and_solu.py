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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain text files; default: the text that ships")
    parser.add_argument("--steps", type=int, default=60, help="of training each model")
    parser.add_argument("--fit-steps", type=int, default=40, help="of training each adapter")
    parser.add_argument("--stitch-rows", type=int, default=200, help="rows that adapters are fitted and judged on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True, parents=True)

    tokenizer = lsim.demo_model().tokenizer
    texts = [path.read_text(encoding="utf-8") for path in arguments.text] or [" ".join(lsim.demo_text())]
    ids = torch.cat([torch.tensor(tokenizer(text, verbose=False)["input_ids"]) for text in texts])
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    # Stitched on text that none of the models was trained on.
    held_out = min(arguments.stitch_rows, len(rows) // 4)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    learned, unseen = rows[order[held_out:]], rows[order[:held_out]]
    print(f"{learned.numel():,} tokens to learn, {unseen.numel():,} to stitch on")

    models = {}
    for activation in ("gelu", "solu"):
        for seed in (0, 1):
            name = f"{activation}-{seed}"
            models[name] = build(activation, seed, tokenizer)
            weights = arguments.out / f"{name}.pt"
            if weights.exists():
                models[name].load_state_dict(torch.load(weights, weights_only=True))
                models[name].eval()
                continue
            print(name, flush=True)
            train(models[name], learned, arguments.steps, seed)
            if arguments.text:
                torch.save(models[name].state_dict(), weights)
    stitch(models, unseen, arguments)


def stitch(models, unseen, arguments) -> None: ...


if __name__ == "__main__":
    main()
