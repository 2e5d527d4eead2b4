"""`RemoteRun`: an analysis on a server, collected later or in another process."""

from __future__ import annotations

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
from ..analyzers.analyzer import Analyzer
from ..core.arguments import FilePath, typed
from ..core.errors import LayersimError, shown, without_secrets
from ..core.results import Report
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.sums import Sums, SumTree, Tally
from ..data.batches import Batch
from ..data.row import TextOfRow
from ..remote import client
from ..remote.client import ATTEMPTS_TO_READ, NdifClient, SentJob, quiet
from ..remote.failures import DamagedAnswer, JobTooLong, TransientFailure
from ..remote.open_model import on_server, open_source
from ..remote.source import RemoteSource
from ..remote.traces import FormOfSums, partial_sums
from ..sources.activation_checks import refuse_not_finite
from ..sources.model_description import Model
from ..sources.open_local import OpenedModel
from ..sources.source import PartialSums, running
from .report_assembly import make_report, refuse_empty
from .run import PassState, Step, run
from .run_arguments import AnalyzersArgument
from .run_description import FIRST, Analysis, DataPart
from .run_files import model_notes, model_of, recipe_of, restored_analyzers, sums_below, sums_snapshot, tensors_below
from .site_plan import SiteChoice, SitePlan


@dataclass(frozen=True)
class RunHeader:
    """Description of a remote run, as its file stores it.

    Attributes:
        server: address of the server, without a login.
        model_key: the model's name on the server.
        sites: names of all sites that the requests read.
        models: by analyzer, the model with the sites that the analyzer reads, see `model_notes`.
        analyzers: by name, class, options and code of an analyzer, see `recipe_of`.
        settings: how data and model were opened.
        sent: when the jobs were sent.
        place: facts about the server, with the number of requests and bytes before this process.
        first: names of the analyzers with sums of a first pass.
        first_block: number of texts in a jackknife block at the start; None without intervals.
        kernels: names of the kernels.
    """

    server: str
    model_key: str
    sites: list[str]
    models: dict[str, dict[str, Any]]
    analyzers: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    sent: float
    place: dict[str, Any]
    first: list[str]
    first_block: int | None
    kernels: list[str]


@dataclass
class Job:
    """A request that was sent to a server, with its state and its sums.

    Attributes:
        sent: the job on the server.
        batches: batches of the request; empty once its sums have arrived.
        texts: number of texts whose sums the server returns; the last texts of the data are rounded up to a whole leaf.
        steps: counts of the batches of the request.
        parts: sums that the server returned.
        state: last state that the server reported; also ERROR if a reply cannot be read.
        failure: the failure of a job in the state ERROR.
        silent_since: time since which the server no longer knows the job.
        unreadable: number of results that could not be read.
    """

    sent: SentJob
    batches: list[Batch]
    texts: int
    steps: list[Step]
    parts: list[PartialSums] = field(default_factory=list)
    state: str = "SENT"
    failure: Exception | None = None
    silent_since: float | None = None
    unreadable: int = 0


# Entries of `RunHeader.place` that are also attributes of `NdifClient`.
TRAFFIC = ("requests", "bytes_sent", "bytes_received")
# The description, the model by analyzer, the sums of the first pass by analyzer, and the jobs.
KeptRun = tuple[RunHeader, dict[str, Model], dict[str, Sums], list[Job]]


def parsed(notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KeptRun:
    """Restore a saved run from its file. Malformed notes or tensors may raise any exception."""
    header = RunHeader(**{name: notes[name] for name in RunHeader.__annotations__})
    models = {name: model_of(header.models[name]) for name in header.analyzers}
    jobs = [_job(number, item, tensors) for number, item in enumerate(notes["jobs"])]
    return header, models, sums_below("first", header.first, tensors), jobs


def _job(number: int, item: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Job:
    batches = [_batch(facts, tensors_below(f"batch/{number}/{place}/", tensors)) for place, facts in enumerate(item["batches"])]
    parts = []
    for place, (count, names) in enumerate(item["parts"]):
        sums = sums_below(f"part/{number}/{place}", names, tensors)
        parts.append(PartialSums(count, [], {name: own.fields for name, own in sums.items()}))
    steps = [Step._make(step)._replace(tokens=tuple(step[2])) for step in item["steps"]]
    return Job(SentJob(**item["sent"]), batches, item["texts"], steps, parts, item["state"])


def _batch_snapshot(batch: Batch) -> Snapshot:
    """A batch as plain data and tensors, for a file. Keys of further model inputs begin with "input/"."""
    held = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name != "inputs"}
    tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    facts = {name: value for name, value in held.items() if name not in tensors} | {"positional": sorted(batch.positional)}
    return facts, tensors | {f"input/{name}": value for name, value in batch.inputs.items()}


def _batch(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """Restore a batch from `_batch_snapshot`."""
    more = {
        "origins": tuple((row, start) for row, start in facts["origins"]),
        "texts": tuple(TextOfRow._make(text)._replace(joined=tuple(text[3])) for text in facts["texts"]),
        "positional": frozenset(facts["positional"]),
    }
    held: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("input/")}
    return Batch(**{**facts, **more}, **held, inputs=tensors_below("input/", tensors))


# Positions in a request where the user sets no `tokens_per_request`: no forward pass was timed yet.
TOKENS_PER_REQUEST = 8192
# Seconds between two polls of the jobs, and until a job that the server does not know counts as lost.
PAUSE = 1.0
FORGOTTEN = 60.0
KIND = "remote_run"


class RemoteRun:
    """An analysis that runs on an NDIF server, returned by `analyze(..., blocking=False)`.

    A run holds no API key. The process that collects the run uses its own key, as set in nnsight.

    Attributes:
        server: address of the server.
        analyzers: the analyzers, by name.

    Examples:
        >>> run = lsim.analyze(lsim.open_model(model, remote=True), texts, [lsim.CKA()], blocking=False)  # doctest: +SKIP
        >>> run.save("cka.run")  # doctest: +SKIP
        >>> report = lsim.load_run("cka.run").result()  # doctest: +SKIP
    """

    def __init__(
        self,
        run: KeptRun,
        analyzers: Mapping[str, Analyzer],
        ndif: NdifClient,
        source: RemoteSource | None = None,
        kernels: Mapping[str, AnyKernel] | None = None,
    ) -> None:
        self.server, self.analyzers = ndif.name, dict(analyzers)
        self._header, self._models, self._first_sums, self._jobs = run
        self._ndif, self._source, self._kernels = ndif, source, kernels or {}
        self._unreached: tuple[float, Exception] | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state.lower()}" for state, number in sorted(self._count().items()))
        [name] = {model.name for model in self._models.values()}
        return f"RemoteRun({name} at {self.server}: {len(self._jobs)} jobs, {states})"

    def _count(self) -> Counter[str]:
        return Counter(job.state for job in self._jobs)

    def status(self) -> dict[str, int]:
        """Number of jobs by state, such as "QUEUED", "RUNNING", "COMPLETED" or "ERROR".

        The call fetches the sums of completed jobs.
        """
        for job in self._jobs:
            if job.state not in ("COMPLETED", "ERROR"):
                self._poll(job)
        return dict(self._count())

    def result(self, timeout: float | None = None) -> Report:
        """Wait for all jobs, and compute the report from their sums.

        A job that was too long for the server, or that the server has lost, is measured again, in smaller requests if needed.
        This process must have the model: it sent the job, or it called `load_run(path, model=...)`.

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
                    self._measure_again(job)
                if self._unreached is not None and time.monotonic() - self._unreached[0] > sum(client.WAITS):
                    raise self._ndif.given_up(self._unreached[1], 1)
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(
                        f"`timeout` is {timeout} s, and some jobs are not complete: {self!r}. Nothing is lost: call result() "
                        "again, or save(path)."
                    )
                time.sleep(PAUSE)
        return self._report()

    def save(self, path: FilePath) -> Path:
        """Write the run to a file.

        The file holds the names of the jobs, the sums that arrived, and the tokens of the other jobs.
        """
        tensors: dict[str, Tensor] = {}
        jobs = []
        for number, job in enumerate(self._jobs):
            batches = list(map(_batch_snapshot, job.batches))
            for place, (_, held) in enumerate(batches):
                tensors |= {f"batch/{number}/{place}/{name}": value for name, value in held.items()}
            for place, part in enumerate(job.parts):
                sums = {name: Sums(own) for name, own in part.out.items()}
                tensors |= sums_snapshot(f"part/{number}/{place}", sums)
            jobs.append(
                {
                    "sent": asdict(job.sent),
                    # A refusal is not written: the next process gets it from the server again.
                    "state": "SENT" if job.state == "ERROR" else job.state,
                    "texts": job.texts,
                    "batches": [facts for facts, _ in batches],
                    "steps": [list(step) for step in job.steps],
                    "parts": [[part.count, list(part.out)] for part in job.parts],
                }
            )
        header = asdict(replace(self._header, place=self._place())) | {"jobs": jobs, "version": version("tl_layersim")}
        ResumableFile(path, KIND).write(header, tensors | sums_snapshot("first", self._first_sums))
        return Path(path)

    def _poll(self, job: Job) -> None:
        """Ask the server for the state of a job, and for its sums if it is complete."""
        now = time.monotonic()
        try:
            state, found = self._ndif.poll(job.sent, self._form(job))
        except DamagedAnswer as error:
            job.unreadable += 1
            if job.unreadable >= ATTEMPTS_TO_READ:
                job.state, job.failure = "ERROR", error
            return
        except TransientFailure as error:
            self._unreached = self._unreached or (now, error)
            return
        self._unreached = None
        if state is None:
            job.silent_since = job.silent_since or now
            if now - job.silent_since > FORGOTTEN:
                job.state, job.failure = "ERROR", TransientFailure("the server does not know the job")
            return
        job.state, job.silent_since = state, None
        if state == "ERROR":
            job.failure = found
        if state != "COMPLETED":
            return
        parts = partial_sums(found["found"])
        try:
            for part in parts:
                refuse_not_finite(part.not_finite, [tuple(self._header.sites)], f"job {job.sent.id}")
        except LayersimError as error:
            job.state, job.failure = "ERROR", error
        else:
            job.parts, job.batches = parts, []

    def _form(self, job: Job) -> FormOfSums:
        """The form of the result of a job."""
        return FormOfSums(job.texts, (len(self._header.sites),), tuple(self._header.kernels), True)

    def _measure_again(self, job: Job) -> None:
        """Measure the batches of a failed job again.

        Raises:
            LayersimError: another attempt would fail with the same error, or the model is not open here.
        """
        assert job.failure is not None
        if not isinstance(job.failure, JobTooLong | TransientFailure):
            raise job.failure
        source = self._source
        if source is None:
            raise LayersimError(
                f"A job on the server failed, and cannot be sent again without the model: {job.failure} (job {job.sent.id}). "
                "Use lsim.load_run(path, model=model)."
            )
        if not source.is_settled:
            # A source that `load_run` opened has run nothing yet.
            source.settle(job.batches[0])
        start = sum(other.texts for other in self._jobs[: self._jobs.index(job)])
        with running(source, any(analyzer.needs_calls for analyzer in self.analyzers.values())):
            parts = source.stream(iter(job.batches), self._kernels, start, quiet, self._header.first_block)
            job.parts = [part for some in parts for part in some]
        for part in job.parts:
            refuse_not_finite(part.not_finite, [tuple(self._header.sites)], f"job {job.sent.id}")
        job.state, job.batches = "COMPLETED", []

    def _report(self) -> Report:
        header = self._header
        state = PassState(Tally(tree=SumTree(header.first_block)), tuple(header.kernels))
        for job in self._jobs:
            state.waiting.extend(job.steps)
            state.add(job.parts)
            state.add_unmeasured()
        tally = replace(state.tally, done=True, seconds=time.time() - header.sent)
        return make_report(
            self.analyzers,
            {name: [model] for name, model in self._models.items()},
            tally,
            self._first_sums,
            {**header.settings, "remote": [self._place()]},
        )

    def _place(self) -> dict[str, Any]:
        """Facts about the server, with the run's requests and bytes so far, for the provenance."""
        before = self._header.place
        return before | {name: before[name] + getattr(self._ndif, name) for name in TRAFFIC}


def start(analysis: Analysis) -> RemoteRun:
    """Send all requests of the main pass, and return without waiting for their results.

    Args:
        analysis: the model, which is on a server, the data and the analyzers.
    """
    analysis.check()
    analysis.read_ahead()
    data_pass = run(analysis, DataPart(), ResumableFile(None, KIND), {}, blocking=False)
    kernels, state = data_pass.kernels, data_pass.state
    source = on_server(analysis.sources[0])
    most = source.schedule.most_tokens or TOKENS_PER_REQUEST
    sent, jobs = time.time(), list[Job]()
    reading = iter(tqdm(data_pass.read(), desc="sending", unit="batch", disable=None))
    with analysis.running():
        schedule = source.schedule
        batches = schedule.groups(reading, 0, most, lambda: schedule.most_batches, data_pass.first_block, deque())
        while group := next(batches):
            texts = sum(batch.leaf_texts for batch in group)
            jobs.append(Job(source.send(group, kernels), group, texts, state.take(texts)))
    if not jobs:
        state.add_unmeasured()
        refuse_empty(state.tally.tokens, state.tally.sequences)
    jobs[-1].steps += state.waiting
    if FIRST in data_pass.tallies and jobs[-1].steps[-1].inputs != data_pass.tallies[FIRST].inputs:
        raise LayersimError("`data` gave different rows on the second data pass. Pass list(data).")
    models = {name: own[0] for name, own in analysis.plan.models().items()}
    header = RunHeader(
        server=source.ndif.name,
        model_key=without_secrets(source.ndif.model_key),
        sites=list(source.sites),
        models={name: model_notes(model) for name, model in models.items()},
        analyzers={name: recipe_of(analyzer) for name, analyzer in analysis.analyzers.items()},
        settings=analysis.settings | analysis.batches.row_counts(),
        sent=sent,
        place=source.record() | dict.fromkeys(TRAFFIC, 0),
        first=list(data_pass.first_sums),
        first_block=data_pass.first_block,
        kernels=list(kernels),
    )
    return RemoteRun((header, models, dict(data_pass.first_sums), jobs), analysis.analyzers, source.ndif, source, kernels)


@typed
def load_run(
    path: FilePath, *, model: Any = None, analyzers: AnalyzersArgument | None = None, remote: str | None = None
) -> RemoteRun:
    """Read a run that `RemoteRun.save` wrote.

    Args:
        path: the file.
        model: the nnsight model, needed only to send a failed job again; opened as in the run.
        analyzers: the analyzers as they were given to `analyze`; needed if they are the user's own or hold tensors.
        remote: the server's address with a login, if it needs one; files keep no login.

    Raises:
        LayersimError: the file holds no run, or the analyzers, the model or the server are not those of the run.
    """

    def parse(notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[KeptRun, dict[str, Analyzer]]:
        here, then = version("tl_layersim"), notes.get("version")
        if then != here:
            raise LayersimError(
                f"tl_layersim {then} sent the run in {path}, and {here} is installed. Sums of other versions may have another "
                f"meaning; install version {then}."
            )
        run = parsed(notes, tensors)
        return run, restored_analyzers(run[0].analyzers, analyzers)

    run, chosen = ResumableFile(path, KIND).read(parse)
    header, models, first_sums, _ = run
    server = header.server if remote is None else remote
    ndif = NdifClient(server, header.model_key, {})
    if ndif.name != header.server:
        raise LayersimError(f"`remote` is {shown(server)}; it must be the server of the saved run, {header.server}.")
    if model is None:
        return RemoteRun(run, chosen, ndif)
    layers, unembed = header.settings.get("layers"), header.settings.get("unembed")
    opened = OpenedModel(OpenedModel.of(model).model, layers, unembed, server)
    source = on_server(open_source(opened, either_stack=True, at=header.sites))
    if tuple(header.sites) != source.sites:
        source.read_at(source.hook_points(header.sites, False))
    now, then = ((m.name, m.config_hash, m.dtype, m.source, m.changes) for m in (source.model, next(iter(models.values()))))
    if now != then or without_secrets(source.ndif.model_key) != header.model_key:
        raise LayersimError(
            f"`model` is {without_secrets(source.ndif.model_key)} with name, configuration, dtype, class and changes {now}; it "
            f"must be the model of the saved run, {header.model_key} with {then}."
        )
    choices = {name: (SiteChoice(tuple(map(header.sites.index, models[name].layers))),) for name in chosen}
    return RemoteRun(run, chosen, source.ndif, source, SitePlan([source], choices).kernels(chosen, first_sums))
