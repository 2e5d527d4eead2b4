"""`RemoteRun`: an analysis whose requests were all sent to a server, to be collected later or in another process."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ..activations.row_pools import AnyKernel
from ..analyzers import find_analyzers
from ..analyzers.analyzer import Analyzer, code_digest
from ..architectures.unembed import Head, Pool
from ..core.arguments import typed
from ..core.errors import LayersimError, shown, without_secrets
from ..core.results import Report
from ..core.resumable_file import ResumableFile
from ..core.storage import refuse_other_types
from ..core.sums import Sums, SumTree, Tally
from ..data.batches import Batch
from ..remote.client import NdifClient
from ..remote.failures import TransientFailure
from ..remote.open import on_server, open_source
from ..remote.source import RemoteSource
from ..remote.traces import partial_sums
from ..sources.checks import refuse_not_finite
from ..sources.model import Model
from ..sources.open import OpenedModel
from ..sources.source import PartialSums
from .chosen_analyzers import AnalyzersArgument, choose_analyzers
from .plan import SiteChoice, SitePlan
from .report_assembly import make_report, refuse_empty
from .run import DataPass, PassState, Step
from .shards import FIRST


@dataclass
class Job:
    """A request that was sent to a server, with its state and its sums.

    Attributes:
        id: name of the job on the server.
        batches: batches of the request; empty once its sums have arrived.
        steps: counts of the tally after each batch.
        parts: sums that the server returned.
        state: last state that the server reported; also ERROR if a reply cannot be read.
        failure: reason of the failure.
        halve: whether the job exceeded the server's time limit, and is to be sent again as two jobs.
        final: whether another attempt would fail with the same error.
        attempts: number of times that the request was sent.
        silent_since: time since which the server no longer knows the job.
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
    """Model, analyzers and settings from which the report of a non-blocking run is computed.

    Attributes:
        model: description of the model.
        sites: names of all sites that the requests read.
        models: by analyzer, the model with the sites that the analyzer reads.
        analyzers: the analyzers, by name.
        kernels: kernels of the analyzers, as kernels of views of all sites.
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
    """The description of a model, from the plain data of `model_notes`."""
    plain = dict(notes)
    head = plain.pop("head")
    if head is not None:
        pool = head["pool"]
        head = {**head, "parts": tuple(tuple(part) if isinstance(part, list) else part for part in head["parts"])}
        head["pool"] = None if pool is None else Pool(**{**pool, "single": tuple(pool["single"])})
        refuse_other_types(Head, head)
        head = Head(**head)
    # Tuples are lists in JSON.
    plain |= {name: tuple(plain[name]) for name in ("layers", "pads", "starts", "ends", "widths")}
    plain["weights"] = plain.pop("weights_hash")
    refuse_other_types(Model, plain)
    return Model(**plain, tokenizer=None, head=head)


def sites_notes(models: Mapping[str, Model]) -> dict[str, Any]:
    """The sites that each analyzer reads, as plain data; see `models_read`."""
    return {name: {"layers": own.layers, "stream": own.stream, "widths": own.widths} for name, own in models.items()}


@dataclass
class _Header:
    """File header of a saved run, without the model."""

    server: str
    model_key: str
    sites: list[Any]
    read: dict[str, Any]
    analyzers: dict[str, Any]
    settings: dict[str, Any]
    record: dict[str, Any]
    first: list[Any]
    jobs: list[Any]


@dataclass
class _Recipe:
    """File header of a saved run: the entries for each analyzer."""

    options: dict[str, Any]
    code: str


@dataclass
class _Record:
    """File header of a saved run: the entries on the time before it was saved."""

    sent: float
    place: dict[str, Any]
    before: dict[str, int]
    first_block: int | None
    names: list[Any]


def models_read(header: Mapping[str, Any], model: Model) -> dict[str, Model]:
    """The model with the sites that each analyzer reads, by analyzer.

    Args:
        header: header of the file.
        model: the model with the residual layers.
    """
    models = {}
    for name, own in header["read"].items():
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
    """The facts on a batch that the file header stores, beside its tensors."""
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
    """A batch, from its facts and tensors."""
    more = {"origins": tuple((row, start) for row, start in facts["origins"]), "positional": frozenset(facts["positional"])}
    held: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("input/")}
    return Batch(**{**facts, **more}, **held, inputs=_below("input/", tensors))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def recipe_of(analyzer: Analyzer) -> dict[str, Any]:
    """Class, options and code digest of an analyzer, in the form that a file stores."""
    cls = type(analyzer)
    where = f"{cls.__module__}.{cls.__qualname__}"
    return {"class": where, "options": analyzer.options(), "code": code_digest(analyzer)}


def restored_analyzers(
    recipes: Mapping[str, Any], analyzers: AnalyzersArgument | None, call: str = "lsim.load_run(path, analyzers=[...])"
) -> dict[str, Analyzer]:
    """The analyzers of a run by name, as given by the user or as described in the file.

    Args:
        recipes: descriptions of the analyzers by name, in the form that a file stores.
        analyzers: the analyzers as they were given to `analyze`; None to restore the analyzers of this package.
        call: the call that passes the analyzers, for messages.

    Raises:
        LayersimError: the given analyzers differ from the analyzers of the run, or cannot be restored.
    """
    if analyzers is None:
        return {name: _restored(name, recipe, call) for name, recipe in recipes.items()}
    chosen = choose_analyzers(analyzers)
    given = {name: recipe_of(analyzer) for name, analyzer in chosen.items()}
    if given != recipes:
        raise LayersimError(f"`analyzers` are {str(given)[:300]}; the analyzers of the saved run are {str(recipes)[:300]}.")
    return chosen


def _restored(name: str, recipe: Mapping[str, Any], call: str) -> Analyzer:
    """An analyzer from the options in a file. Only installed analyzers are restored; a file cannot import a class."""
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


# Positions in a request where the user sets no `tokens_per_request`: no forward pass was timed yet.
TOKENS_PER_REQUEST = 8192
# Seconds between two polls of the jobs, and until a job that the server does not know counts as lost.
PAUSE = 1.0
FORGOTTEN = 60.0
# How often a failed job is sent again, unless it was too long.
ATTEMPTS = 5
KIND = "remote_run"


class RemoteRun:
    """An analysis that runs on an NDIF server; `analyze(open_model(model, remote=True), ..., blocking=False)` returns one.

    It holds no API key: the process that collects it uses the key that nnsight is set to there.

    Attributes:
        server: address of the server.
        analyzers: the analyzers, by name.

    Examples:
        >>> run = lsim.analyze(lsim.open_model(model, remote=True), texts, [lsim.CKA()], blocking=False)  # doctest: +SKIP
        >>> run.save("cka.run")  # doctest: +SKIP
        >>> report = lsim.load_run("cka.run").result()  # doctest: +SKIP
    """

    def __init__(
        self, analysis: SubmittedAnalysis, jobs: list[Job], ndif: NdifClient, source: RemoteSource | None = None
    ) -> None:
        self.server, self.analyzers = ndif.name, dict(analysis.analyzers)
        self._analysis, self._jobs, self._ndif, self._source = analysis, jobs, ndif, source
        self._unreached: tuple[float, str] | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state.lower()}" for state, number in sorted(self._count().items()))
        return f"RemoteRun({self._analysis.model.name} at {self.server}: {len(self._jobs)} jobs, {states})"

    def _count(self) -> Counter[str]:
        return Counter(job.state for job in self._jobs)

    def status(self) -> dict[str, int]:
        """Number of jobs in each state: QUEUED, RUNNING, COMPLETED, ERROR ... Fetches the sums of completed jobs."""
        for job in self._jobs:
            if job.state not in ("COMPLETED", "ERROR"):
                self._poll(job)
        return dict(self._count())

    def result(self, timeout: float | None = None) -> Report:
        """Wait for all jobs, and compute the report from their sums.

        A job that was too long for the server, or that the server has lost, is sent again (as two jobs, if it was too long)
        where the model is loaded: in the process that sent it, or after `load_run(path, model=...)`.

        Args:
            timeout: largest number of seconds to wait; None for no limit.

        Raises:
            TimeoutError: the time is over; sums that have arrived are kept.
            LayersimError: a job failed and cannot be sent again, or the server cannot be reached; sums that have arrived are
                kept.
        """
        end = None if timeout is None else time.monotonic() + timeout
        total = sum(sum(step.tokens) for job in self._jobs for step in job.steps)
        with tqdm(desc="jobs", unit="token", unit_scale=True, total=total, disable=None) as bar:
            while True:
                states = self.status()
                done = sum(sum(step.tokens) for job in self._jobs if job.state == "COMPLETED" for step in job.steps)
                bar.update(done - bar.n)
                bar.set_postfix_str(", ".join(f"{number} {state.lower()}" for state, number in sorted(states.items())))
                if states.get("COMPLETED") == len(self._jobs):
                    break
                for job in [job for job in self._jobs if job.state == "ERROR"]:
                    self._send_again(job)
                self._refuse_silent_server()
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(f"{self!r} after {timeout} s. Nothing is lost: call result() again, or save(path).")
                time.sleep(PAUSE)
        return self._report()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the run to a file: names of its jobs, sums that arrived, and tokens of the jobs that are not complete."""
        tensors: dict[str, Tensor] = {}
        jobs = []
        for number, job in enumerate(self._jobs):
            for place, batch in enumerate(job.batches):
                for name, value in (("tokens", batch.tokens), ("attention", batch.attention), ("counted", batch.counted)):
                    tensors[f"batch/{number}/{place}/{name}"] = value
                if batch.labels is not None:
                    tensors[f"batch/{number}/{place}/labels"] = batch.labels
                tensors |= {f"batch/{number}/{place}/input/{name}": value for name, value in batch.inputs.items()}
            for place, part in enumerate(job.parts):
                for name, sums in part.out.items():
                    tensors |= {f"part/{number}/{place}/{name}/{key}": value for key, value in sums.items()}
            jobs.append(
                {
                    "id": job.id,
                    # A refusal is not written: the next process gets it from the server again.
                    "state": "SENT" if job.state == "ERROR" else job.state,
                    "attempts": job.attempts,
                    "batches": [facts_of(batch) for batch in job.batches],
                    "steps": [list(step) for step in job.steps],
                    "counts": [part.count for part in job.parts],
                }
            )
        for name, held in self._analysis.first.items():
            tensors |= {f"first/{name}/{key}": value for key, value in held.fields.items()}
        header = {
            "server": self.server,
            "model": model_notes(self._analysis.model),
            "sites": list(self._analysis.sites),
            "read": sites_notes(self._analysis.models),
            "model_key": without_secrets(self._ndif.model_key),
            "analyzers": {name: recipe_of(analyzer) for name, analyzer in self.analyzers.items()},
            "settings": self._analysis.settings,
            "first": list(self._analysis.first),
            "jobs": jobs,
            "record": {**self._analysis.record, "before": self._traffic()},
            "version": version("tl_layersim"),
        }
        ResumableFile(path, KIND).write(header, tensors)
        return Path(path)

    def _poll(self, job: Job) -> None:
        """Ask the server for the state of a job, and for its sums if it is complete."""
        reply, now = self._ndif.poll(job.id), time.monotonic()
        if not reply.reached:
            self._unreached = self._unreached or (now, reply.failure)
            return
        self._unreached = None
        if reply.state is None:
            job.silent_since = job.silent_since or now
            if now - job.silent_since > FORGOTTEN:
                job.state, job.failure = "ERROR", "the server does not know it"
            return
        job.state, job.silent_since, job.failure = reply.state, None, reply.failure
        job.halve, job.final = reply.halve, reply.final
        if reply.state != "COMPLETED":
            return
        try:
            parts = partial_sums((reply.result or {}).get("found") or [])
            for part in parts:
                refuse_not_finite(part.not_finite, [self._analysis.sites], f"job {job.id}")
        except LayersimError as error:
            job.state, job.failure, job.final = "ERROR", str(error), error
            return
        except (AttributeError, TypeError, ValueError) as error:
            job.state, job.failure = "ERROR", f"its result has another form ({error})"
            return
        if sum(part.count for part in parts) != sum(batch.leaf_rows for batch in job.batches):
            job.state, job.failure = "ERROR", "its result is not complete"
            return
        job.parts, job.batches = parts, []

    def _refuse_silent_server(self) -> None:
        """Raise an error if the server has been unreachable for longer than the client's limit."""
        if self._unreached is not None and time.monotonic() - self._unreached[0] > self._ndif.patience:
            raise self._ndif.failures.given_up(TransientFailure(self._unreached[1]), 1)

    def _send_again(self, job: Job) -> None:
        """Send a failed job again, as two jobs if it took too long."""
        if job.final is not None:
            raise job.final
        single = job.halve and len(job.batches) == 1
        often = job.attempts > ATTEMPTS
        if self._source is None or single or often:
            rows = len(job.batches[0].tokens)
            why = "and one forward pass cannot be split" if single else "and cannot be sent again without the model"
            remedy = (
                f"Use batch_size={max(1, rows // 2)} in a new analysis." if single else "Use lsim.load_run(path, model=model)."
            )
            raise LayersimError(
                f"A job on the server failed, {f'{job.attempts} times' if often else why}: {job.failure} (job {job.id}). "
                f"{remedy}"
            )
        if not self._source.is_settled:
            # A source that `load_run` opened has run nothing yet.
            self._source.settle(job.batches[0])
        half = 1 << ((len(job.batches) - 1).bit_length() - 1) if job.halve else len(job.batches)
        state, attempts = PassState(Tally(), (), deque(job.steps)), 1 if job.halve else job.attempts + 1
        fresh = []
        for piece in (job.batches[:half], job.batches[half:]):
            if piece:
                name = self._source.send(piece, self._analysis.kernels)
                rows = sum(batch.leaf_rows for batch in piece)
                fresh.append(Job(name, piece, state.take(rows), attempts=attempts))
        fresh[-1].steps += state.waiting
        where = self._jobs.index(job)
        self._jobs[where : where + 1] = fresh

    def _report(self) -> Report:
        tree = SumTree(self._analysis.record["first_block"])
        state = PassState(Tally(tree=tree), tuple(self._analysis.record["names"]))
        for job in self._jobs:
            state.waiting.extend(job.steps)
            state.add(job.parts)
            state.add_unmeasured()
        tally = replace(state.tally, done=True, seconds=time.time() - self._analysis.record["sent"])
        place = {**self._analysis.record["place"], **self._traffic()}
        return make_report(
            self.analyzers,
            {name: [model] for name, model in self._analysis.models.items()},
            tally,
            tally.tree.total().sums,
            self._analysis.first,
            {**self._analysis.settings, "remote": [place]},
            None if tally.tree.size is None else tally.tree.blocks(),
        )

    def _traffic(self) -> dict[str, int]:
        """Number of requests and bytes, including earlier processes."""
        ndif, before = self._ndif, self._analysis.record["before"]
        now = {"requests": ndif.requests, "bytes_sent": ndif.sent, "bytes_received": ndif.received}
        return {name: before[name] + value for name, value in now.items()}


def start(data_pass: DataPass) -> RemoteRun:
    """Send all requests of the main pass, and return without waiting for their results.

    Args:
        data_pass: the main pass, which has not begun.
    """
    analysis, kernels, state = data_pass.analysis, data_pass.kernels, data_pass.state
    source = on_server(analysis.sources[0])
    most = source.schedule.most_tokens or TOKENS_PER_REQUEST
    sent, jobs = time.time(), list[Job]()
    reading = iter(tqdm(data_pass.read(), desc="sending", unit="batch", disable=None))
    for group in source.schedule.groups(reading, 0, most, lambda: source.schedule.most_batches, data_pass.first_block):
        jobs.append(Job(source.send(group, kernels), group, state.take(sum(batch.leaf_rows for batch in group))))
    if not jobs:
        state.add_unmeasured()
        refuse_empty(state.tally)
    jobs[-1].steps += state.waiting
    if FIRST in data_pass.tallies and jobs[-1].steps[-1].digest != data_pass.tallies[FIRST].digest:
        raise LayersimError("`data` gave different rows on the second data pass. Pass list(data).")
    record = {
        "sent": sent,
        "place": source.record(),
        "before": {"requests": 0, "bytes_sent": 0, "bytes_received": 0},
        "first_block": data_pass.first_block,
        "names": [*kernels],
    }
    submitted = SubmittedAnalysis(
        source.model,
        source.sites,
        {name: own[0] for name, own in analysis.models.items()},
        analysis.analyzers,
        kernels,
        data_pass.first,
        analysis.settings | analysis.batches.row_counts(),
        record,
    )
    return RemoteRun(submitted, jobs, source.ndif, source)


@typed
def load_run(
    path: str | os.PathLike[str], *, model: Any = None, analyzers: AnalyzersArgument | None = None, remote: str | None = None
) -> RemoteRun:
    """Read a run that `RemoteRun.save` wrote, in this process or another.

    Args:
        path: the file.
        model: the nnsight model, needed only to send a failed job again; opened as in the run.
        analyzers: the analyzers as they were given to `analyze`; needed if they are the user's own or hold tensors.
        remote: the server's address with a login, if it needs one; files keep no login.

    Raises:
        LayersimError: the file holds no run, or the analyzers, the model or the server are not those of the run.
    """

    def parse(notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[Mapping[str, Any], KeptRun]:
        if notes.get("version") != version("tl_layersim"):
            raise LayersimError(
                f"{path} was sent by tl_layersim {notes.get('version')}, and this is {version('tl_layersim')}: sums of "
                "another version may have another meaning."
            )
        return notes, parsed(notes, tensors)

    header, (described, first, jobs) = ResumableFile(path, KIND).read(parse)
    chosen = restored_analyzers(header["analyzers"], analyzers)
    server = header["server"] if remote is None else remote
    ndif = NdifClient(server, header["model_key"], {})
    if ndif.name != header["server"]:
        raise LayersimError(f"`remote` is {shown(server)}; the saved run was sent to {header['server']}.")
    settings = header["settings"]
    sites, models = tuple(header["sites"]), models_read(header, described)
    kernels: dict[str, AnyKernel] = {}
    source: RemoteSource | None = None
    if model is not None:
        recorded = OpenedModel(OpenedModel.of(model).model, settings["layers"], settings["unembed"], server)
        opened = on_server(open_source(recorded, either_stack=True))
        if sites != opened.sites:
            opened.read_at(opened.hook_points(opened.in_stack(list(sites)), False))
        choices = {name: (SiteChoice(tuple(map(sites.index, models[name].layers))),) for name in chosen}
        kernels = SitePlan(choices).kernels(chosen, first)
        now, then = ((m.name, m.config_hash, m.dtype, m.source, m.layers) for m in (opened.model, described))
        if now != then or without_secrets(opened.ndif.model_key) != header["model_key"]:
            raise LayersimError(
                f"`model` is {without_secrets(opened.ndif.model_key)} {now[:4]}; the saved run is of "
                f"{header['model_key']} {then[:4]}."
            )
        source, ndif = opened, opened.ndif
    analysis = SubmittedAnalysis(described, sites, models, chosen, kernels, first, settings, header["record"])
    return RemoteRun(analysis, jobs, ndif, source)
