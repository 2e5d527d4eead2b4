"""The command line `tl-layersim`: a report on a model, the list of analyzers, and the sites of a model."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from enum import StrEnum
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
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Give every number a confidence interval, from blocks of the data.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File for partial sums, from which an interrupted run resumes.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Measure one of several parts of the data and write its sums, for `tl-layersim merge`. Numbers begin at 0: "
            "--shard 0/64 to --shard 63/64, or --shard $SLURM_ARRAY_TASK_ID/64 with --array=0-63."
        ),
    ] = None,
    save_to: Annotated[
        Path | None,
        typer.Option(help="File for the sums of the shard, from which it resumes. Default: parts/part-3-of-64.safetensors."),
    ] = None,
    first: Annotated[
        list[str] | None,
        typer.Option(help="Folder, pattern or file of the first stage, for analyzers that need one. May be repeated."),
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
    from .data.named_data import load_data
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
    part = _shard_arguments(shard, save_to, first)
    if not part:
        _make(out)
    read = demo_text() if data is None else load_data(data, split)
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
        intervals=intervals,
        checkpoint=checkpoint,
        **part,
    )
    if isinstance(result, Path):
        typer.echo(f"Shard:   {result.resolve()}")
        return
    _write(_noted(result, trust_remote_code=trust_remote_code), max_tokens, skip_first, out)


def _shard_arguments(shard: str | None, save_to: Path | None, first: list[str] | None) -> dict[str, Any]:
    """The arguments of `analyze` for a shard; empty for a run over all data, where neither is given."""
    from .analysis.shards import listed

    if shard is None:
        given = {"save_to": save_to, "first": first}
        return {name: value for name, value in given.items() if value is not None}
    number, slash, of = shard.partition("/")
    if not (slash and number.strip().isdecimal() and of.strip().isdecimal()):
        raise LayersimError(
            "`--shard` must be the number of a shard, from 0, a slash and the number of shards.",
            given=f"--shard {shard}",
            expected="two whole numbers such as 3/64",
            do="--shard $SLURM_ARRAY_TASK_ID/64, in a job array with --array=0-63",
        )
    chosen = (int(number), int(of))
    if save_to is None:
        save_to = Path("parts") / f"part-{chosen[0]}-of-{chosen[1]}.safetensors"
        _make(save_to.parent, "--save-to")
    files = None if first is None else [file for name in first for file in listed(name, "--first")]
    return {"shard": chosen, "save_to": save_to, "first": files}


def _refuse_unused_options(context: typer.Context) -> None:
    """Refuse options that were given and that `--demo-pair` does not read."""
    fixed = ("analyzers", "option", "at", "per_head", "pack", "device", "dtype")
    for name in (*fixed, "intervals", "checkpoint", "shard", "save_to", "first", "trust_remote_code"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise LayersimError(
                f"`{flag}` has no effect with `--demo-pair`, whose measures and models are fixed.",
                given=f"{flag} with --demo-pair",
                expected="--demo-pair without it",
                do="tl-layersim report without --demo-pair, which measures one model",
            )


def _make(out: Path, option: str = "--out") -> None:
    """Create a folder to write to, and check before anything is computed that it is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayersimError(
            f"`{option}` names a folder that cannot be created.",
            given=f"{option} {out}: {error.strerror or error}",
            expected="a folder, or a path where a folder can be created",
            do=f"{option} with another path",
        ) from None
    refuse_unwritable_folder(out, option)


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
    from .data.named_data import load_data
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
    read = demo_text() if data is None else load_data(data, split)
    result = evaluate_layers(
        demo_model(),
        demo_model(aligned=True),
        read,
        names=("demo", "aligned"),
        pack=isinstance(read, list),
        **reading,
    )
    _write(result, reading["max_tokens"], reading["skip_first"], out)


@app.command(name="merge")
def merge_shards(
    files: Annotated[list[str], typer.Argument(help="Files that `report --shard` wrote, or a folder with them alone.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.safetensors.")] = Path("layersim-report"),
) -> None:
    """Add the sums of all shards, and write the report that one process over all data would have written."""
    from .analysis.merging import merge
    from .analysis.shards import listed

    _make(out)
    result = merge([file for name in files for file in listed(name, "FILES")])
    p = next(iter(result.values())).provenance
    _write(result, p.options["max_tokens"], p.options["skip_first"], out)


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


if __name__ == "__main__":
    main()
