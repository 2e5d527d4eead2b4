"""`tl-layersim report`, `compare`, `exits` and `estimate`: measurements of one model or two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..core.errors import printable
from .models_and_data import ALIGNED, analyzer_options, chosen_analyzers, is_demo, named_data, named_model, opened, read_data
from .options import CommandCall, command
from .output import (
    analyzer_settings,
    make_folder,
    prepare,
    print_files,
    print_run,
    print_table,
    report_file_options,
    write_report,
)
from .run_file import config_option, write_run_file

# Mark of the recommended threshold.
MARK = "*"
# With more thresholds, the table shows those in `SHOWN` and the recommended one.
MOST_ROWS = 15
SHOWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
CURVE_NUMBERS = ("speedup", "agreement", "accuracy", "perplexity")
CURVE_COLUMNS = ("threshold", "speed-up", "agreement", "accuracy", "perplexity", "")


@command(
    "report",
    {
        "Model": (named_model, "open_model"),
        "Data": (named_data, "Data"),
        "Measures": (analyzer_options, "analyze"),
        "Run": (config_option,),
        "Output": (report_file_options,),
    },
    without=["blocking"],
)
def report_on_model(call: CommandCall) -> None:
    """Measure the layers of a model on data, and write a report.

    Examples:
    tl-layersim report
    tl-layersim report --model gpt2 --data text.txt --intervals
    tl-layersim report --analyzers cka --option cka.minibatch=128 --at attn_out
    tl-layersim report --model meta-llama/Llama-3.1-70B --remote --batch-size 2
    tl-layersim report --config layersim-report/run.yaml
    tl-layersim report --shard 3/64
    """
    from .. import analyze

    analyzers = chosen_analyzers(call)
    options = call.of("analyze")
    if "shard" in options:
        call.refuse(("out", "format"), "with `shard`, because `tl-layersim merge` writes the report")
        number, shard_count = options["shard"]
        options.setdefault("save_to", Path("parts") / f"part-{number}-of-{shard_count}.safetensors")
        make_folder(options["save_to"].parent, "save_to")
    else:
        prepare(call)
    data = read_data(call, of_prompts=any(analyzer.needs.single_texts for analyzer in analyzers.values()))
    result: Any = analyze(opened(call), data, analyzers, **options)
    if isinstance(result, Path):
        settled = analyzer_settings(analyzers) | {"pack": data.pack}
        print_files({"Shard": result, "Config": write_run_file(result.parent, f"{result.stem}.yaml", call, settled)})
        return
    print_run(result)
    write_report(call, result, analyzers)


def two_model_arguments(model_a: str, model_b: str) -> None:
    """Declares the options for the two models of `compare`.

    Args:
        model_a: folder or hub name of a Hugging Face model; demo and demo-aligned are models that ship with this package.
        model_b: the second model, with the same tokenizer. Widths and depths may differ.
    """


@command(
    "compare",
    {
        "Model": (two_model_arguments, named_model, "open_model"),
        "Data": (named_data, "Data"),
        "Measures": (analyzer_options, "compare"),
        "Run": (config_option,),
        "Output": (report_file_options,),
    },
    without=["model", "layers", "unembed"],
    analyzers=["cka"],
)
def compare_models(call: CommandCall) -> None:
    """Compare the layers of two models on the same data.

    Examples:
    tl-layersim compare demo demo-aligned
    tl-layersim compare gpt2 gpt2-medium --analyzers cka,mutual_knn
    tl-layersim compare base/ tuned/ --analyzers cka --at attn_out
    """
    from .. import compare
    from ..engine.run_arguments import refuse_no_comparison

    analyzers = chosen_analyzers(call)
    refuse_no_comparison(analyzers)
    prepare(call)
    data = read_data(call)
    result: Any = compare(opened(call, "model_a"), opened(call, "model_b"), data, analyzers, **call.of("compare"))
    print_run(result)
    write_report(call, result, analyzers)


@command(
    "exits",
    {
        "Model": (named_model, "open_model"),
        "Data": (named_data, "Data"),
        "Measures": ("ExitCurve", "analyze"),
        "Run": (config_option,),
        "Output": (report_file_options,),
    },
    without=["blocking", "shard", "save_to", "first", "at", "per_head", "baseline"],
)
def measure_exits(call: CommandCall) -> None:
    """Measure early exit at many thresholds, and recommend one.

    Examples:
    tl-layersim exits demo-aligned
    tl-layersim exits gpt2 --data text.txt --agreement 0.98 --intervals
    tl-layersim exits tuned/ --heads tuned/heads.safetensors
    """
    from .. import ExitCurve, analyze

    curve = ExitCurve(**call.of("ExitCurve"))
    prepare(call)
    data = read_data(call)
    result: Any = analyze(opened(call), data, [curve], **call.of("analyze"))
    print_run(result)
    _print_curve(result["exit_curve"], curve.agreement)
    write_report(call, result)


def _print_curve(curve: Any, agreement: float) -> None:
    from ..core.wording import MEANING_OF_MARGINS

    chosen = curve.lowest_threshold(agreement)
    shows_all = len(curve.thresholds) <= MOST_ROWS
    rows = []
    for threshold in curve.thresholds:
        if shows_all or threshold in SHOWN or threshold == chosen:
            rows.append(_threshold_row(curve, threshold, MARK if threshold == chosen else ""))
    title = "Early exit by threshold of the top probability; speed-up in blocks"
    margins = f"; {MEANING_OF_MARGINS}" if curve.has_intervals else ""
    print_table(CURVE_COLUMNS, rows, title + margins, numbers=CURVE_COLUMNS[:5])
    if chosen is None:
        print(f"No measured threshold reaches an agreement of {agreement:g}. Measure higher thresholds with --thresholds.")
        return
    point = curve.at(chosen, held_out=True)
    if math.isnan(point.speedup):
        print(
            f"{MARK} Recommended: threshold {chosen:g}. This and all higher thresholds have an agreement of {agreement:g} or "
            "more on the texts on which it was chosen; no other texts were measured. The cost of exit checks is not included."
        )
    else:
        print(
            f"{MARK} Recommended: threshold {chosen:g}. On one half of the texts, this and all higher thresholds have an "
            f"agreement of {agreement:g} or more. On the other half, {point.speedup:.3g} times fewer blocks run, with an "
            f"agreement of {point.agreement:.4g}. The cost of exit checks is not included."
        )
    if chosen == curve.thresholds[-1] == 1:
        print("At threshold 1 no position exits early, so early exit saves nothing at this agreement.")


def _threshold_row(curve: Any, threshold: float, note: str) -> list[str]:
    """Table row of one threshold, with ± if the run has intervals."""
    from ..core.intervals import margin_text

    index = curve.thresholds.index(threshold)
    cells = []
    for name in CURVE_NUMBERS:
        margin = math.nan
        if curve.has_intervals:
            interval = curve.interval(name)
            margin = float(interval.high[index] - interval.low[index]) / 2
        cells.append(margin_text(float(getattr(curve, name)[index]), margin))
    return [f"{threshold:g}", *cells, note]


def timing_option(*, time: bool = False) -> None:
    """Declares the option for the timing of `estimate`.

    Args:
        time: load the weights and time one batch. Without this option, only the configuration is read.
    """


@command(
    "estimate",
    {"Model": (named_model, "open_model"), "Measures": (analyzer_options,), "Run": ("estimate", timing_option)},
    without=["server", "layers", "unembed", "verify"],
)
def estimate_cost(call: CommandCall) -> None:
    """Estimate FLOPs, memory and traffic of a report.

    Examples:
    tl-layersim estimate gpt2 --tokens 1000000
    tl-layersim estimate meta-llama/Llama-3.1-70B --analyzers logit_lens
    tl-layersim estimate gpt2 --time --device cuda
    """
    from .. import demo_model, estimate, open_model
    from ..sources.load_by_name import refuse_missing_device

    analyzers = chosen_analyzers(call)
    model = call.options["model"]
    if call.options["time"]:
        refuse_missing_device(call.options["device"] or "cpu")
        model = named_model(model, **call.of(named_model, without=["model", "remote"]))
    else:
        call.refuse(("device", "dtype", "trust_remote_code"), "without `time`: only the configuration is read")
        if is_demo(model):
            model = demo_model(aligned=model == ALIGNED).config
    cost = estimate(open_model(model, **call.of("open_model")), analyzers, **call.of("estimate"))
    print(printable(cost.title))
    print_table(("cost", "estimate"), cost.rows(), "Cost of the run")
