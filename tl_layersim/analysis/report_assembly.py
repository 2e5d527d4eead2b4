"""From sums to a report: each analyzer's result, with the record of what was measured on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..analyzers.base import Analyzer, Run
from ..core.errors import LayersimError
from ..core.provenance import Provenance
from ..core.results import Report, Result
from ..core.sums import Sums
from ..core.tally import Tally
from ..models.model_info import Model

PACKAGES = ("tl_layersim", "torch", "transformers", "transformer-lens", "nnsight", "datasets")


def make_report(
    analyzers: Mapping[str, Analyzer],
    models: Sequence[Model],
    tally: Tally,
    sums: Mapping[str, Sums],
    first: Mapping[str, Sums],
    data_options: Mapping[str, Any],
) -> Report:
    """Results of all analyzers from their sums."""
    if tally.tokens == 0:
        raise LayersimError(
            "There is nothing to measure: the data is empty." if tally.sequences == 0 else "No token is left to measure.",
            given=f"{tally.sequences} rows, 0 counted tokens",
            expected="at least one row with a token that is not masked",
            do="check the data" if tally.sequences == 0 else "check the attention mask and skip_first=",
        )

    results = {}
    for name, analyzer in analyzers.items():
        options = {**analyzer.options(), **data_options}
        provenance = record(models, tally, options, getattr(analyzer, "seed", None))
        run = Run(models[0].layers, models[-1].layers, provenance, first.get(name, Sums()), models[0].head, models[0].stream)
        result = analyzer.compute(sums[name], run)
        if not isinstance(result, Result):
            raise LayersimError(
                f"{type(analyzer).__name__}.compute returned no result.",
                given=type(result).__name__,
                expected="a Result, such as LayerCurve or LayerMatrix",
                do="return tl_layersim.core.LayerCurve(values=..., layers=run.layers, provenance=run.provenance)",
            )
        results[name] = result
    return Report(results)


def record(models: Sequence[Model], tally: Tally, options: Mapping[str, Any], seed: int | None) -> Provenance:
    """What was measured on what."""

    def both(values: list[str]) -> str:
        return " | ".join(values)

    return Provenance(
        model=both([m.name for m in models]),
        config_hash=both([m.config_hash for m in models]),
        weights_hash=both([m.weights_hash for m in models]),
        source=both([m.source for m in models]),
        basis=both([m.basis for m in models]),
        dtype=both([m.dtype for m in models]),
        data=tally.digest,
        tokens=tally.tokens,
        sequences=tally.sequences,
        batches=tally.batches,
        seed=seed,
        options=dict(options),
        versions=_versions(),
        seconds=tally.seconds,
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
