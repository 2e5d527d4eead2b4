"""`RemoteRun`: an analysis on a server, collected later or in another process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from itertools import chain
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
from ..sources.model_description import ModelDescription
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
KeptRun = tuple[RunHeader, dict[str, ModelDescription], dict[str, Sums], list[Job]]


def parsed(notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KeptRun:
    """Restore a saved run from its file. Malformed notes or tensors may raise any exception."""
    header = RunHeader(**{name: notes[name] for name in RunHeader.__annotations__})
    models = {name: model_of(header.models[name]) for name in header.analyzers}
    jobs = [_job(number, item, tensors) for number, item in enumerate(notes["jobs"])]
    return header, models, sums_below("first", header.first, tensors), jobs


def _job(number: int, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Job:
    """Restore a job from the notes and tensors that `RemoteRun.save` wrote."""
    batches = []
    for index, facts in enumerate(notes["batches"]):
        batches.append(_batch(facts, tensors_below(f"batch/{number}/{index}/", tensors)))
    parts = []
    for index, (count, names) in enumerate(notes["parts"]):
        sums_by_kernel = sums_below(f"part/{number}/{index}", names, tensors)
        out = {name: sums.fields for name, sums in sums_by_kernel.items()}
        parts.append(PartialSums(count, [], out))
    steps = []
    for values in notes["steps"]:
        step = Step._make(values)
        # JSON keeps no tuples.
        steps.append(step._replace(tokens=tuple(step.tokens)))
    return Job(SentJob(**notes["sent"]), batches, notes["texts"], steps, parts, notes["state"])


def _batch_snapshot(batch: Batch) -> Snapshot:
    """A batch as plain data and tensors, for a file. Keys of further model inputs begin with "input/"."""
    facts: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for batch_field in fields(batch):
        name = batch_field.name
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif name != "inputs":
            facts[name] = value
    facts["positional"] = sorted(batch.positional)
    for name, value in batch.inputs.items():
        tensors[f"input/{name}"] = value
    return facts, tensors


def _batch(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Batch:
    """Restore a batch from `_batch_snapshot`."""
    texts = []
    for group, unit, part, (first, last), neighbours in facts["texts"]:
        texts.append(TextOfRow(group, unit, part, (first, last), neighbours))
    # JSON keeps neither tuples nor sets.
    restored = {
        "origins": tuple((row, start) for row, start in facts["origins"]),
        "texts": tuple(texts),
        "positional": frozenset(facts["positional"]),
    }
    tensor_fields: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith("input/")}
    return Batch(**{**facts, **restored}, **tensor_fields, inputs=tensors_below("input/", tensors))


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
        self.server = ndif.name
        self.analyzers = dict(analyzers)
        self._header, self._models, self._first_sums, self._jobs = run
        self._ndif = ndif
        self._source = source
        self._kernels = kernels or {}
        # Time since which the server does not answer, and the error of the first call that it did not answer.
        self._unreached: tuple[float, Exception] | None = None

    def __repr__(self) -> str:
        [name] = {model.name for model in self._models.values()}
        return f"RemoteRun({name} at {self.server}: {len(self._jobs)} jobs, {_states_in_words(self._count_by_state())})"

    def _count_by_state(self) -> Counter[str]:
        return Counter(job.state for job in self._jobs)

    def status(self) -> dict[str, int]:
        """Number of jobs by state, such as "QUEUED", "RUNNING", "COMPLETED" or "ERROR".

        The call fetches the sums of completed jobs.
        """
        for job in self._jobs:
            if job.state not in ("COMPLETED", "ERROR"):
                self._poll(job)
        return dict(self._count_by_state())

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
        total = sum(map(_token_count, self._jobs))
        with tqdm(desc="jobs", unit="token", unit_scale=True, total=total, disable=None) as bar:
            while True:
                states = self.status()
                completed = sum(_token_count(job) for job in self._jobs if job.state == "COMPLETED")
                bar.update(completed - bar.n)
                bar.set_postfix_str(_states_in_words(states))
                if states.get("COMPLETED") == len(self._jobs):
                    break
                for job in self._jobs:
                    if job.state == "ERROR":
                        self._measure_again(job)
                if self._unreached is not None:
                    since, error = self._unreached
                    # A blocking run gives up after the same time, see `WAITS`.
                    if time.monotonic() - since > sum(client.WAITS):
                        raise self._ndif.given_up(error, 1)
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
            facts_of_batches = []
            for index, batch in enumerate(job.batches):
                facts, batch_tensors = _batch_snapshot(batch)
                facts_of_batches.append(facts)
                for name, value in batch_tensors.items():
                    tensors[f"batch/{number}/{index}/{name}"] = value
            for index, part in enumerate(job.parts):
                sums = {name: Sums(sum_fields) for name, sum_fields in part.out.items()}
                tensors |= sums_snapshot(f"part/{number}/{index}", sums)
            jobs.append(
                {
                    "sent": asdict(job.sent),
                    # A refusal is not written: the next process gets it from the server again.
                    "state": "SENT" if job.state == "ERROR" else job.state,
                    "texts": job.texts,
                    "batches": facts_of_batches,
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
            state, answer = self._ndif.poll(job.sent, self._form(job))
        except DamagedAnswer as error:
            job.unreadable += 1
            if job.unreadable >= ATTEMPTS_TO_READ:
                job.state = "ERROR"
                job.failure = error
            return
        except TransientFailure as error:
            self._unreached = self._unreached or (now, error)
            return
        self._unreached = None
        if state is None:
            job.silent_since = job.silent_since or now
            if now - job.silent_since > FORGOTTEN:
                job.state = "ERROR"
                job.failure = TransientFailure("the server does not know the job")
            return
        job.state = state
        job.silent_since = None
        if state == "ERROR":
            job.failure = answer
        if state != "COMPLETED":
            return
        parts = partial_sums(answer["found"])
        try:
            for part in parts:
                refuse_not_finite(part.not_finite, [tuple(self._header.sites)], f"job {job.sent.id}")
        except LayersimError as error:
            job.state = "ERROR"
            job.failure = error
        else:
            job.parts = parts
            job.batches = []

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
        earlier_jobs = self._jobs[: self._jobs.index(job)]
        start = sum(earlier.texts for earlier in earlier_jobs)
        needs_calls = any(analyzer.needs.calls for analyzer in self.analyzers.values())
        with running(source, needs_calls):
            answers = source.stream(iter(job.batches), self._kernels, start, quiet, self._header.first_block)
            job.parts = list(chain.from_iterable(answers))
        for part in job.parts:
            refuse_not_finite(part.not_finite, [tuple(self._header.sites)], f"job {job.sent.id}")
        job.state = "COMPLETED"
        job.batches = []

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
        earlier = self._header.place
        traffic = {name: earlier[name] + getattr(self._ndif, name) for name in TRAFFIC}
        return earlier | traffic


def _token_count(job: Job) -> int:
    """Number of counted positions in a job."""
    return sum(sum(step.tokens) for step in job.steps)


def _states_in_words(states: Mapping[str, int]) -> str:
    """Numbers of jobs by state as text, such as "2 completed, 1 running"."""
    return ", ".join(f"{number} {state.lower()}" for state, number in sorted(states.items()))


def start(analysis: Analysis) -> RemoteRun:
    """Send all requests of the main pass, and return without waiting for their results.

    Args:
        analysis: the model, which is on a server, the data and the analyzers.
    """
    analysis.check()
    analysis.read_ahead()
    data_pass = run(analysis, DataPart(), ResumableFile(None, KIND), {}, blocking=False)
    kernels = data_pass.kernels
    state = data_pass.state
    source = on_server(analysis.sources[0])
    most_tokens = source.schedule.most_tokens or TOKENS_PER_REQUEST
    sent = time.time()
    jobs: list[Job] = []
    reading = iter(tqdm(data_pass.read(), desc="sending", unit="batch", disable=None))
    with analysis.running():
        schedule = source.schedule
        groups = schedule.groups(reading, 0, most_tokens, lambda: schedule.most_batches, data_pass.first_block, deque())
        # An empty group ends the data.
        while group := next(groups):
            texts = sum(batch.leaf_texts for batch in group)
            sent_job = source.send(group, kernels)
            jobs.append(Job(sent_job, group, texts, state.take(texts)))
    if not jobs:
        state.add_unmeasured()
        refuse_empty(state.tally.tokens, state.tally.sequences)
    # Batches after the last measured one have no job of their own; their counts belong to the report.
    jobs[-1].steps += state.waiting
    if FIRST in data_pass.tallies and jobs[-1].steps[-1].inputs != data_pass.tallies[FIRST].inputs:
        raise LayersimError("`data` gave different rows on the second data pass. Pass list(data).")
    models = {name: analyzer_models[0] for name, analyzer_models in analysis.plan.models().items()}
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
        installed = version("tl_layersim")
        recorded = notes.get("version")
        if recorded != installed:
            raise LayersimError(
                f"tl_layersim {recorded} sent the run in {path}, and {installed} is installed. Sums of other versions may have "
                f"another meaning; install version {recorded}."
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
    layers = header.settings.get("layers")
    unembed = header.settings.get("unembed")
    opened = OpenedModel(OpenedModel.of(model).model, layers, unembed, server)
    source = on_server(open_source(opened, either_stack=True, at=header.sites))
    if tuple(header.sites) != source.sites:
        source.read_at(source.hook_points(header.sites, False))
    opened_facts = _identifying_facts(source.model)
    saved_facts = _identifying_facts(next(iter(models.values())))
    if opened_facts != saved_facts or without_secrets(source.ndif.model_key) != header.model_key:
        raise LayersimError(
            f"`model` is {without_secrets(source.ndif.model_key)} with name, configuration, dtype, class and changes "
            f"{opened_facts}; it must be the model of the saved run, {header.model_key} with {saved_facts}."
        )
    choices = {}
    for name in chosen:
        sites = tuple(header.sites.index(site) for site in models[name].layers)
        choices[name] = (SiteChoice(sites),)
    kernels = SitePlan([source], choices).kernels(chosen, first_sums)
    return RemoteRun(run, chosen, source.ndif, source, kernels)


def _identifying_facts(model: ModelDescription) -> tuple[Any, ...]:
    """Facts of a model that must be equal in a saved run and in the model to which its jobs are sent again."""
    return model.name, model.config_hash, model.dtype, model.source, model.changes
