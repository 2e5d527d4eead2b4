"""`tl-layersim compare`: the layers of two models that read the same tokens."""

from __future__ import annotations

from typing import Any

import typer

from ..core.errors import LayersimError
from . import options as o
from .inputs import as_data, chosen_analyzers, measuring, named_data, named_model, server_of
from .output import chosen_formats, make_folder, noted, print_run, settled_options, write_report


def compare_models(
    context: typer.Context,
    model_a: o.FirstModel,
    model_b: o.SecondModel,
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
    positions: o.PositionsOption = None,
    analyzers: o.AnalyzersOption = "cka",
    option: o.AnalyzerOptions = None,
    at: o.AtOption = None,
    per_head: o.PerHeadOption = False,
    intervals: o.IntervalsOption = False,
    baseline: o.BaselineOption = None,
    config: o.ConfigOption = None,
    batch_size: o.BatchSizeOption = 16,
    checkpoint: o.CheckpointOption = None,
    out: o.OutOption = o.OUT,
    format: o.FormatOption = "html",
) -> None:
    """Compare the layers of two models on the same data."""
    from .. import compare
    from ..models.named_model import refuse_missing_device

    chosen_formats(format)
    place = server_of(context)
    if not place:
        refuse_missing_device(device)
    chosen = chosen_analyzers(context)
    _refuse_no_comparison(chosen)
    make_folder(out)
    source = named_data(data, split)
    named = ((model_a, "MODEL_A"), (model_b, "MODEL_B"))
    a, b = (named_model(name, context.params, place, option) for name, option in named)
    result: Any = compare(a, b, as_data(source, context.params), chosen, **measuring(context.params))
    print_run(next(iter(result.values())))
    write_report(context, noted(result, trust_remote_code=trust_remote_code), settled_options(result, chosen))


def _refuse_no_comparison(analyzers: list[Any]) -> None:
    """Refuse analyzers that do not compare two models, before models are loaded."""
    from .. import find_analyzers

    able = sorted(name for name, cls in find_analyzers().items() if cls.compares)
    for analyzer in analyzers:
        if not analyzer.compares:
            raise LayersimError(
                f"`--analyzers` names {analyzer.name}, which cannot compare two models.",
                given=analyzer.name,
                expected=f"names among {', '.join(able)}",
                do=f"--analyzers {able[0]}; tl-layersim report measures one model with {analyzer.name}",
            )
