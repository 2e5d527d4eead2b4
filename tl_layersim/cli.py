"""The command line: arguments in, one call of the package, a line of where the result is."""

from __future__ import annotations

import csv
import os
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import LayersimError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="How the layers of a transformer relate.")


class Dtype(StrEnum):
    """What weights are loaded as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def report(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a Hugging Face model. Default: the demo model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text file, folder of a saved data set, or hub name. Default: the demo text.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "test",
    column: Annotated[str | None, typer.Option(help="Text or token column of a data set. Default: found by itself.")] = None,
    analyzers: Annotated[
        str, typer.Option(help="Names with commas between; `tl-layersim analyzers` lists them.")
    ] = "cosine,cka",
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = 65536,
    seq_len: Annotated[int | None, typer.Option(help="Longest row of tokens. Default: 256, or the model's context.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a forward pass.")] = 16,
    pack: Annotated[
        bool | None,
        typer.Option(help="Join texts and cut full rows. Default: for text files, but not for block_coupling."),
    ] = None,
    skip_first: Annotated[int, typer.Option(help="Leave out the first positions of each row.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, mps, or auto to spread it over GPUs.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="What weights are loaded as.")] = Dtype.float32,
    checkpoint: Annotated[Path | None, typer.Option(help="File for partial sums, to resume from.")] = None,
    demo_pair: Annotated[
        bool, typer.Option("--demo-pair", help="The demo model beside its fine-tune by aligned training, layer by layer.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.safetensors.")] = Path("layersim-report"),
) -> None:
    """Measure a model on some text and write an HTML report, with the numbers beside it."""
    from .demo import demo_model, demo_text
    from .engine import analyze
    from .prepare import choose_analyzers

    if demo_pair:
        _report_demo_pair(model, data, split, column, max_tokens, seq_len, batch_size, skip_first, out)
        return

    # Names are checked before a model is loaded.
    chosen = list(choose_analyzers([name.strip() for name in analyzers.split(",") if name.strip()]).values())
    out.mkdir(parents=True, exist_ok=True)
    read = demo_text() if data is None else _read_data(data, split)
    is_text = isinstance(read, list)
    loaded = demo_model() if model is None else _load_model(model, device, dtype)
    if model is None and device not in ("cpu", "auto"):
        loaded = loaded.to(device)
    result = analyze(
        loaded,
        read,
        chosen,
        tokenizer=getattr(loaded, "tokenizer", None),
        batch_size=batch_size,
        seq_len=seq_len,
        # Some take each row for a prompt.
        pack=is_text and not any(analyzer.prompts for analyzer in chosen) if pack is None else pack,
        max_tokens=max_tokens,
        skip_first=skip_first,
        column=column,
        checkpoint=checkpoint,
    )
    _write(result, max_tokens, skip_first, out)


def _write(result: Any, max_tokens: int | None, skip_first: int, out: Path) -> None:
    """Write page and numbers, and say where."""
    p = next(iter(result.values())).provenance
    how = "packed" if p.options["pack"] else "one text a row"
    stopped = ", where --max-tokens stopped it" if p.tokens == max_tokens else ""
    typer.echo(f"{p.model}: {p.tokens} tokens{stopped}, in {p.sequences} rows ({how}), first {skip_first} positions left out")
    numbers = result.save(out / "report.safetensors")
    page = result.to_html(out / "report.html")
    typer.echo(repr(result))
    typer.echo(f"Numbers: {numbers.resolve()}")
    typer.echo(f"Report:  {page.resolve()}")


def _report_demo_pair(
    model: str | None,
    data: str | None,
    split: str,
    column: str | None,
    max_tokens: int | None,
    seq_len: int | None,
    batch_size: int,
    skip_first: int,
    out: Path,
) -> None:
    """The two models that ship, side by side."""
    from .demo import demo_model, demo_text
    from .training.evaluate import evaluate_layers

    if model is not None:
        raise LayersimError(
            "--demo-pair brings its own models.",
            given=f"--model {model}",
            expected="--demo-pair alone",
            do="evaluate_layers(before, after, data).to_html(path) in Python, for models of your own",
        )
    out.mkdir(parents=True, exist_ok=True)
    read = demo_text() if data is None else _read_data(data, split)
    result = evaluate_layers(
        demo_model(),
        demo_model(aligned=True),
        read,
        names=("demo", "aligned"),
        batch_size=batch_size,
        seq_len=seq_len,
        pack=isinstance(read, list),
        max_tokens=max_tokens,
        skip_first=skip_first,
        column=column,
    )
    _write(result, max_tokens, skip_first, out)


@app.command(name="analyzers")
def list_analyzers() -> None:
    """List the analyzers that are installed, with one line each."""
    from .analyzers import find_analyzers

    found = find_analyzers()
    width = max(map(len, found))
    for name, cls in sorted(found.items()):
        typer.echo(f"{name:<{width}}  {cls.summary()}")


def _load_model(name: str, device: str, dtype: str) -> Any:
    """A Hugging Face model by the class that its configuration names, with its tokenizer as `.tokenizer`."""
    import torch
    import transformers

    local = Path(name).is_dir()
    config = transformers.AutoConfig.from_pretrained(name, local_files_only=local)
    architecture = (config.architectures or ["AutoModel"])[0]
    cls = getattr(transformers, architecture, transformers.AutoModel)
    place = {"device_map": "auto"} if device == "auto" else {}
    model = cls.from_pretrained(name, dtype=getattr(torch, dtype), local_files_only=local, **place)
    model.tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=local)
    return (model if device == "auto" else model.to(device)).eval()


def _read_data(name: str, split: str) -> Any:
    """A table, a text file as paragraphs, or a data set from a folder or the hub."""
    path = Path(name)
    if path.is_file() and path.suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        import pandas

        readers: dict[str, Any] = {
            ".csv": pandas.read_csv,
            ".tsv": partial(pandas.read_csv, sep="\t", quoting=csv.QUOTE_NONE),
            ".jsonl": partial(pandas.read_json, lines=True),
            ".parquet": pandas.read_parquet,
        }
        return readers[path.suffix](path)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    import datasets

    if path.is_dir():
        found = datasets.load_from_disk(name)
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    if path.suffix in (".txt", ".md") or name.startswith((".", "/")):
        raise LayersimError(
            "There is no such data.", given=name, expected="a text file, a folder or a hub name", do="check the path"
        )
    return datasets.load_dataset(name, split=split, streaming=True)


def main() -> None:
    """Run the command line; refusals are printed, not traced."""
    if not sys.stderr.isatty():
        # Read by transformers and datasets when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except (
        ValueError,
        OSError,
    ) as error:  # LayersimError is a ValueError, and what transformers says of a bad folder is one too
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None
