"""Non-blocking runs on servers: what their jobs compute, and how runs are saved to a file and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from ..analyzers import find_analyzers
from ..analyzers.base import Analyzer, code_digest
from ..architectures.unembed import Head
from ..core.errors import LayersimError
from ..core.field_types import refuse_other_types
from ..core.sums import Sums
from ..data.batches import Batch
from ..models.model_info import Model
from ..models.pools import AnyKernel
from ..models.source import PartialSums
from .engine import Step
from .validation import AnalyzersArgument, choose_analyzers


@dataclass
class Job:
    """A request that was sent to a server, with its state and its sums.

    Attributes:
        id: name of the job on the server.
        batches: data of the request; empty once its sums have arrived.
        steps: counts of the tally after each of its batches.
        parts: sums that were returned.
        state: last state that the server reported; ERROR also for a reply that cannot be read.
        failure: reason of the failure.
        halve: whether the job exceeded the server's time limit.
        final: an error that another attempt would not change.
        attempts: number of times that the request was sent.
        silent_since: time since which the server does not know the job.
    """

    id: str
    batches: list[Batch]
    steps: list[Step]
    parts: list[PartialSums] = field(default_factory=list)
    state: str = "SENT"
    failure: str = ""
    halve: bool = False
    final: Exception | None = None
    attempts: int = 1
    silent_since: float | None = None


@dataclass(frozen=True)
class SubmittedAnalysis:
    """The model, analyzers and settings of a non-blocking run, from which its report is made.

    Attributes:
        model: description of the model.
        sites: names of all sites that the requests read.
        models: by analyzer, the model with the sites that the analyzer reads.
        analyzers: by name.
        kernels: of the analyzers, of views of all sites.
        first: sums of the first pass, by analyzer.
        settings: how data and model were opened.
        record: when and where the jobs were sent, and the traffic so far.
    """

    model: Model
    sites: tuple[str, ...]
    models: Mapping[str, Model]
    analyzers: Mapping[str, Analyzer]
    kernels: Mapping[str, AnyKernel]
    first: Mapping[str, Sums]
    settings: Mapping[str, Any]
    record: Mapping[str, Any]


# The model, the sums of the first pass by analyzer, and the jobs.
KeptRun = tuple[Model, dict[str, Sums], list[Job]]


def parsed(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KeptRun:
    """Restore the model, the first-pass sums and the jobs of a saved run; a malformed file may raise any exception."""
    refuse_other_types(_Header, {name: header[name] for name in _Header.__annotations__})
    for recipe in header["analyzers"].values():
        refuse_other_types(_Recipe, {name: recipe[name] for name in _Recipe.__annotations__})
    refuse_other_types(_Record, {name: header["record"][name] for name in _Record.__annotations__})
    for held, names in (
        (header["settings"], ("layers", "unembed")),
        (header["record"]["before"], ("requests", "bytes_sent", "bytes_received")),
    ):
        if missing := set(names) - held.keys():
            raise KeyError(*sorted(missing))
    model = model_of(header["model"])
    first = {name: Sums(_below(f"first/{name}/", tensors)) for name in header["first"]}
    jobs = [_job(number, item, tensors) for number, item in enumerate(header["jobs"])]
    return model, first, jobs


def model_notes(model: Model) -> dict[str, Any]:
    """The description of a model as plain data, without its tokenizer and its processor."""
    plain = {
        f.name: getattr(model, f.name) for f in fields(Model) if f.name not in ("tokenizer", "processor", "head", "weights")
    }
    return plain | {"weights_hash": model.weights_hash, "head": None if model.head is None else asdict(model.head)}


def model_of(notes: Mapping[str, Any]) -> Model:
    """The description of a model from the plain data that `model_notes` made of it."""
    plain = dict(notes)
    head = plain.pop("head")
    if head is not None:
        head = {**head, "parts": tuple(head["parts"])}
        refuse_other_types(Head, head)
        head = Head(**head)
    # Tuples are lists in JSON; a file of 0.1 has the first of these alone.
    plain |= {name: tuple(plain[name]) for name in ("layers", "pads", "starts", "ends", "widths") if name in plain}
    plain["weights"] = plain.pop("weights_hash")
    refuse_other_types(Model, plain)
    return Model(**plain, tokenizer=None, head=head)


def sites_notes(models: Mapping[str, Model]) -> dict[str, Any]:
    """The sites that each analyzer reads as plain data, see `models_read`."""
    return {name: {"layers": own.layers, "stream": own.stream, "widths": own.widths} for name, own in models.items()}


@dataclass
class _Header:
    """Entries of a saved run's file header, beside the model."""

    server: str
    model_key: str
    analyzers: dict[str, Any]
    settings: dict[str, Any]
    record: dict[str, Any]
    first: list[Any]
    jobs: list[Any]


@dataclass
class _Recipe:
    """Entries of the file header for each analyzer."""

    options: dict[str, Any]
    code: str


@dataclass
class _Record:
    """Entries of the file header on the run before it was saved."""

    sent: float
    place: dict[str, Any]
    before: dict[str, int]
    first_block: int | None
    names: list[Any]


def models_read(header: Mapping[str, Any], model: Model) -> dict[str, Model]:
    """By analyzer, the model with the sites that the analyzer reads.

    Args:
        header: of the file. Files of 0.1 name no sites: their analyzers read the residual layers.
        model: with the residual layers.
    """
    models = dict.fromkeys(header["analyzers"], model)
    for name, own in header.get("read", {}).items():
        fields: dict[str, Any] = {"layers": tuple(own["layers"]), "stream": own["stream"], "widths": tuple(own["widths"])}
        refuse_other_types(Model, fields)
        models[name] = replace(model, **fields)
    return models


def _job(number: int, item: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Job:
    batches = []
    for place, kept in enumerate(item["batches"]):
        batches.append(_batch(kept, _below(f"batch/{number}/{place}/", tensors)))
    parts = []
    for place, count in enumerate(item["counts"]):
        out: dict[str, dict[str, Tensor]] = {}
        for key, value in _below(f"part/{number}/{place}/", tensors).items():
            name, _, field_name = key.partition("/")
            out.setdefault(name, {})[field_name] = value
        parts.append(PartialSums(count, [], out))
    steps = [Step(**(dict(zip(Step._fields, step, strict=True)) | {"tokens": tuple(step[3])})) for step in item["steps"]]
    for step in steps:
        refuse_other_types(Step, step._asdict())
    job = Job(item["id"], batches, steps, parts, item["state"], attempts=item["attempts"])
    refuse_other_types(Job, {"id": job.id, "state": job.state, "attempts": job.attempts})
    return job


def facts_of(batch: Batch) -> dict[str, Any]:
    """What the file header stores of a batch, beside its tensors."""
    return {
        "first": batch.first,
        "origins": batch.origins,
        "pooled": batch.pooled,
        "positional": sorted(batch.positional),
        "has_tokens": batch.has_tokens,
        "rows_at_once": batch.rows_at_once,
        "leaf": batch.leaf,
        "capacity": batch.capacity,
        "density": batch.density,
    }


def _batch(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """The batch of these facts and tensors."""
    more = {"origins": tuple((row, start) for row, start in facts["origins"]), "positional": frozenset(facts["positional"])}
    held: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("input/")}
    return Batch(**{**facts, **more}, **held, inputs=_below("input/", tensors))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def recipe_of(analyzer: Analyzer) -> dict[str, Any]:
    """Class, options and code digest of an analyzer, as a file stores them."""
    cls = type(analyzer)
    where = f"{cls.__module__}.{cls.__qualname__}"
    return {"class": where, "options": analyzer.options(), "code": code_digest(analyzer)}


def restored_analyzers(
    recipes: Mapping[str, Any], analyzers: AnalyzersArgument | None, call: str = "lsim.load_run(path, analyzers=[...])"
) -> dict[str, Analyzer]:
    """The analyzers of a run, by name: those that were given, or those that the file describes.

    Args:
        recipes: by name, as the file stores them.
        analyzers: as they were given to `analyze`; None to restore those of this package.
        call: what passes the analyzers, for messages.

    Raises:
        LayersimError: the analyzers given differ from those of the run, or cannot be restored.
    """
    if analyzers is None:
        return {name: _restored(name, recipe, call) for name, recipe in recipes.items()}
    chosen = choose_analyzers(analyzers)
    given = {name: recipe_of(analyzer) for name, analyzer in chosen.items()}
    if given != recipes:
        raise LayersimError(f"`analyzers` are {str(given)[:300]}; those of the saved run are {str(recipes)[:300]}.")
    return chosen


def _restored(name: str, recipe: Mapping[str, Any], call: str) -> Analyzer:
    """An analyzer from the options in a file. Only installed analyzers are restored: no class is imported by a file's name."""
    installed = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in find_analyzers().values()}
    cls = installed.get(recipe["class"])
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in recipe["options"].items()}
    if cls is None:
        restored = None
    else:
        try:
            restored = cls(**options)
        except LayersimError:
            # A tensor of labels is only a digest in the file.
            restored = None
    if restored is None or recipe_of(restored) != recipe:
        raise LayersimError(
            f"The analyzer {name!r} cannot be restored from the file: {recipe['class']} with {recipe['options']}. Use {call}."
        )
    return restored
