"""Make the demo model: sample simple stories, train a BPE tokenizer and a small Llama from scratch, save float16 weights.

    python benchmarks/make_demo_model.py sample --teacher FOLDER --out stories.txt --stories 12000
    python benchmarks/make_demo_model.py train --text stories.txt --text other.txt --out FOLDER
    python benchmarks/make_demo_model.py align --text stories.txt --text other.txt --out FOLDER

`sample` draws text from a local story model; `train` needs plain text files; `align` fine-tunes the shipped model by aligned
training. README.md of `tl_layersim/demo` records the runs, data and held-out perplexity of the shipped models.
"""

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import torch

CONTEXT = 256
VOCABULARY = 2048
BATCH = 16
END = "<|endoftext|>"


def sample(teacher: Path, out: Path, stories: int, seed: int) -> None:
    """Sample stories from the teacher and append them to `out`, until it holds `stories` of them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16).eval()
    bos = tokenizer.bos_token_id
    written = 0
    with out.open("w", encoding="utf-8") as file, torch.inference_mode():
        while written < stories:
            # The teacher starts a new story after each BOS by itself: one row holds a story and the start of the next.
            rows = model.generate(
                torch.full((128, 1), bos),
                do_sample=True,
                temperature=0.9,
                top_k=60,
                max_new_tokens=CONTEXT - 1,
                eos_token_id=None,
                pad_token_id=0,
            )
            for row in rows.tolist():
                text = tokenizer.decode(row, skip_special_tokens=False)
                for story in text.replace("</s>", "<s>").split("<s>"):
                    if len(story.strip()) > 200:
                        file.write(story.strip() + "\n" + END + "\n")
                        written += 1
            file.flush()
            print(f"{written} stories", flush=True)


def read_documents(paths: list[Path]) -> list[tuple[str, str]]:
    """Documents of each file by the file's stem, split at END, or at blank lines in files without END."""
    documents = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if END in text:
            pieces = [piece.strip() for piece in text.split(END)]
        else:
            paragraphs = [piece.strip() for piece in text.split("\n\n")]
            pieces = ["\n\n".join(paragraphs[i : i + 8]) for i in range(0, len(paragraphs), 8)]
        documents += [(path.stem, piece) for piece in pieces if piece]
    return documents


def every_25th(documents: list[tuple[str, str]]) -> set[int]:
    """Indices of the held-out documents, every 25th."""
    return {index for index in range(len(documents)) if index % 25 == 7}


def to_rows(bpe: Any, documents: list[tuple[str, str]], held_out: set[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of tokens, `row pos`, from concatenated documents: training rows, and held-out rows by file."""
    encoded = [[0, *encoding.ids] for encoding in bpe.encode_batch([text for _, text in documents])]

    def rows(which: list[int]) -> torch.Tensor:
        flat = torch.tensor([token for index in which for token in encoded[index]])
        return flat[: len(flat) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    train_rows = rows([i for i in range(len(documents)) if i not in held_out])
    stems = dict.fromkeys(stem for stem, _ in documents)
    return train_rows, {stem: rows([i for i in sorted(held_out) if documents[i][0] == stem])[:200] for stem in stems}


def perplexity(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Exp of the mean next-token cross-entropy over `rows` (row pos)."""
    losses = []
    with torch.inference_mode():
        for batch in rows.split(BATCH):
            losses += [model(batch, labels=batch).loss.double()] * len(batch)
    return math.exp(torch.stack(losses).mean().item())


def train(paths: list[Path], out: Path, minutes: float, max_steps: int, peak_lr: float, seed: int) -> None:
    """Train tokenizer and model. Writes both, `loss_curve.csv` and `perplexity.csv` to `out`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    documents = read_documents(paths)
    held_out = every_25th(documents)

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator((text for i, (_, text) in enumerate(documents) if i not in held_out), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )

    train_rows, test_rows = to_rows(bpe, documents, held_out)
    print(f"{train_rows.numel()} training tokens", {stem: r.numel() for stem, r in test_rows.items()}, flush=True)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=peak_lr, betas=(0.9, 0.95)
    )

    # The schedule follows steps or minutes, whichever is further along.
    start, curve, step = time.perf_counter(), [], 0
    while True:
        order = torch.randperm(len(train_rows))
        for index in order.split(BATCH):
            done = max(step / max_steps, (time.perf_counter() - start) / 60 / minutes)
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, (step + 1) / 200) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
            batch = train_rows[index]
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                curve.append(
                    (step, step * BATCH * CONTEXT, round(loss.item(), 4), round((time.perf_counter() - start) / 60, 2))
                )
                print(*curve[-1], flush=True)
            step += 1
        else:
            continue
        break

    out.mkdir(parents=True, exist_ok=True)
    model.eval().half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    shipped = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    write_perplexity(shipped, test_rows, out)
    with (out / "loss_curve.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "tokens", "train_loss", "minutes"])
        writer.writerows(curve)


def write_perplexity(shipped: torch.nn.Module, test_rows: dict[str, torch.Tensor], out: Path) -> None:
    """Write and print the perplexity on the held-out text of each file."""
    with (out / "perplexity.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["held_out_text", "tokens", "perplexity"])
        for stem, held in test_rows.items():
            writer.writerow([stem, held.numel(), round(perplexity(shipped, held), 3)])
    print((out / "perplexity.csv").read_text())


def align(paths: list[Path], out: Path, steps: int, lr: float, seed: int) -> None:
    """Fine-tune the shipped model by aligned training. Writes weights, curve and perplexity."""
    import tl_layersim as lsim

    model = lsim.demo_model()
    documents = read_documents(paths)
    train_rows, test_rows = to_rows(model.tokenizer.backend_tokenizer, documents, every_25th(documents))
    training = lsim.AlignedTraining(steps=steps, lr=lr, warmup=steps // 20, eval_every=max(1, steps // 6), seed=seed)
    result = lsim.finetune_aligned(
        model,
        lsim.Data(train_rows, batch_size=BATCH // 2),
        training,
        eval_data=torch.cat([rows[:16] for rows in test_rows.values()]),
        checkpoint=out / "unfinished.safetensors",
    )
    (out / "unfinished.safetensors").unlink()
    result.to_frame("held_out_loss").to_csv(out / "loss_curve.csv", index=False)
    model.half().save_pretrained(out)
    write_perplexity(model.float(), test_rows, out)


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample", help="draw stories from a local story model")
    sampling.add_argument("--teacher", type=Path, required=True)
    sampling.add_argument("--out", type=Path, required=True)
    sampling.add_argument("--stories", type=int, default=12000)
    sampling.add_argument("--seed", type=int, default=0)
    training = commands.add_parser("train", help="train tokenizer and model on plain text files")
    training.add_argument("--text", dest="paths", type=Path, action="append", required=True)
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--minutes", type=float, default=45.0)
    training.add_argument("--max-steps", type=int, default=6000)
    training.add_argument("--peak-lr", type=float, default=3e-3)
    training.add_argument("--seed", type=int, default=0)
    aligning = commands.add_parser("align", help="fine-tune the shipped model by aligned training")
    aligning.add_argument("--text", dest="paths", type=Path, action="append", required=True)
    aligning.add_argument("--out", type=Path, required=True)
    aligning.add_argument("--steps", type=int, default=1200)
    aligning.add_argument("--lr", type=float, default=1e-3)
    aligning.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    {"sample": sample, "train": train, "align": align}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
