"""Analyses on a real cluster of Ray on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import tl_layersim as lsim
from tl_layersim.core.errors import LayersimError
from tl_layersim.engine import analyze_on_ray

from .loaders import (
    assert_same,
    data,
    load_missing,
    load_mortal,
    load_mortal_and_drawn,
    load_plain,
    load_plain_nan,
    load_stuck,
)

pytestmark = [
    pytest.mark.heavy("Ray"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray", "ignore:Intervals of"),
    pytest.mark.usefixtures("one_thread"),
]
ROOT = Path(__file__).parents[2]
ANALYZERS = [lsim.Cosine(), lsim.CKA(minibatch=32), lsim.LogitLens()]


@pytest.fixture(scope="module")
def whole():
    return lsim.analyze(load_plain(), data(), ANALYZERS, intervals=True)


def test_a_run_equals_one_process_to_the_last_bit(cluster, whole):
    assert_same(whole, analyze_on_ray(load_plain, data(), ANALYZERS, num_workers=2, intervals=True))


def test_one_pass_over_a_generator_equals_one_process(cluster):
    # Classes are counted without the model, in all data.
    analyzers = [lsim.NeuralCollapse(classes=4), lsim.Cosine(center="none")]
    found = analyze_on_ray(load_plain, lsim.Data(iter(data().source), batch_size=2), analyzers, num_workers=1)
    assert_same(lsim.analyze(load_plain(), data(), analyzers), found, intervals=False)


def test_a_run_whose_worker_is_killed_equals_one_process(cluster, whole, tmp_path):
    import ray.data

    (tmp_path / "flag").touch()
    rows = ray.data.from_items([{"input_ids": row} for row in data().source], override_num_blocks=4)
    # Blocks pass through a stage of Ray Data, which may hand them on out of order.
    rows = rows.map(lambda row: {"input_ids": list(row["input_ids"])})
    loader = partial(load_mortal, tmp_path / "flag", 6)
    found = analyze_on_ray(loader, lsim.Data(rows, batch_size=2), ANALYZERS, num_workers=2, intervals=True)
    assert not (tmp_path / "flag").exists()
    # The hook that ends the worker is a change of its model.
    assert_same(whole, found, ("seconds", "changes"))
    assert not rows.context.execution_options.preserve_order


def test_a_worker_that_does_not_answer_is_not_waited_for(cluster, whole, tmp_path):
    (tmp_path / "flag").touch()
    found = analyze_on_ray(partial(load_stuck, tmp_path / "flag"), data(), ANALYZERS, num_workers=2, intervals=True)
    assert not (tmp_path / "flag").exists()
    assert_same(whole, found, ("seconds", "changes"))


def killed(folder: str, address: str, most: int) -> None:
    """A run whose process is killed when it has written so many parts."""
    import ray

    from tl_layersim.engine.ray import Workers

    add = Workers._add

    def count(self, *arguments):
        if len(list(Path(folder).iterdir())) == most:
            os.kill(os.getpid(), signal.SIGKILL)
        return add(self, *arguments)

    Workers._add = count
    ray.init(address, log_to_driver=False)
    analyze_on_ray(load_plain, data(), ANALYZERS, num_workers=1, intervals=True, checkpoint=folder)


def test_a_run_whose_driver_is_killed_continues_from_its_folder(cluster, whole, tmp_path):
    folder, address = tmp_path / "parts", cluster.get_runtime_context().gcs_address
    # Two passes of 4 shards, as rows are in 4 batches of 16.
    call = f"from tests.ray.test_ray import killed; killed({str(folder)!r}, {address!r}, 6)"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(path.name.split("-")[0] for path in before) == ["first"] * 4 + ["main"] * 2
    run = partial(analyze_on_ray, load_plain, intervals=True, checkpoint=folder)
    assert_same(whole, run(data(), ANALYZERS, num_workers=2))
    after = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(after) == 8
    assert before.items() <= after.items()
    with pytest.raises(LayersimError, match=r"`checkpoint`.*analyzers"):
        run(data(), ANALYZERS[:2], num_workers=1)
    with pytest.raises(LayersimError, match=r"`checkpoint`.*720"):
        run(lsim.Data(data().source[::-1], batch_size=2), ANALYZERS, num_workers=1)


def test_errors_of_workers_reach_the_caller_as_they_are(cluster, tmp_path):
    for loader, kind, match, function in (
        (load_missing, FileNotFoundError, "no such checkpoint", "load_missing"),
        (load_plain_nan, LayersimError, "NaN or infinite", "refuse_not_finite"),
    ):
        with pytest.raises(kind, match=match) as caught:
            analyze_on_ray(loader, data(), ["cka"], num_workers=1)
        assert type(caught.value) is kind
        assert any(f"in {function}" in note for note in caught.value.__notes__)
    (tmp_path / "flag").touch()
    with pytest.raises(LayersimError, match=r"`load_model`.*models"):
        analyze_on_ray(partial(load_mortal_and_drawn, tmp_path / "flag"), data(), ["cka"], num_workers=1)


def test_what_cannot_be_done_on_ray_is_refused(cluster):
    for loader, options, error, match in (
        (load_plain, {"num_workers": 0}, LayersimError, "`num_workers`.* 0,"),
        (load_plain().model, {"num_workers": 1}, LayersimError, "`load_model`.*Plain"),
        (load_plain, {"num_workers": 1, "resources": {"banana": 3}}, ValueError, "banana"),
    ):
        with pytest.raises(error, match=match):
            analyze_on_ray(loader, data(), ["cka"], **options)
