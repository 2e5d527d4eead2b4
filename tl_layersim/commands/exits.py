"""`tl-layersim exits`: the exit curve of a model, and the threshold that keeps a wanted agreement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import LayersimError
from ..core.intervals import margin_text
from ..core.wording import MEANING_OF_MARGINS
from . import options as o
from .inputs import as_data, named_data, named_model, names_of, server_of
from .output import chosen_formats, make_folder, noted, print_run, settled_options, write_report
from .tables import print_table

AgreementOption = Annotated[
    float,
    o.option(
        o.MEASURES,
        "X",
        "Least agreement with the full model, 0 to 1; the lowest threshold that keeps it is recommended.",
        "--agreement",
    ),
]
ThresholdsOption = Annotated[
    str | None,
    o.option(o.MEASURES, "NUMBERS", "Thresholds, separated by commas. Default: 29 from 0 to 1, more near 1.", "--thresholds"),
]
HeadsOption = Annotated[
    Path | None, o.option(o.MEASURES, "FILE", "Exit heads, as training with multi-head writes them.", "--heads")
]
# Beside the recommended threshold.
MARK = "*"
# Of many thresholds, the table shows these and the recommended one.
MOST_ROWS = 15
SHOWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
CURVE_NUMBERS = ("speedup", "agreement", "accuracy", "perplexity")
CURVE_COLUMNS = ("threshold", "speed-up", "agreement", "accuracy", "perplexity", "")


def measure_exits(
    context: typer.Context,
    model: o.ModelArgument = "demo",
    device: o.DeviceOption = "cpu",
    dtype: o.DtypeOption = o.Dtype.float32,
    trust_remote_code: o.TrustOption = False,
    remote: o.RemoteOption = False,
    server: o.ServerOption = None,
    data: o.DataOption = None,
    split: o.SplitOption = "test",
    column: o.ColumnOption = None,
    max_tokens: o.MaxTokensOption = 65536,
    seq_len: o.SeqLenOption = None,
    pack: o.PackOption = None,
    skip_first: o.SkipFirstOption = 0,
    agreement: AgreementOption = 0.95,
    thresholds: ThresholdsOption = None,
    heads: HeadsOption = None,
    intervals: o.IntervalsOption = False,
    config: o.ConfigOption = None,
    batch_size: o.BatchSizeOption = 16,
    checkpoint: o.CheckpointOption = None,
    out: o.OutOption = o.OUT,
    format: o.FormatOption = "html",
) -> None:
    """Measure early exit at many thresholds, and recommend one."""
    from .. import ExitCurve, analyze
    from ..models.named_model import refuse_missing_device

    chosen_formats(format)
    place = server_of(context)
    if not place:
        refuse_missing_device(device)
    if not 0 <= agreement <= 1:
        raise LayersimError(
            "`--agreement` must be between 0 and 1.",
            given=f"--agreement {agreement:g}",
            expected="a fraction of positions",
            do=f"--agreement {agreement / 100:g}" if 1 < agreement <= 100 else "--agreement 0.95",
        )
    settings: dict[str, Any] = {"heads": heads} | ({} if thresholds is None else {"thresholds": _threshold_list(thresholds)})
    curve = ExitCurve(**settings)
    make_folder(out)
    source = named_data(data, split)
    opened = named_model(model, context.params, place, "MODEL")
    read = as_data(source, context.params, opened)
    report: Any = analyze(opened, read, [curve], intervals=intervals, checkpoint=checkpoint)
    print_run(report["exit_curve"])
    _print_curve(report["exit_curve"], agreement)
    settled = settled_options(report) | {"thresholds": ",".join(map(str, report["exit_curve"].thresholds))}
    write_report(context, noted(report, trust_remote_code=trust_remote_code), settled)


def _print_curve(curve: Any, agreement: float) -> None:
    """Print speed-up and agreement by threshold, and the recommended threshold."""
    chosen = curve.lowest_threshold(agreement)
    short = len(curve.thresholds) <= MOST_ROWS
    shown = [number for number in curve.thresholds if short or number in SHOWN or number == chosen]
    rows = [_row(curve, threshold, MARK if threshold == chosen else "") for threshold in shown]
    title = "Early exit by threshold of the top probability; speed-up in blocks"
    margins = f"; {MEANING_OF_MARGINS}" if curve.has_intervals else ""
    print_table(CURVE_COLUMNS, rows, title + margins, numbers=CURVE_COLUMNS[:5])
    if chosen is None:
        typer.echo(f"No measured threshold reaches an agreement of {agreement:g}: measure higher ones with --thresholds.")
        return
    point = curve.at(chosen, held_out=True)
    typer.echo(
        f"{MARK} Recommended: threshold {chosen:g}, the lowest from which on agreement stays at {agreement:g} or above in one "
        f"half of the rows. In the other half: {point.speedup:.3g} times fewer blocks, agreement {point.agreement:.4g}. The "
        "cost of exit checks is not included."
    )
    if chosen == curve.thresholds[-1] == 1:
        typer.echo("At threshold 1 no position exits early: this model gains nothing at this agreement.")


def _row(curve: Any, threshold: float, note: str) -> list[str]:
    """The numbers at one threshold, with half the width of their intervals where the run kept blocks."""
    place = curve.thresholds.index(threshold)
    cells = []
    for name in CURVE_NUMBERS:
        margin = math.nan
        if curve.has_intervals:
            found = curve.interval(name)
            margin = float(found.high[place] - found.low[place]) / 2
        cells.append(margin_text(float(getattr(curve, name)[place]), margin))
    return [f"{threshold:g}", *cells, note]


def _threshold_list(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in names_of([text]))
    except ValueError:
        raise LayersimError(
            "`--thresholds` must be numbers, separated by commas.",
            given=f"--thresholds {text}",
            expected="probabilities, 0 to 1",
            do="--thresholds 0.5,0.9,0.99,1",
        ) from None
