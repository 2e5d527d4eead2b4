"""Assembly of a report: the result of each analyzer from its sums, and its provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..analyzers.base import Analyzer, Run
from ..core.blocks import DataBlock
from ..core.data_pass_progress import Tally
from ..core.errors import LayersimError, recorded_warnings
from ..core.provenance import JOINT, OF_MODELS, Provenance
from ..core.results import Report, Result
from ..core.sums import Sums, with_pools
from ..core.wording import brief
from ..models.model_info import Model
from .replicates import blocks_of, replicated, warn_of_drift, warn_of_few
from .size_warnings import warn_of_sizes

PACKAGES = ("tl_layersim", "torch", "transformers", "transformer-lens", "nnsight", "datasets")


def refuse_empty(tally: Tally) -> None:
    """Refuse data without a token to measure.

    Raises:
        LayersimError: no token was counted.
    """
    if tally.tokens == 0:
        raise LayersimError(
            "`data` is empty. A generator can be read only once: pass list(data)."
            if tally.sequences == 0
            else f"`data` has no token to measure: all tokens of its {tally.sequences} rows are masked, or left out by "
            "`skip_first` or `positions`."
        )


def make_report(
    analyzers: Mapping[str, Analyzer],
    models_of: Mapping[str, Sequence[Model]],
    tally: Tally,
    sums: Mapping[str, Sums],
    first: Mapping[str, Sums],
    data_options: Mapping[str, Any],
    blocks: Sequence[DataBlock] | None = None,
) -> Report:
    """The results of all analyzers.

    Args:
        analyzers: by name.
        models_of: by analyzer, the model with the sites that it read, or those that were compared.
        tally: counts of the data, and its digest.
        sums: of the main pass, by analyzer, those over pools of rows apart.
        first: of the first pass, by analyzer.
        data_options: how the data was read, for the provenance.
        blocks: of the main pass, for intervals; None for none.

    Raises:
        LayersimError: no token was counted, or an analyzer refuses its sums.
    """
    refuse_empty(tally)
    own_blocks = {} if blocks is None else {name: blocks_of(blocks, name) for name in analyzers}
    few = warn_of_few(own_blocks)
    large = warn_of_sizes(analyzers, models_of, sums, data_options)
    results = {}
    for name, analyzer in analyzers.items():
        options = {**analyzer.options(), **data_options}
        models = models_of[name]
        provenance = record(models, tally, options, getattr(analyzer, "seed", None))
        about = (first.get(name, Sums()), models[0].head, models[0].stream, tuple(models))
        run = Run(models[0].layers, models[-1].layers, provenance, *about)
        with recorded_warnings() as given:
            result = analyzer.compute(with_pools(sums, name), run)
            if not isinstance(result, Result):
                raise LayersimError(f"{type(analyzer).__name__}.compute returned {brief(result)}; it must return a Result.")
            if name in own_blocks:
                result = replicated(result, analyzer, run, name, own_blocks[name])
        given += [few[name]] if name in few else []
        given += large[name]
        results[name] = replace(result, provenance=replace(result.provenance, warnings=tuple(dict.fromkeys(given))))
    for name, text in warn_of_drift(results).items():
        said = results[name].provenance
        results[name] = replace(results[name], provenance=replace(said, warnings=(*said.warnings, text)))
    return Report(results)


def record_of_models(models: Sequence[Model]) -> dict[str, Any]:
    """The fields of a provenance that describe models, those of several models joined."""
    attributes = dict(zip(OF_MODELS, ("name", *OF_MODELS[1:]), strict=True))
    values = {field: [getattr(model, name) for model in models] for field, name in attributes.items()}
    # Of models without changes nothing is said.
    return {field: JOINT.join(own) if field != "changes" or any(own) else "" for field, own in values.items()}


def record(models: Sequence[Model], tally: Tally, options: Mapping[str, Any], seed: int | None) -> Provenance:
    """The provenance of a result: models, data, options and versions."""
    return Provenance(
        **record_of_models(models),
        data=tally.digest,
        tokens=tally.tokens,
        sequences=tally.sequences,
        batches=tally.batches,
        seed=seed,
        options=dict(options),
        versions=dict(_installed()),
        seconds=tally.seconds,
    )


@cache
def _installed() -> Mapping[str, str]:
    """The versions of the packages that a result records; they are read from files, once."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
