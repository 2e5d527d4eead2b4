"""Run tests on a mutant in a forked process, which has the heavy libraries already and compiles the mutant in memory.

Nothing is written into the package. What reads source again, as nnsight does with kernels, finds the mutant's in `linecache`;
a process that a test starts reads the files as they are.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tl_layersim"
# Imported once, by the parent. Nothing of the package itself, and nothing that starts threads.
# pytest's plugins come first: nnsight gives every object a method, which anyio takes for its own.
HEAVY = (
    "anyio.pytest_plugin",
    "hypothesis",
    "numpy",
    "pandas",
    "scipy.stats",
    "statsmodels.api",
    "plotly.graph_objects",
    "torch",
    "torch._dynamo",
    "datasets",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "transformers.models.vit.modeling_vit",
    "transformers.trainer",
    "transformer_lens",
    "transformer_lens.model_bridge",
    "nnsight",
    "peft",
    "accelerate",
)
ARGUMENTS = (
    "-x",
    "-q",
    # Light and heavy tests.
    "-m",
    "",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "--tb=line",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)


def prepare() -> None:
    """What the parent does once, before any fork."""
    os.chdir(ROOT)
    # The same examples each time, and no thread that a fork would lose.
    os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.split(".")[0] == PACKAGE for name in sys.modules), "the package must be imported by children alone"
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from text in place of its file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text.encode() if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.text.encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutant before anybody finds the file."""

    def __init__(self, path: Path, text: str) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.folder = [str(path.parent)] if parts[-1] == "__init__" else None
        self.name = ".".join(parts[:-1] if self.folder else parts)
        self.path, self.text = str(path), text
        # Without a time of change no check of the cache looks at the file.
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        loader = _Loader(self.name, self.path, self.text)
        return importlib.util.spec_from_file_location(
            self.name, self.path, loader=loader, submodule_search_locations=self.folder
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        # From here on pytest's own finder takes every file that is named on the command line, as those with doctests are.
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)


class Child:
    """A forked process that runs tests. `poll` gives its answer once it is done or out of time.

    Args:
        tests: ids of tests, or files.
        limit: seconds until it is killed.
        mutant: path and text of a module to replace.
        record: file for what each test called; None to record nothing.
        log: file for what it prints.
    """

    def __init__(
        self, tests: Sequence[str], limit: float, log: Path, mutant: tuple[Path, str] | None = None, record: Path | None = None
    ) -> None:
        self.started, self.limit, self.log = time.monotonic(), limit, log
        self.pid = os.fork()
        if self.pid == 0:
            self._run(tests, mutant, record)

    def _run(self, tests: Sequence[str], mutant: tuple[Path, str] | None, record: Path | None) -> None:
        code = 70
        try:
            os.setsid()
            out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            plugins: list[object] = [] if record is None else [_Recorder(record)]
            if mutant is not None:
                sys.meta_path.insert(0, finder := _Finder(*mutant))
                plugins.append(finder)
            # Files that are recorded run to their end.
            arguments = [item for item in ARGUMENTS if record is None or item != "-x"]
            code = int(pytest.main([*arguments, *tests], plugins=plugins))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> tuple[int | None, float] | None:
        """None while it runs; then pytest's exit code, None if it ran out of time, and the seconds it took."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.started
        if done:
            self._end()
            return os.waitstatus_to_exitcode(status), seconds
        if seconds < self.limit:
            return None
        self._end()
        os.waitpid(self.pid, 0)
        return None, seconds

    def _end(self) -> None:
        """End it and whatever its tests have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class _Recorder:
    """A plugin of pytest that writes, for each test that passed, its seconds and which functions of the package it called."""

    def __init__(self, path: Path) -> None:
        self.path, self.prefix = path, str(ROOT / PACKAGE) + os.sep
        self.tests: dict[str, dict[str, Any]] = {}
        self.shared: set[str] = set()
        self.passed: set[str] = set()
        self.called: set[str] = set()

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self.prefix):
            self.called.add(f"{frame.f_code.co_filename[len(str(ROOT)) + 1 :]}::{frame.f_code.co_qualname}")

    @contextlib.contextmanager
    def _watched(self) -> Iterator[set[str]]:
        self.called = set()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self.called
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        with self._watched() as called:
            result = yield
        # A fixture that several tests share was made by the first of them.
        self.shared |= called
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        with self._watched() as called:
            started = time.process_time()
            result = yield
        # Seconds of this process alone, which other work on the machine does not stretch.
        self.tests[item.nodeid] = {"calls": sorted(called), "seconds": time.process_time() - started}
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: data for test, data in self.tests.items() if test in self.passed}
        self.path.write_text(json.dumps({"tests": passed, "shared": sorted(self.shared)}))
