"""`tl-layersim report`: analyzers over data on one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ..core.errors import LayersimError
from . import options as o
from .inputs import as_data, chosen_analyzers, is_demo, measuring, named_data, named_model, server_of, shard_files
from .output import (
    analyzer_settings,
    chosen_formats,
    make_folder,
    noted,
    print_files,
    print_run,
    settled_options,
    write_report,
)
from .run_file import is_set, write_run_file

# Options that `--demo-pair` does not read.
FIXED = (
    *("model", "analyzers", "option", "at", "per_head", "pack", "device", "dtype", "intervals", "checkpoint"),
    *("shard", "save_to", "first", "trust_remote_code", "remote", "server", "tokens_per_request"),
)


def report_on_model(
    context: typer.Context,
    model: o.ModelOption = None,
    device: o.DeviceOption = "cpu",
    dtype: o.DtypeOption = o.Dtype.float32,
    trust_remote_code: o.TrustOption = False,
    remote: o.RemoteOption = False,
    server: o.ServerOption = None,
    demo_pair: o.DemoPairOption = False,
    data: o.DataOption = None,
    split: o.SplitOption = "test",
    column: o.ColumnOption = None,
    max_tokens: o.MaxTokensOption = 65536,
    seq_len: o.SeqLenOption = None,
    pack: o.PackOption = None,
    skip_first: o.SkipFirstOption = 0,
    positions: o.PositionsOption = None,
    analyzers: o.AnalyzersOption = "cosine,cka",
    option: o.AnalyzerOptions = None,
    at: o.AtOption = None,
    per_head: o.PerHeadOption = False,
    intervals: o.IntervalsOption = False,
    baseline: o.BaselineOption = None,
    config: o.ConfigOption = None,
    batch_size: o.BatchSizeOption = 16,
    checkpoint: o.CheckpointOption = None,
    tokens_per_request: o.RequestOption = None,
    shard: o.ShardOption = None,
    save_to: o.ShardFileOption = None,
    first: o.FirstOption = None,
    out: o.OutOption = o.OUT,
    format: o.FormatOption = "html",
) -> None:
    """Measure the layers of a model on data, and write a report."""
    from .. import analyze
    from ..models.named_model import refuse_missing_device

    chosen_formats(format)
    if demo_pair:
        _report_demo_pair(context)
        return
    place = server_of(context)
    if not place:
        refuse_missing_device(device)
    # The names of analyzers are checked before the model is loaded.
    chosen = chosen_analyzers(context)
    part = _shard_arguments(context)
    if not part:
        make_folder(out)
    source = named_data(data, split)
    opened = named_model(model, context.params, place)
    read = as_data(source, context.params, opened, any(one.prompts for one in chosen))
    result: Any = analyze(opened, read, chosen, **measuring(context.params), **part)
    if isinstance(result, Path):
        settled = {"pack": read.pack, "batch_size": read.batch_size, "option": analyzer_settings(chosen)}
        print_files({"Shard": result, "Config": write_run_file(result.parent, f"{result.stem}.yaml", context, settled)})
        return
    print_run(next(iter(result.values())))
    write_report(context, noted(result, trust_remote_code=trust_remote_code), settled_options(result, chosen))


def _shard_arguments(context: typer.Context) -> dict[str, Any]:
    """The arguments of `analyze` for a shard; empty for a run over all data, where neither is given."""
    shard, save_to, first = (context.params[name] for name in ("shard", "save_to", "first"))
    if shard is None:
        given = {"save_to": save_to, "first": list(first or []) or None}
        return {name: value for name, value in given.items() if value is not None}
    number, slash, of = shard.partition("/")
    if not (slash and number.strip().isdecimal() and of.strip().isdecimal()):
        raise LayersimError(
            "`--shard` must be the number of a shard, from 0, a slash and the number of shards.",
            given=f"--shard {shard}",
            expected="two whole numbers such as 3/64",
            do="--shard $SLURM_ARRAY_TASK_ID/64, in a job array with --array=0-63",
        )
    for name in ("out", "format"):
        if is_set(context, name):
            raise LayersimError(
                f"`--{name}` has no effect with `--shard`, which writes the sums of one part and no report.",
                given=f"--{name} {context.params[name]} with --shard {shard}",
                expected="--save-to, for the file of the shard",
                do=f"leave --{name} out here, and pass it to tl-layersim merge",
            )
    chosen = (int(number), int(of))
    if save_to is None:
        save_to = Path("parts") / f"part-{chosen[0]}-of-{chosen[1]}.safetensors"
        make_folder(save_to.parent, "--save-to")
    files = shard_files(first, "--first") if first else None
    return {"shard": chosen, "save_to": save_to, "first": files}


def _report_demo_pair(context: typer.Context) -> None:
    """Compare the demo model with its fine-tune by aligned training, layer by layer."""
    from .. import demo_model, evaluate_layers

    options = context.params
    if not is_demo(options["model"]):
        raise LayersimError(
            "`--model` cannot be combined with `--demo-pair`, which brings its own models.",
            given=f"--model {options['model']}",
            expected="--demo-pair alone",
            do="evaluate_layers(before, after, data).to_html(path) in Python, for models of your own",
        )
    for name in FIXED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise LayersimError(
                f"`{flag}` has no effect with `--demo-pair`, whose measures and models are fixed.",
                given=f"{flag} with --demo-pair",
                expected="--demo-pair without it",
                do="tl-layersim report without --demo-pair, which measures one model",
            )
    make_folder(options["out"])
    read = as_data(named_data(options["data"], options["split"]), options | {"pack": None})
    result = evaluate_layers(demo_model(), demo_model(aligned=True), read, names=("demo", "aligned"))
    print_run(next(iter(result.values())))
    for name in FIXED:
        # Not a part of the run, so not of its run file.
        del options[name]
    write_report(context, result)
