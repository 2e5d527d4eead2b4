"""Runs with workers that are lost, fail or are interrupted, with a stand-in for Ray."""

from __future__ import annotations

from functools import partial

import pytest

import tl_layersim as lsim
from tl_layersim.core.errors import LayersimError

from .loaders import assert_same, load, load_missing, load_nan, texts

ANALYZERS = [lsim.Cosine(), lsim.CKA(minibatch=32), lsim.LogitLens()]


def data():
    return lsim.Data(texts(210), batch_size=2, max_tokens=2800)


pytestmark = pytest.mark.filterwarnings("ignore:Intervals of")


@pytest.fixture(scope="module")
def whole():
    return lsim.analyze(load(), data(), ANALYZERS, intervals=True)


@pytest.fixture
def on_ray(small_ray):
    """A run with two workers, all of which are ended after it, whatever happens."""
    from tl_layersim.ray import analyze_on_ray

    yield partial(analyze_on_ray, data=data(), analyzers=ANALYZERS, num_workers=2, intervals=True)
    assert small_ray.actors
    assert all(actor.instance is None for actor in small_ray.actors)


def test_batches_of_lost_workers_are_run_again(small_ray, on_ray, whole):
    small_ray.lost = {3, 7, 8}
    assert_same(whole, on_ray(load))


def node_died(errors):
    from ray._raylet import ActorID
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    text = "The actor died because its node has died. Node Id: 1f"
    return errors.ActorDiedError(ActorDiedErrorContext(actor_id=ActorID.nil().binary(), error_message=text))


@pytest.mark.parametrize(
    ("make", "given", "do"),
    [
        (lambda errors: errors.OutOfMemoryError("low on memory"), "OutOfMemoryError: low on memory", "resources={'memory'"),
        (lambda errors: errors.NodeDiedError("node 1f is gone"), "NodeDiedError: node 1f is gone", "`checkpoint`"),
        (node_died, "ActorDiedError: The actor died because its node has died. Node Id: 1f", "`checkpoint`"),
        (lambda errors: errors.WorkerCrashedError(), "WorkerCrashedError: The worker died unexpectedly", "Ray's logs"),
        (lambda errors: errors.ActorUnavailableError("socket closed", None), "ActorUnavailableError: ", "Ray's logs"),
    ],
)
def test_batches_with_which_four_workers_are_lost_end_the_run_with_their_cause(small_ray, on_ray, make, given, do):
    small_ray.lost, small_ray.loss = {1, 2, 3, 4}, make(small_ray.exceptions)
    with pytest.raises(LayersimError, match="Workers were lost 4 times with the same batches") as lost:
        on_ray(load, data=texts(2))
    assert given in str(lost.value)
    assert do in str(lost.value)
    assert ("'memory'" in str(lost.value)) == ("memory" in given)


def test_errors_of_workers_reach_the_caller_as_they_are(on_ray):
    with pytest.raises(FileNotFoundError, match="no such checkpoint") as missing:
        on_ray(load_missing)
    assert any("in load_missing" in note for note in missing.value.__notes__)
    with pytest.raises(LayersimError, match="NaN or infinite") as refused:
        on_ray(load_nan)
    assert type(refused.value) is LayersimError


def test_resources_that_no_machine_has_are_named(on_ray, whole):
    with pytest.warns(lsim.LayersimWarning, match=r"`resources`.*'banana': 3.*'banana': 0"):
        assert_same(whole, on_ray(load, resources={"resources": {"banana": 3}}))


def test_an_interrupted_run_continues_from_its_checkpoint(small_ray, on_ray, whole, tmp_path):
    def interrupt(most):
        if small_ray.calls.count("sums") >= most:
            raise KeyboardInterrupt

    # In the first pass, and in the second one. Each has 11 batches of 16 rows; those that the workers hold are lost.
    for most in (10, 14):
        small_ray.calls, small_ray.on_wait = [], partial(interrupt, most)
        with pytest.raises(KeyboardInterrupt):
            on_ray(load, checkpoint=tmp_path / "run.ckpt")
        assert all(actor.instance is None for actor in small_ray.actors)
    small_ray.calls, small_ray.on_wait = [], lambda: None
    assert_same(whole, on_ray(load, checkpoint=tmp_path / "run.ckpt"))
    done, small_ray.calls = small_ray.calls.count("sums"), []
    on_ray(load)
    assert 0 < done < small_ray.calls.count("sums")
