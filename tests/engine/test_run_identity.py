"""Every input of a run is compared where a run continues from a file and where shards are merged."""

from __future__ import annotations

import warnings

import pytest

import tl_layersim as lsim
from tl_layersim.engine import run
from tl_layersim.engine.run_identity import INPUTS

from ..inputs.views import worst
from .run_inputs import CHANGES, UNCHANGED, Call, calls_of

# Differences of versions and of processes are tested where they can be made.
ELSEWHERE = {"versions", "processes"}


class Interrupted(KeyboardInterrupt):
    pass


def interrupt(call: Call, path, monkeypatch) -> None:
    """Run a call up to its third batch."""
    batches = []
    check = run.DataPass._refuse_not_finite

    def counted(data_pass, parts):
        batches.append(1)
        if len(batches) == 3:
            raise Interrupted
        check(data_pass, parts)

    with monkeypatch.context() as patch:
        patch.setattr(run.DataPass, "_refuse_not_finite", counted)
        with pytest.raises(Interrupted):
            call.run(checkpoint=path)
    assert path.exists()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_input_has_a_change():
    assert {entry for entry, _ in CHANGES.values()} | ELSEWHERE == set(INPUTS)


# A change of each input.
@pytest.mark.light(
    "one token",
    "one label",
    "rule of positions",
    "an empty row before",
    "batch size",
    "other words",
    "option",
    "one weight",
    "entry of the configuration",
    "hook",
    "head",
    "dtype",
    "autocast",
    "eager attention",
    "sites",
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_with_another_input_is_refused(name, tmp_path, monkeypatch):
    base, changed = calls_of(CHANGES[name][1])
    interrupt(base, tmp_path / "run", monkeypatch)
    with pytest.raises(lsim.LayersimError, match=r"another run|`data`"):
        changed.run(checkpoint=tmp_path / "run")


# The digests of the data are compared shard by shard. The rest of the identity, which the files above compare with each change,
# is one mapping: one change of each of its inputs.
DIGESTED = {"rows", "positions", "labels", "texts"}
OF_EACH_INPUT = {entry: name for name, (entry, _) in reversed(CHANGES.items())}
OF_SHARDS = [name for name, (entry, _) in CHANGES.items() if entry in DIGESTED or name == OF_EACH_INPUT[entry]]


@pytest.mark.light("one token", "rule of positions", "option", "one weight")
@pytest.mark.parametrize("name", OF_SHARDS)
def test_shards_with_another_input_are_refused(name, tmp_path):
    for number, call in enumerate(calls_of(CHANGES[name][1])):
        call.run(shard=(number, 2), save_to=tmp_path / f"{number}.safetensors")
    with pytest.raises(lsim.LayersimError, match=r"another run|[Oo]ther data"):
        lsim.merge(tmp_path)


@pytest.mark.light(
    "the same call",
    "train mode",
    "gradient checkpointing on and off",
    "autocast that is off",
    "adapter that was merged",
    "iterable data set",
    "GPT-2 loaded again",
)
@pytest.mark.parametrize("name", UNCHANGED)
def test_a_run_with_the_same_inputs_continues(name, tmp_path, monkeypatch):
    base, equal = calls_of(UNCHANGED[name])
    interrupt(base, tmp_path / "run", monkeypatch)
    if any(type(analyzer).__name__ == "OwnNorm" for analyzer in base.analyzers):
        pytest.skip("its results are those of another analyzer")
    expected = base.run()
    report = equal.run(checkpoint=tmp_path / "run")

    assert max(worst(report[key], expected[key]) for key in expected) < 1e-5
    assert {report[key].provenance.data for key in report} == {expected[key].provenance.data for key in expected}


@pytest.mark.light("the same call", "gradient checkpointing on and off", "adapter that was merged", "GPT-2 loaded again")
@pytest.mark.parametrize("name", UNCHANGED)
def test_shards_with_the_same_inputs_are_merged(name, tmp_path):
    base, equal = calls_of(UNCHANGED[name])
    for number, call in enumerate((base, equal)):
        call.run(shard=(number, 2), save_to=tmp_path / f"{number}.safetensors")
    if any(type(analyzer).__name__ == "OwnNorm" for analyzer in base.analyzers):
        pytest.skip("its results are those of another analyzer")
    merged = lsim.merge(tmp_path, analyzers=base.analyzers)
    expected = base.run()

    assert max(worst(merged[key], expected[key]) for key in expected) < 1e-5
