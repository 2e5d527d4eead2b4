"""Work that was sent to a server and not waited for: it can be kept in a file, and picked up elsewhere."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ..analyzers import find_analyzers
from ..analyzers.base import Analyzer, code_digest
from ..core.addresses import shown
from ..core.errors import LayersimError, without_secrets
from ..core.pairwise_summation import BLOCK
from ..core.results import Report
from ..core.resumable import Tally
from ..core.storage import read as read_file
from ..core.storage import reading, write
from ..core.sums import Sums
from ..core.typed import named, typed
from ..data.batches import Batches
from ..models.model_info import Model
from ..models.validation import refuse_not_finite
from ..models.view import Kernel
from ..remote.client import NdifClient, Passing
from ..remote.open import on_server, open_source
from ..remote.source import RemoteSource, parts_of
from .data_pass import PassReader, PassState, take_steps
from .kept_runs import Job, parsed
from .report_assembly import make_report
from .validation import AnalyzersArgument, choose_analyzers

# A request of this many positions, where the user names no other number: nothing was timed yet.
TOKENS_PER_REQUEST = 8192
# Seconds between two looks at the jobs, and until a job that the server has never heard of is taken for lost.
PAUSE = 1.0
FORGOTTEN = 60.0
# How often a job is sent that fails for no reason of its own.
ATTEMPTS = 5
KIND = "remote_run"


@named
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
        ndif: NdifClient,
        record: Mapping[str, Any],
    ) -> None:
        self.server, self.analyzers = ndif.name, dict(analyzers)
        self._source, self._model, self._kernels, self._first = source, model, dict(kernels), dict(first)
        self._settings, self._jobs, self._ndif = dict(settings), jobs, ndif
        self._record = dict(record)
        self._unreached: tuple[float, str] | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state.lower()}" for state, number in sorted(self._count().items()))
        return f"RemoteRun({self._model.name} at {self.server}: {len(self._jobs)} jobs, {states})"

    def _count(self) -> Counter[str]:
        return Counter(job.state for job in self._jobs)

    def status(self) -> dict[str, int]:
        """How many jobs are in which state, as the server says: QUEUED, RUNNING, COMPLETED, ERROR ... Fetches what is done."""
        for job in self._jobs:
            if job.state not in ("COMPLETED", "ERROR"):
                self._look(job)
        return dict(self._count())

    def result(self, timeout: float | None = None) -> Report:
        """Wait for all jobs, and make the report of their sums.

        A job that was too long for the server, or that the server has lost, is sent again (in halves, if it was too long) where
        the model is at hand: in the process that sent it, or after `load_run(path, model=...)`.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: the time is over; what has arrived is kept.
            LayersimError: a job failed and cannot be sent again, or the server is gone; what has arrived is kept.
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
                for job in [job for job in self._jobs if job.state == "ERROR"]:
                    self._again(job)
                self._give_up_on_a_silent_server()
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
                    # A refusal is not kept: the next process hears it from the server again.
                    "state": "SENT" if job.state == "ERROR" else job.state,
                    "attempts": job.attempts,
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
            "model_key": without_secrets(self._ndif.model_key),
            "analyzers": {name: _recipe(analyzer) for name, analyzer in self.analyzers.items()},
            "settings": self._settings,
            "first": list(self._first),
            "jobs": jobs,
            "record": {**self._record, "before": self._traffic()},
            "version": version("tl_layersim"),
        }
        return write(path, KIND, header, tensors)

    def _look(self, job: Job) -> None:
        """Ask for the server's word on a job, and take its answer if there is one."""
        word, now = self._ndif.look(job.id), time.monotonic()
        if not word.reached:
            self._unreached = self._unreached or (now, word.failure)
            return
        self._unreached = None
        if word.state is None:
            job.silent_since = job.silent_since or now
            if now - job.silent_since > FORGOTTEN:
                job.state, job.failure = "ERROR", "the server knows nothing of it"
            return
        job.state, job.silent_since, job.failure = word.state, None, word.failure
        job.halve, job.final = word.halve, word.final
        if word.state != "COMPLETED":
            return
        try:
            parts = parts_of((word.found or {}).get("found") or [])
            for part in parts:
                refuse_not_finite(part.not_finite, [self._model.layers], f"job {job.id}")
        except LayersimError as error:
            job.state, job.failure, job.final = "ERROR", str(error), error
            return
        except (AttributeError, TypeError, ValueError) as error:
            job.state, job.failure = "ERROR", f"its answer is of another form ({error})"
            return
        if sum(part.count for part in parts) != len(job.batches):
            job.state, job.failure = "ERROR", "its answer is not whole"
            return
        job.parts, job.batches = parts, []

    def _give_up_on_a_silent_server(self) -> None:
        if self._unreached is not None and time.monotonic() - self._unreached[0] > self._ndif.patience:
            raise self._ndif.given_up(Passing(self._unreached[1]), 1)

    def _again(self, job: Job) -> None:
        """Send a failed job once more, in two halves if it was too long."""
        if job.final is not None:
            raise job.final
        single = job.halve and len(job.batches) == 1
        tired = job.attempts > ATTEMPTS
        if self._source is None or single or tired:
            rows = len(job.batches[0].tokens)
            why = "and holds a single forward pass" if single else "and the model is not at hand"
            raise LayersimError(
                f"A job did not end well, {f'{job.attempts} times' if tired else why}.",
                given=f"job {job.id}: {job.failure}",
                expected="a forward pass that fits into a job"
                if single
                else "a server that ends it, and the model to send it again",
                do=f"batch_size={max(1, rows // 2)} in a new analysis" if single else "lsim.load_run(path, model=model), later",
            )
        half = 1 << ((len(job.batches) - 1).bit_length() - 1) if job.halve else len(job.batches)
        steps, attempts = deque(job.steps), 1 if job.halve else job.attempts + 1
        fresh = []
        for piece in (job.batches[:half], job.batches[half:]):
            if piece:
                name = self._source.send(piece, self._kernels)
                fresh.append(Job(name, piece, take_steps(steps, len(piece)), attempts=attempts))
        fresh[-1].steps += steps
        where = self._jobs.index(job)
        self._jobs[where : where + 1] = fresh

    def _report(self) -> Report:
        state = PassState(Tally({name: Sums() for name in self.analyzers}), BLOCK)
        for job in self._jobs:
            state.waiting.extend(job.steps)
            state.add(job.parts)
            state.add_unmeasured()
        state.close()
        tally = replace(state.tally, seconds=time.time() - self._record["sent"])
        place = {**self._record["place"], **self._traffic()}
        return make_report(self.analyzers, [self._model], tally, tally.sums, self._first, {**self._settings, "remote": [place]})

    def _traffic(self) -> dict[str, int]:
        """Requests and bytes, those of earlier processes included."""
        ndif, before = self._ndif, self._record["before"]
        now = {"requests": ndif.requests, "bytes_sent": ndif.sent, "bytes_received": ndif.received}
        return {name: before[name] + value for name, value in now.items()}


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
    state = PassState(Tally())
    lens_of = source if any(analyzer.needs_unembed for analyzer in analyzers.values()) else None
    most = source.most_tokens or TOKENS_PER_REQUEST
    sent, jobs = time.time(), list[Job]()
    reader = PassReader(batches, analyzers, state, lens_of)
    reading = iter(tqdm(reader, desc="sending", unit="batch", disable=None))
    for group in source.groups(reading, 0, most, lambda: BLOCK):
        jobs.append(Job(source.send(group, kernels), group, take_steps(state.waiting, len(group))))
    if not jobs:
        state.add_unmeasured()
        make_report(analyzers, [source.model], state.tally, {}, first, settings)
    jobs[-1].steps += state.waiting
    if digest and jobs[-1].steps[-1].digest != digest:
        raise LayersimError(
            "`data` was not the same on the second pass.",
            given=type(batches.data).__name__,
            expected="data that gives the same rows each time it is iterated over",
            do="list(data)",
        )
    settings = {**settings, **batches.found()}
    record = {"sent": sent, "place": source.record(), "before": {"requests": 0, "bytes_sent": 0, "bytes_received": 0}}
    return RemoteRun(source, source.model, analyzers, kernels, first, settings, jobs, source.ndif, record)


@typed
def load_run(
    path: str | os.PathLike[str], *, model: Any = None, analyzers: AnalyzersArgument | None = None, remote: str | None = None
) -> RemoteRun:
    """A run that `RemoteRun.save` kept, in this process or another.

    Args:
        path: the file.
        model: the nnsight model, which is needed only to send a failed job again.
        analyzers: as they were given to `analyze`; needed where they are not those of this package or hold tensors.
        remote: the server's address with a login, where it needs one: files keep none.

    Raises:
        LayersimError: the file is none, or the analyzers, the model or the server are not those of the run.
    """
    header, tensors = read_file(path, (KIND,))
    if header.get("version") != version("tl_layersim"):
        raise LayersimError(
            "This run was sent by another tl_layersim, whose sums may mean something else.",
            given=f"tl_layersim {version('tl_layersim')}",
            expected=f"tl_layersim {header.get('version')}",
            do=f"pip install tl_layersim=={header.get('version')}",
        )
    with reading(path, "a whole run", "pass the path that was given to save()"):
        described, first, jobs = parsed(header, tensors)
    if analyzers is None:
        chosen = {name: _rebuilt(name, recipe) for name, recipe in header["analyzers"].items()}
    else:
        chosen = choose_analyzers(analyzers)
    given = {name: _recipe(analyzer) for name, analyzer in chosen.items()}
    if given != header["analyzers"]:
        raise LayersimError(
            "These are not the analyzers of this run.",
            given=str(given)[:300],
            expected=str(header["analyzers"])[:300],
            do="pass analyzers= as they were given to analyze()",
        )
    server = header["server"] if remote is None else remote
    ndif = NdifClient(server, header["model_key"], {})
    if ndif.name != header["server"]:
        raise LayersimError(
            "This is not the server of this run.",
            given=f"remote={shown(server)}",
            expected=header["server"],
            do="pass the same address, with its login",
        )
    kernels = {name: analyzer.kernel(first.get(name, Sums())) for name, analyzer in chosen.items()}
    settings = header["settings"]
    source: RemoteSource | None = None
    if model is not None:
        opened = on_server(open_source(model, remote=server, layers=settings["layers"], unembed=settings["unembed"]))
        now, then = ((m.name, m.config_hash, m.dtype, m.source, m.layers) for m in (opened.model, described))
        if now != then or without_secrets(opened.ndif.model_key) != header["model_key"]:
            raise LayersimError(
                "This is not the model of this run.",
                given=f"{without_secrets(opened.ndif.model_key)} {now[:4]}",
                expected=f"{header['model_key']} {then[:4]}",
                do="load the same model from the same place, revision and adapter included",
            )
        source, ndif = opened, opened.ndif
    return RemoteRun(source, described, chosen, kernels, first, settings, jobs, ndif, header["record"])


def _recipe(analyzer: Analyzer) -> dict[str, Any]:
    cls = type(analyzer)
    where = f"{cls.__module__}.{cls.__qualname__}"
    return {"class": where, "options": analyzer.options(), "code": code_digest(analyzer)}


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
