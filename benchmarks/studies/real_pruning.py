"""Tables of docs/prune.md: the loss of real models without some of their blocks, which are chosen by four criteria.

    python benchmarks/studies/real_pruning.py --model smollm2=FOLDER --text FILE --tokens 4096 > tables.md

Folders hold Hugging Face weights; the text is cut into full rows of 256 tokens. Blocks are chosen on the first half of rows.
Losses are measured on the second half.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from real_models import SKIP, load

import tl_layersim as lsim

LENGTH = 256
CRITERIA = ("angular distance", "block influence", "change of probabilities", "last blocks")


def rows_of(model: Any, text: str, tokens: int) -> list[list[int]]:
    """Full rows, each of which starts with the tokenizer's BOS where it has one."""
    tokenizer = model.tokenizer
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    size = LENGTH - len(start)
    return [start + ids[i * size : (i + 1) * size] for i in range(min(tokens // LENGTH, len(ids) // size))]


def without(model: Any, blocks: tuple[int, ...]) -> Any:
    """A copy of a decoder without the blocks of these numbers."""
    short = copy.deepcopy(model)
    decoder = short.get_decoder()
    decoder.layers = torch.nn.ModuleList(block for i, block in enumerate(decoder.layers) if i not in blocks)
    for number, block in enumerate(decoder.layers):
        block.self_attn.layer_idx = number
    short.config.num_hidden_layers = len(decoder.layers)
    return short


def rise(model: Any, blocks: tuple[int, ...], rows: list[list[int]]) -> Any:
    """The pruned model's last residual, read by the final norm and head of the whole model: its loss, and the rise of it."""
    short = without(model, blocks)
    return lsim.stitch(short, model, lsim.Data(rows, skip_first=SKIP, batch_size=1), at=(-1, -1), adapter="identity")


def criteria(model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """By criterion, a function of n that names the n blocks to leave out."""
    analyzers = [lsim.Cosine(center="none"), lsim.SkipEffect(splits=0)]
    report = lsim.analyze(model, lsim.Data(rows, skip_first=SKIP, batch_size=4), analyzers)
    last = lsim.analyze(model, lsim.Data(rows, positions="last"), lsim.Cosine(center="none"))["cosine"]
    depth = len(model.get_decoder().layers)
    influence, effect = report["cosine"].block_influence, report["skip_effect"].probability_change
    print("| block | block influence | angular distance, last token | change of probabilities |\n| --- | --- | --- | --- |")
    for i in range(depth):
        print(f"| {i} | {influence[i]:.3f} | {last.angular_by_gap(1)[i]:.3f} | {effect[i]:.3f} |")
    print()
    return {
        CRITERIA[0]: last.blocks_to_drop,
        CRITERIA[1]: lambda n: tuple(sorted(influence.argsort()[:n].tolist())),
        CRITERIA[2]: lambda n: tuple(sorted(effect.argsort()[:n].tolist())),
        CRITERIA[3]: lambda n: tuple(range(depth - n, depth)),
    }


def names(blocks: tuple[int, ...]) -> str:
    """Runs of numbers, as 3-5, 8."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def tables(name: str, model: Any, text: str, tokens: int, counts: list[int]) -> None:
    rows = rows_of(model, text, tokens)
    half = len(rows) // 2
    print(f"### {name}\n\nBlocks are chosen on {half} rows of {LENGTH} tokens; losses are of {len(rows) - half} other rows.\n")
    choose = criteria(model, rows[:half])
    print("| blocks left out | criterion | which | cross-entropy (nats) | rise, 95 % interval | repaired |")
    print("| --- | --- | --- | --- | --- | --- |")
    whole = None
    for n in counts:
        for criterion in CRITERIA:
            blocks = choose[criterion](n)
            found = rise(model, blocks, rows[half:])
            if whole is None:
                whole = float(found.back_loss)
                print(f"| 0 | | | {whole:.3f} | | |")
            low, high = found.penalty_interval()[1:3]
            repaired = ""
            if blocks[-1] - blocks[0] == n - 1:
                ends = (f"blocks.{blocks[0]}.hook_resid_pre", blocks[-1])
                data = lsim.Data(rows[:half], skip_first=SKIP, batch_size=1)
                affine = lsim.stitch(model, model, data, eval_data=rows[half:], at=ends, fit="lstsq")
                repaired = f"{float(affine.penalty):+.3f}"
            cells = (
                n,
                criterion,
                names(blocks),
                f"{float(found.loss):.3f}",
                f"{float(found.penalty):+.3f} ({low:+.3f} to {high:+.3f})",
            )
            print(f"| {' | '.join(map(str, cells))} | {repaired} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, help="NAME=FOLDER, once for each model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    for item in arguments.model:
        name, folder = item.split("=", 1)
        tables(name, load(folder), arguments.text.read_text(), arguments.tokens, arguments.counts)


if __name__ == "__main__":
    main()
