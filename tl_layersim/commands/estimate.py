"""`tl-layersim estimate`: the cost of a run before it starts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.errors import LayersimError
from . import options as o
from .command import in_options
from .inputs import ALIGNED, chosen_analyzers, is_demo, loaded_model, names_of
from .run_file import is_set
from .tables import print_table

TokensOption = Annotated[int, o.option(o.DATA, "N", "Number of tokens of the run.", "--tokens")]
LengthOption = Annotated[int, o.option(o.DATA, "N", "Tokens in a row.", "--seq-len")]
DevicesOption = Annotated[
    str | None,
    o.option(o.RUN, "NxGPU", "Number and name of GPUs, such as 8xH100, whose stated speed gives the time.", "--devices"),
]
TimeOption = Annotated[
    bool, o.option(o.RUN, None, "Load the weights and time one batch. Without it only the configuration is read.", "--time")
]


def estimate_cost(
    context: typer.Context,
    model: o.ModelArgument = "demo",
    device: o.DeviceOption = "cpu",
    dtype: o.DtypeOption = o.Dtype.float32,
    trust_remote_code: o.TrustOption = False,
    remote: o.RemoteOption = False,
    tokens: TokensOption = 1_000_000,
    seq_len: LengthOption = 256,
    analyzers: o.AnalyzersOption = "cosine,cka",
    option: o.AnalyzerOptions = None,
    at: o.AtOption = None,
    per_head: o.PerHeadOption = False,
    intervals: o.IntervalsOption = False,
    batch_size: o.BatchSizeOption = 16,
    tokens_per_request: o.RequestOption = None,
    devices: DevicesOption = None,
    time: TimeOption = False,
) -> None:
    """Estimate FLOPs, memory and time of a report before the run."""
    from .. import estimate
    from ..analysis.site_plan import DEFAULT
    from ..models.named_model import refuse_missing_device
    from ..models.open import OpenedModel

    for name in ("device", "dtype", "trust_remote_code") if not time else ():
        if is_set(context, name):
            raise LayersimError(
                f"`--{name.replace('_', '-')}` has no effect without `--time`: only the configuration of the model is read.",
                given=f"--{name.replace('_', '-')} {context.params[name]}",
                expected="--time with it",
                do="--time, or --devices 1xH100 for the stated speed of a GPU",
            )
    refuse_missing_device(device)
    chosen = chosen_analyzers(context)
    given = loaded_model(model, context.params, option="MODEL") if time else _without_weights(model)
    opened = OpenedModel(given, remote=remote, tokens_per_request=tokens_per_request)
    keywords: dict[str, Any] = {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size, "intervals": intervals}
    keywords |= {"at": names_of(at) if at else DEFAULT, "per_head": per_head, "devices": devices}
    try:
        cost = estimate(opened, chosen, **keywords)
    except LayersimError as error:
        raise in_options(error, {"model_or_config": "MODEL"}) from error
    typer.echo(cost.title)
    print_table(("cost", "estimate"), cost.rows(), "Cost of the run")


def _without_weights(name: str) -> Any:
    """The name of a model, or the configuration of a demo model."""
    from .. import demo_model

    return demo_model(aligned=name == ALIGNED).config if is_demo(name) else name
