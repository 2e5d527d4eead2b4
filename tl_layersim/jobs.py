"""Work that was sent to a server and not waited for: it can be kept in a file, and picked up elsewhere."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from .analyzer import Analyzer
from .analyzers import find_analyzers
from .checkpoint import Tally
from .data import Batch, Batches
from .errors import LayersimError
from .guards import refuse_not_finite
from .outcome import make_report
from .pairs import BLOCK, next_size
from .passes import Step, closed, read, settle
from .prepare import choose_analyzers
from .results import Report
from .source import Kernel, Model, Part
from .sources import open_source
from .sources.ndif import Ndif
from .sources.remote import RemoteSource
from .storage import read as read_file
from .storage import write
from .sums import Sums
from .typed import typed
from .unembed import Head

# A request of this many positions, where the user names no other number: nothing was timed yet.
TOKENS_PER_REQUEST = 8192
# Seconds between two looks at the jobs, and until a job that the server has never heard of is taken for lost.
PAUSE = 1.0
FORGOTTEN = 60.0
KIND = "remote_run"


@dataclass
class Job:
    """One request that was sent.

    Attributes:
        id: the server's name for it.
        batches: what it was sent; empty once its answer is here.
        steps: how the tally stands after each of its batches.
        parts: its answer.
        state: the server's last word on it.
        silent_since: since when the server knows nothing of it.
    """

    id: str
    batches: list[Batch]
    steps: list[Step]
    parts: list[Part] = field(default_factory=list)
    state: str = "SENT"
    silent_since: float | None = None


class RemoteRun:
    """An analysis that goes on at an NDIF server; `analyze(..., remote=True, blocking=False)` returns one.

    Nothing here holds a key: whoever picks it up uses the key that nnsight finds there.

    Attributes:
        server: address of the server.
        analyzers: what is measured, by name.

    Example:
        >>> run = lsim.analyze(model, texts, [lsim.CKA()], remote=True, blocking=False)  # doctest: +SKIP
        >>> run.save("cka.run")  # doctest: +SKIP
        >>> report = lsim.load_run("cka.run").result()  # doctest: +SKIP
    """

    def __init__(
        self,
        source: RemoteSource | None,
        model: Model,
        analyzers: Mapping[str, Analyzer],
        kernels: Mapping[str, Kernel],
        first: Mapping[str, Sums],
        settings: Mapping[str, Any],
        jobs: list[Job],
        ndif: Ndif,
    ) -> None:
        self.server, self.analyzers = ndif.name, dict(analyzers)
        self._source, self._model, self._kernels, self._first = source, model, dict(kernels), dict(first)
        self._settings, self._jobs, self._ndif = dict(settings), jobs, ndif

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state.lower()}" for state, number in sorted(self._count().items()))
        return f"RemoteRun({self._model.name} at {self.server}: {len(self._jobs)} jobs, {states})"

    def _count(self) -> Counter[str]:
        return Counter(job.state for job in self._jobs)

    def status(self) -> dict[str, int]:
        """How many jobs are in which state, as the server says it: QUEUED, RUNNING, COMPLETED ... Fetches what is done."""
        for job in self._jobs:
            if job.state != "COMPLETED":
                self._look(job)
        return dict(self._count())

    def result(self, timeout: float | None = None) -> Report:
        """Wait for all jobs, and make the report of their sums.

        A job that was too long for the server, or that the server has forgotten, is sent again (in halves, if it was too long),
        where the model is at hand: in the process that sent it, or after `load_run(path, model=...)`.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: the time is over; what has arrived is kept.
            LayersimError: a job failed and cannot be sent again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        total = sum(step.tokens for job in self._jobs for step in job.steps)
        with tqdm(desc="jobs", unit="token", unit_scale=True, total=total, disable=None) as bar:
            while True:
                states = self.status()
                done = sum(step.tokens for job in self._jobs if job.state == "COMPLETED" for step in job.steps)
                bar.update(done - bar.n)
                bar.set_postfix_str(", ".join(f"{number} {state.lower()}" for state, number in sorted(states.items())))
                if states.get("COMPLETED") == len(self._jobs):
                    break
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(f"{self!r} after {timeout} s. Nothing is lost: call result() again, or save(path).")
                time.sleep(PAUSE)
        return self._report()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Keep the run in a file: job names, the sums that arrived, and the tokens of what has not."""
        tensors: dict[str, Tensor] = {}
        jobs = []
        for number, job in enumerate(self._jobs):
            for place, batch in enumerate(job.batches):
                for name, value in (("tokens", batch.tokens), ("attention", batch.attention), ("counted", batch.counted)):
                    tensors[f"batch/{number}/{place}/{name}"] = value
                if batch.labels is not None:
                    tensors[f"batch/{number}/{place}/labels"] = batch.labels
            for place, part in enumerate(job.parts):
                for name, sums in part.out.items():
                    tensors |= {f"part/{number}/{place}/{name}/{key}": value for key, value in sums.items()}
            jobs.append(
                {
                    "id": job.id,
                    "state": job.state,
                    "batches": [{"first": batch.first, "origins": batch.origins} for batch in job.batches],
                    "steps": [list(step) for step in job.steps],
                    "counts": [part.count for part in job.parts],
                }
            )
        for name, held in self._first.items():
            tensors |= {f"first/{name}/{key}": value for key, value in held.fields.items()}
        header = {
            "server": self.server,
            "model": {f.name: getattr(self._model, f.name) for f in fields(Model) if f.name not in ("tokenizer", "head")}
            | {"head": None if self._model.head is None else asdict(self._model.head)},
            "model_key": self._ndif.model_key,
            "analyzers": {name: _recipe(analyzer) for name, analyzer in self.analyzers.items()},
            "settings": self._settings,
            "first": list(self._first),
            "jobs": jobs,
        }
        return write(path, KIND, header, tensors)

    def _look(self, job: Job) -> None:
        """Ask for the server's word on a job, and take its answer if there is one."""
        word = self._ndif.look(job.id)
        if word.failure:
            self._again(job, word.failure, word.halve)
            return
        if word.state is None:
            now = time.monotonic()
            job.silent_since = job.silent_since or now
            if now - job.silent_since > FORGOTTEN:
                self._again(job, "the server knows nothing of it", False)
            return
        job.state, job.silent_since = word.state, None
        if word.found is not None:
            job.parts = [Part(count, not_finite, out) for count, (not_finite, out) in word.found["found"]]
            for part in job.parts:
                refuse_not_finite(part.not_finite, [self._model.layers], "this job")
            job.batches = []

    def _again(self, job: Job, failure: str, halve: bool) -> None:
        """Send a job once more, in two halves if it was too long."""
        single = halve and len(job.batches) == 1
        if self._source is None or single:
            rows = len(job.batches[0].tokens)
            raise LayersimError(
                "A job did not end well"
                + (" and holds a single forward pass." if single else ", and the model is not at hand."),
                given=f"job {job.id}: {failure}",
                expected="a forward pass that fits into a job" if single else "the model, to send it again",
                do=f"batch_size={max(1, rows // 2)} in a new analysis" if single else "lsim.load_run(path, model=model)",
            )
        half = 1 << ((len(job.batches) - 1).bit_length() - 1) if halve else len(job.batches)
        steps = deque(job.steps)
        pieces = [piece for piece in (job.batches[:half], job.batches[half:]) if piece]
        fresh = [Job(self._source.send(piece, self._kernels), piece, _of(steps, len(piece))) for piece in pieces]
        fresh[-1].steps += steps
        where = self._jobs.index(job)
        self._jobs[where : where + 1] = fresh

    def _report(self) -> Report:
        tally = Tally({name: Sums() for name in self.analyzers})
        for job in self._jobs:
            steps = deque(job.steps)
            tally = settle(tally, job.parts, steps, BLOCK, 0.0)
            tally = settle(tally, [], steps, BLOCK, 0.0)
        tally = closed(tally)
        return make_report(self.analyzers, [self._model], tally, tally.sums, self._first, self._settings)


def _of(steps: deque[Step], measured: int) -> list[Step]:
    """The steps of so many batches that a model has to run on, taken off the list."""
    taken: list[Step] = []
    while measured:
        taken.append(steps.popleft())
        measured -= taken[-1].measured
    return taken


def start(
    source: RemoteSource,
    batches: Batches,
    analyzers: Mapping[str, Analyzer],
    kernels: Mapping[str, Kernel],
    first: Mapping[str, Sums],
    settings: Mapping[str, Any],
    digest: str,
) -> RemoteRun:
    """Send all requests of the main pass, and return without waiting for their answers."""
    steps: deque[Step] = deque()
    unsure = source if any(analyzer.needs_unembed for analyzer in analyzers.values()) else None
    most = source.most_tokens or TOKENS_PER_REQUEST
    jobs: list[Job] = []
    reading = iter(tqdm(read(batches, analyzers, Tally(), steps, unsure), desc="sending", unit="batch", disable=None))
    for group in _groups(reading, most):
        jobs.append(Job(source.send(group, kernels), group, _of(steps, len(group))))
    if not jobs:
        make_report(analyzers, [source.model], Tally(sequences=sum(step.rows for step in steps)), {}, first, settings)
    jobs[-1].steps += steps
    if digest and jobs[-1].steps[-1].digest != digest:
        raise LayersimError(
            "The data was not the same on the second pass.",
            given=type(batches.data).__name__,
            expected="data that gives the same rows each time it is iterated over",
            do="list(data)",
        )
    return RemoteRun(
        source, source.model, analyzers, kernels, first, {**settings, "remote": [source.record()]}, jobs, source.ndif
    )


def _groups(batches: Iterator[Batch], most: int) -> Iterator[list[Batch]]:
    """Batches by the request, of at most so many positions but never without a batch."""
    ahead: deque[Batch] = deque()
    index = 0
    while True:
        while len(ahead) < BLOCK and (batch := next(batches, None)) is not None:
            ahead.append(batch)
        if not ahead:
            return
        size = next_size(index, max(1, min(len(ahead), most // max(batch.tokens.numel() for batch in ahead))))
        yield [ahead.popleft() for _ in range(size)]
        index += size


@typed
def load_run(path: str | os.PathLike[str], *, model: Any = None, analyzers: Any = None) -> RemoteRun:
    """A run that `RemoteRun.save` kept, in this process or another.

    Args:
        path: the file.
        model: the nnsight model, which is needed only to send a failed job again.
        analyzers: as they were given to `analyze`; needed where they are not those of this package or hold tensors.

    Raises:
        LayersimError: the file is none, or the analyzers or the model are not those of the run.
    """
    header, tensors = read_file(path, (KIND,))
    chosen = {name: _rebuilt(name, recipe) for name, recipe in header["analyzers"].items()} if analyzers is None else None
    chosen = choose_analyzers(analyzers) if chosen is None else chosen
    given = {name: _recipe(analyzer) for name, analyzer in chosen.items()}
    if given != header["analyzers"]:
        raise LayersimError(
            "These are not the analyzers of this run.",
            given=str(given)[:300],
            expected=str(header["analyzers"])[:300],
            do="pass analyzers= as they were given to analyze()",
        )
    plain = dict(header["model"])
    head = plain.pop("head")
    head = None if head is None else Head(**{**head, "parts": tuple(head["parts"])})
    described = Model(**{**plain, "layers": tuple(plain["layers"]), "tokenizer": None, "head": head})
    first = {name: Sums(_below(f"first/{name}/", tensors)) for name in header["first"]}
    kernels = {name: analyzer.kernel(first.get(name, Sums())) for name, analyzer in chosen.items()}
    settings = header["settings"]
    source: RemoteSource | None = None
    if model is not None:
        asked = {"layers": settings.get("layers"), "unembed": settings.get("unembed")}
        opened = open_source(model, remote=header["server"], **asked)
        assert isinstance(opened, RemoteSource)
        source = opened
        if source.ndif.model_key != header["model_key"]:
            raise LayersimError(
                "This is not the model of this run.",
                given=source.ndif.model_key,
                expected=header["model_key"],
                do="load the same model from the same place",
            )
    jobs = [_job(number, item, tensors) for number, item in enumerate(header["jobs"])]
    return RemoteRun(source, described, chosen, kernels, first, settings, jobs, Ndif(header["server"], header["model_key"], {}))


def _job(number: int, item: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Job:
    batches = []
    for place, kept in enumerate(item["batches"]):
        origins = tuple((row, start) for row, start in kept["origins"])
        batches.append(Batch(**_below(f"batch/{number}/{place}/", tensors), first=kept["first"], origins=origins))
    parts = []
    for place, count in enumerate(item["counts"]):
        out: dict[str, dict[str, Tensor]] = {}
        for key, value in _below(f"part/{number}/{place}/", tensors).items():
            name, _, field_name = key.partition("/")
            out.setdefault(name, {})[field_name] = value
        parts.append(Part(count, [], out))
    return Job(item["id"], batches, [Step(*step) for step in item["steps"]], parts, item["state"])


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _recipe(analyzer: Analyzer) -> dict[str, Any]:
    cls = type(analyzer)
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "options": analyzer.options()}


def _rebuilt(name: str, recipe: Mapping[str, Any]) -> Analyzer:
    """An analyzer of this package, or of one that offers it, from its options; no class is imported because a file names it."""
    cls = find_analyzers().get(name)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in recipe["options"].items()}
    if cls is None or f"{cls.__module__}.{cls.__qualname__}" != recipe["class"]:
        found = None
    else:
        try:
            found = cls(**options)
        except LayersimError:
            # Labels that were a tensor are only a digest in the file.
            found = None
    if found is None or _recipe(found) != recipe:
        raise LayersimError(
            f"The analyzer {name!r} of this run cannot be made again from the file.",
            given=f"{recipe['class']} with {recipe['options']}",
            expected="the analyzers as they were given to analyze()",
            do="lsim.load_run(path, analyzers=[...])",
        )
    return found
