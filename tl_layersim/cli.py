"""The command line `tl-layersim`: a report on a model, the list of analyzers, and the sites of a model."""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .core.errors import LayersimError, without_secrets
from .core.storage import refuse_unwritable_folder

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure how the layers of a transformer relate to each other."
)


class Dtype(StrEnum):
    """The dtype of the model's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def report(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a Hugging Face model. Default: the demo model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text file, table, folder of a saved data set, or hub name. Default: the demo text.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "test",
    column: Annotated[
        str | None,
        typer.Option(help="Column of a data set that holds texts or tokens; two, joined by a comma, for pairs of texts."),
    ] = None,
    analyzers: Annotated[
        str, typer.Option(help="Names of analyzers, separated by commas; `tl-layersim analyzers` lists them.")
    ] = "cosine,cka",
    option: Annotated[
        list[str] | None,
        typer.Option(help="Option of an analyzer, as name.option=value: --option cka.minibatch=128. May be repeated."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            help="Sites that are read: families such as attn_out, names or patterns, separated by commas; `tl-layersim sites` "
            "lists them. May be repeated. Default: resid_post."
        ),
    ] = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Read each head of z, q, k or v as a site of its own.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens.")] = 65536,
    seq_len: Annotated[int | None, typer.Option(help="Longest row of tokens. Default: 256, or the model's context.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in a forward pass.")] = 16,
    pack: Annotated[
        bool | None,
        typer.Option(help="Join texts and cut rows of full length. Default: on for text files, except with block_coupling."),
    ] = None,
    skip_first: Annotated[int, typer.Option(help="Leave out the first positions of each row.")] = 0,
    positions: Annotated[
        str | None,
        typer.Option(
            help="Positions of each row that are measured: all, first, last, mean, assistant, a slice such as 2:-1, or a mask "
            "column. Default: the position that the head of a row classifier reads, else all."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, cuda, mps, or auto to spread it over GPUs.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the weights.")] = Dtype.float32,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File for partial sums, from which an interrupted run resumes.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the Python code that comes with the model. Without this option such models are refused.",
        ),
    ] = False,
    demo_pair: Annotated[
        bool, typer.Option("--demo-pair", help="Compare the demo model with its fine-tune by aligned training, layer by layer.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.safetensors.")] = Path("layersim-report"),
) -> None:
    """Measure a model on data, and write an HTML report and a file with the numbers."""
    from .analysis.api import analyze
    from .analysis.site_plan import DEFAULT
    from .analysis.validation import choose_analyzers
    from .analyzers.text_options import with_options
    from .data.positions import as_rule
    from .demo import demo_model, demo_text
    from .models.named_model import load_model, refuse_missing_device

    if demo_pair:
        _refuse_unused_options(context)
        reading = {"column": _columns(column), "max_tokens": max_tokens, "seq_len": seq_len, "positions": as_rule(positions)}
        _report_demo_pair(model, data, split, reading | {"batch_size": batch_size, "skip_first": skip_first}, out)
        return

    refuse_missing_device(device)
    # The names of analyzers are checked before the model is loaded.
    named = choose_analyzers(_names([analyzers]))
    chosen = list(with_options(named, option or []).values())
    _make(out)
    read = demo_text() if data is None else _read_data(data, split)
    is_text = isinstance(read, list)
    loaded = demo_model() if model is None else load_model(model, device, dtype, trust_remote_code)
    if model is None and device not in ("cpu", "auto"):
        loaded = loaded.to(device)
    result = analyze(
        loaded,
        read,
        chosen,
        at=_names(at) or DEFAULT,
        per_head=per_head,
        tokenizer=getattr(loaded, "tokenizer", None),
        batch_size=batch_size,
        seq_len=seq_len,
        # Some analyzers take each row for a prompt.
        pack=is_text and not any(analyzer.prompts for analyzer in chosen) if pack is None else pack,
        max_tokens=max_tokens,
        skip_first=skip_first,
        column=_columns(column),
        positions=as_rule(positions),
        checkpoint=checkpoint,
    )
    _write(_noted(result, trust_remote_code=trust_remote_code), max_tokens, skip_first, out)


def _refuse_unused_options(context: typer.Context) -> None:
    """Refuse options that were given and that `--demo-pair` does not read."""
    unused = ("analyzers", "option", "at", "per_head", "pack", "device", "dtype", "checkpoint", "trust_remote_code")
    for name in unused:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise LayersimError(
                f"`{flag}` has no effect with `--demo-pair`, whose measures and models are fixed.",
                given=f"{flag} with --demo-pair",
                expected="--demo-pair without it",
                do="tl-layersim report without --demo-pair, which measures one model",
            )


def _make(out: Path) -> None:
    """Create the folder of the report, and check before anything is computed that it is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayersimError(
            "`--out` names a folder that cannot be created.",
            given=f"--out {out}: {error.strerror or error}",
            expected="a folder, or a path where a folder can be created",
            do="--out layersim-report",
        ) from None
    refuse_unwritable_folder(out, "--out")


def _noted(report: Any, **options: Any) -> Any:
    """The report with further options in its provenance."""
    results = {}
    for name, result in report.items():
        run = replace(result.provenance, options={**result.provenance.options, **options})
        results[name] = replace(result, provenance=run)
    return type(report)(results)


def _names(texts: list[str] | None) -> list[str]:
    """The names that commas separate."""
    return [name.strip() for text in texts or [] for name in text.split(",") if name.strip()]


def _columns(column: str | None) -> str | tuple[str, str] | None:
    """The column, or the pair of columns that a comma separates."""
    first, comma, second = (column or "").partition(",")
    return (first.strip(), second.strip()) if comma else column


def _write(result: Any, max_tokens: int | None, skip_first: int, out: Path) -> None:
    """Write the HTML report and the file with the numbers, and print the numbers and both paths."""
    p = next(iter(result.values())).provenance
    how = "packed" if p.options["pack"] else "one text a row"
    stopped = ", where --max-tokens stopped it" if p.tokens == max_tokens else ""
    which = "" if p.options["positions"] == "all" else f", positions {p.options['positions']}"
    counted = f"{p.tokens} tokens{stopped}, in {p.sequences} rows ({how}), first {skip_first} positions left out{which}"
    heads = " of each head" if p.options.get("per_head") else ""
    where = ", ".join(_names([at] if isinstance(at := p.options.get("at", ""), str) else at))
    typer.echo(f"{p.model}: {counted}" + (f", at {where}{heads}" if where not in ("", "resid_post") else ""))
    # Printed before anything is written: if the disk is full by now, the numbers are not lost.
    typer.echo(repr(result))
    numbers = result.save(out / "report.safetensors")
    page = result.to_html(out / "report.html")
    typer.echo(f"Numbers: {numbers.resolve()}")
    typer.echo(f"Report:  {page.resolve()}")


def _report_demo_pair(model: str | None, data: str | None, split: str, reading: dict[str, Any], out: Path) -> None:
    """Compare the two demo models, layer by layer."""
    from .demo import demo_model, demo_text
    from .training.layer_evaluation import evaluate_layers

    if model is not None:
        raise LayersimError(
            "`--model` cannot be combined with `--demo-pair`, which brings its own models.",
            given=f"--model {model}",
            expected="--demo-pair alone",
            do="evaluate_layers(before, after, data).to_html(path) in Python, for models of your own",
        )
    _make(out)
    read = demo_text() if data is None else _read_data(data, split)
    result = evaluate_layers(
        demo_model(),
        demo_model(aligned=True),
        read,
        names=("demo", "aligned"),
        pack=isinstance(read, list),
        **reading,
    )
    _write(result, reading["max_tokens"], reading["skip_first"], out)


@app.command(name="analyzers")
def list_analyzers() -> None:
    """List the installed analyzers, with one line on each."""
    from .analyzers import find_analyzers

    installed = find_analyzers()
    width = max(map(len, installed))
    for name, cls in sorted(installed.items()):
        typer.echo(f"{name:<{width}}  {cls.summary()}")


@app.command(name="sites")
def list_sites(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub name of a Hugging Face model. Default: the demo model.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the Python code that comes with the model. Without this option such models are refused.",
        ),
    ] = False,
) -> None:
    """List the sites of a model, which --at selects, in the order in which it computes them; its weights are not loaded."""
    from .demo import demo_model
    from .models import sites
    from .models.named_model import load_without_weights

    table = sites(demo_model() if model is None else load_without_weights(model, trust_remote_code, "MODEL"))
    rows = [list(table.columns), *table.astype(object).where(table.notna(), "-").astype(str).to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _read_data(name: str, split: str) -> Any:
    """Data from a table, a text file, a folder of a data set, or the hub.

    Raises:
        LayersimError: there is no such data, or it cannot be read.
    """
    path = Path(name)
    if path.is_file():
        try:
            return _read_file(path)
        # UnicodeDecodeError, ParserError and ArrowInvalid, which readers of each kind of table raise, are ValueErrors.
        except ValueError as error:
            raise LayersimError(
                "`--data` is a file that cannot be read as text or as a table.",
                given=f"{name}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:160]}",
                expected="a text file in UTF-8, or a table in .csv, .tsv, .jsonl or .parquet",
                do="convert it first, for example iconv -f latin1 -t utf-8; weights belong to --model",
            ) from error
    import datasets

    from .data.readers import FILES

    if path.is_dir():
        try:
            dataset = datasets.load_from_disk(name)
        except (OSError, ValueError) as error:
            raise LayersimError(
                "`--data` is a folder without a saved data set.",
                given=name,
                expected="a folder that Dataset.save_to_disk wrote, a text file or a table",
                do="name a file in it, or save the data set with data.save_to_disk(folder)",
            ) from error
        if isinstance(dataset, datasets.DatasetDict) and split not in dataset:
            raise LayersimError(
                "`--split` is not a split of this data set.",
                given=split,
                expected=f"one of {', '.join(dataset)}",
                do=f"--split {next(iter(dataset), 'test')}",
            )
        return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(FILES):
        raise LayersimError(
            "`--data` names a file or folder that does not exist.",
            given=f"--data {name}",
            expected="a text file, a folder or a hub name",
            do="check the path",
        )
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise LayersimError(
            "`--data` is neither a local file or folder nor a data set that can be loaded from the hub.",
            given=f"{name}, split {split}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:160]}",
            expected="a text file, a table, a folder of a saved data set, or a hub name",
            do="check the path or the name, the split and the network",
        ) from error


def _read_file(path: Path) -> Any:
    """A table, or the paragraphs of a text."""
    if path.suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        import pandas

        readers: dict[str, Any] = {
            ".csv": pandas.read_csv,
            ".tsv": partial(pandas.read_csv, sep="\t", quoting=csv.QUOTE_NONE),
            ".jsonl": partial(pandas.read_json, lines=True),
            ".parquet": pandas.read_parquet,
        }
        return readers[path.suffix](path)
    text = path.read_text(encoding="utf-8")
    if "\0" in text:
        raise ValueError("it holds zero bytes")
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def main() -> None:
    """Run the command line; errors are printed without a traceback."""
    if not sys.stderr.isatty():
        # Read by transformers and datasets when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except (ValueError, OSError) as error:
        # LayersimError is a ValueError, and so are transformers' errors about a folder that is not a model.
        typer.echo(f"Error: {without_secrets(str(error))}", err=True)
        raise SystemExit(1) from None
