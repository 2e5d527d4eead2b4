"""Tables of docs/stitching.md: two real models that share a tokenizer, all directions and layers.

    python benchmarks/studies/real_stitching.py --model a=FOLDER --model b=FOLDER --text FILE --steps 600 --out grid > tables.md

Folders hold Hugging Face weights; the text is cut into rows of 256 tokens. Two grids: identity, and the affine adapter by least
squares and then by training. `--out` names files that keep finished stitches and results.
"""

import argparse
from pathlib import Path

from real_models import load

import tl_layersim as lsim
from tl_layersim.stitching import StitchGrid


def cell(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ± {(high - low) / 2:.3f}"


def show(grid: StitchGrid) -> None:
    """Penalties by direction and stitch point, and the asymmetry of each pair."""
    seams = [f"layer {number}" for number in range(1, len(grid.seams) + 1)]
    print(f"\n| {grid.kind}{', ' + grid.fit if grid.fit else ''} | " + " | ".join(seams) + " |")
    print("| --- |" + " --- |" * len(seams))
    for i, a in enumerate(grid.fronts):
        for j, b in enumerate(grid.fronts):
            cells = [cell(*(float(x[i, j, s]) for x in (grid.values, grid.low, grid.high))) for s in range(len(seams))]
            print(f"| {a} into {b} | " + " | ".join(cells) + " |")
    for i, a in enumerate(grid.fronts):
        for b in grid.fronts[i + 1 :]:
            table = grid.penalty_difference((a, b), (b, a)).to_dataframe()
            cells = [cell(*row) for row in table.itertuples(index=False)]
            print(f"| difference of {a} into {b} and {b} into {a} | " + " | ".join(cells) + " |")
    own = ", ".join(f"{name} {float(grid.back_loss[0, j, 0]):.3f}" for j, name in enumerate(grid.fronts))
    run = grid.provenance
    print(
        f"\nNats a token; the models alone: {own}. {run.tokens:,} tokens evaluated, {run.options['fit_positions']:,} fitted; "
        f"{run.seconds:.0f} s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and checkpoints")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    models = {name: load(Path(folder)) for name, folder in (one.split("=", 1) for one in arguments.model)}
    texts = arguments.text.read_text(encoding="utf-8").split("<|endoftext|>")
    texts = [text.strip() for text in texts if len(text.strip()) > 100]
    data = lsim.Data(texts, max_tokens=arguments.tokens, seq_len=256, batch_size=8)
    show(lsim.stitch_grid(models, data.like(texts[-150:]), adapter="identity"))
    settings = lsim.stitching.StitchTraining(steps=arguments.steps, warmup=arguments.steps // 10)
    checkpoint = arguments.out / "checkpoint.safetensors"
    grid = lsim.stitch_grid(models, data, adapter="affine", training=settings, checkpoint=checkpoint)
    show(grid)
    grid.save(arguments.out / "grid.safetensors")
    grid.plot().write_html(arguments.out / "grid.html")


if __name__ == "__main__":
    main()
