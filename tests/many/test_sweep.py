"""One analysis of many models: what is alive, what is kept, and what is continued."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.many import SweepError
from tl_layersim.many.sweep import data_digest
from tl_layersim.sources.hooked_module import HookedSource

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..running.options import called

ANALYZERS = [lsim.Cosine(center="none"), lsim.Trajectory()]


@pytest.fixture(scope="module")
def models():
    return {step: tiny_llama(seed=step) for step in (0, 10, 1000)}


def equal(a, b):
    return all(
        torch.equal(getattr(a[name], field).nan_to_num(-7), getattr(b[name], field).nan_to_num(-7))
        for name in a
        for field in a[name].tensor_fields()
    ) and list(a) == list(b)


class TestModels:
    def test_each_report_is_that_of_analyze(self, models):
        data = lsim.Data(random_tokens(8), batch_size=4)
        reports = lsim.sweep(models, data, ANALYZERS)

        assert list(reports) == [0, 10, 1000]

        step_report = lsim.analyze(models[10], data, list(ANALYZERS))
        for name in step_report:
            np.testing.assert_allclose(reports[10][name].values, step_report[name].values, rtol=1e-12)

    @pytest.mark.heavy("many models")
    def test_at_most_one_loaded_model_is_alive(self):
        refs = []
        most = []

        def load(seed):
            most.append(sum(ref() is not None for ref in refs))
            model = tiny_llama(seed=seed)
            refs.append(weakref.ref(model))
            return model

        gc.disable()
        try:
            loaders = {seed: partial(load, seed) for seed in range(3)}
            lsim.sweep(loaders, random_tokens(4), [*ANALYZERS, lsim.LogitLens(), lsim.BlockCoupling(k=3)])
        finally:
            gc.enable()

        assert most == [0, 0, 0]
        assert [ref() for ref in refs] == [None] * 3

    def test_a_loaded_model_is_used_as_it_is(self, models):
        before = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
        mixed = lsim.sweep({"own": models[0], "other": lambda: tiny_llama(seed=1)}, random_tokens(4), ANALYZERS)

        assert list(mixed) == ["own", "other"]
        assert all(torch.equal(before[name], parameter) for name, parameter in models[0].named_parameters())

    def test_options_reach_analyze(self, models):
        reports = lsim.sweep(
            {1: models[0]}, lsim.Data(["w5 w6 w7 w8"], seq_len=3, tokenizer=tiny_tokenizer(), skip_first=1), "cosine"
        )
        options = reports[1]["cosine"].provenance.options

        assert (options["seq_len"], options["skip_first"]) == (3, 1)
        assert not reports[1]["cosine"].has_intervals

    def test_loaders_of_the_same_weights_are_noticed(self):
        with pytest.warns(lsim.LayersimWarning, match=r"models 1, 2 of the sweep have the same weights.*functools.partial"):
            lsim.sweep({1: tiny_llama, 2: tiny_llama, 3: partial(tiny_llama, seed=1)}, random_tokens(4), "cosine")


class TestRefusals:
    def test_models_data_that_is_read_once_and_unknown_options(self, models):
        late = {"a": lambda: pytest.fail("a model was loaded"), "b": "org/name"}
        for models_argument, match in (([], r"`models`.*\[\]"), (late, "^`models`.*'org/name'.*'b'")):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.sweep(models_argument, random_tokens(4), "cosine")
        with pytest.raises(lsim.LayersimError, match=r"read only once[\s\S]*list\(data\)"):
            lsim.sweep(models, (row for row in ["w5 w6"]), "cosine")
        for name, value in {"max_length": 8, "blocking": False, "model": models[0]}.items():
            with pytest.raises(TypeError, match=name):
                called(lsim.sweep, models, random_tokens(4), "cosine", **{name: value})
        with pytest.raises(lsim.LayersimError, match=r"`analyzers`.*'cosin'"):
            lsim.sweep(models, random_tokens(4), "cosin")

    def test_keys_are_kept_and_those_of_numpy_are_numbers(self, models):
        assert list(lsim.sweep({np.int64(3): models[0], (1, "a"): models[0]}, random_tokens(4), "cosine")) == [3, (1, "a")]

    def test_a_model_that_fails_is_named_and_the_others_are_kept(self, models):
        def broken():
            raise OSError("no such checkpoint")

        with pytest.raises(SweepError, match=r"Model 10 .*OSError: no such checkpoint") as caught:
            lsim.sweep({0: models[0], 10: broken, 1000: models[10]}, random_tokens(4), ANALYZERS)
        assert list(caught.value.reports) == [0]
        assert "number 2 of 3. The reports of 1 model are kept." in str(caught.value)
        with pytest.raises(lsim.LayersimError, match=r"Model 'a' .*`models` is an int\b") as caught:
            lsim.sweep({"a": lambda: 3}, random_tokens(4), ANALYZERS)
        assert len(caught.value.reports) == 0
        assert "error.reports" not in str(caught.value)

    def test_a_report_whose_file_cannot_be_written_is_in_the_error(self, tmp_path, models, monkeypatch):
        def full(self, path):
            raise OSError("no space left")

        monkeypatch.setattr(lsim.Report, "save", full)

        with pytest.raises(SweepError, match="no space left") as caught:
            lsim.sweep({0: models[0]}, random_tokens(4), ANALYZERS, checkpoint=tmp_path / "sweep")
        assert list(caught.value.reports) == [0]


class TestCheckpoint:
    def test_finished_models_are_not_loaded_again(self, tmp_path):
        loaded = []

        def load(seed):
            loaded.append(seed)
            return tiny_llama(seed=seed)

        whole = lsim.sweep(
            {seed: partial(load, seed) for seed in range(2)}, random_tokens(4), ANALYZERS, checkpoint=tmp_path / "new"
        )
        reordered = {seed: partial(load, seed) for seed in (0, 2, 1)}
        reports = lsim.sweep(reordered, random_tokens(4), ANALYZERS, checkpoint=tmp_path / "new")

        assert loaded == [0, 1, 2]
        assert list(reports) == [0, 2, 1]
        assert equal(reports[1], whole[1])

        [report_file] = (tmp_path / "new").glob("model-1-*")
        assert equal(lsim.load(report_file), whole[1])
        assert not list((tmp_path / "new").glob("*.partial"))

    @pytest.mark.heavy("many runs")
    def test_an_interrupted_model_continues_from_its_partial_sums(self, tmp_path, models, monkeypatch):
        batches_read = []
        last = 3
        run = HookedSource.run

        def counted(source, batch, kernels):
            # Ends like Ctrl-C after some forward passes.
            if source.module is models[10]:
                if len(batches_read) == last:
                    raise KeyboardInterrupt
                batches_read.append(1)
            return run(source, batch, kernels)

        monkeypatch.setattr(HookedSource, "run", counted)
        data = random_tokens(8)

        with pytest.raises(KeyboardInterrupt) as caught:
            lsim.sweep(models, lsim.Data(data, batch_size=1), ANALYZERS, checkpoint=tmp_path)

        notes = " ".join(caught.value.__notes__)
        assert "Model 10 is number 2 of 3. The reports of 1 model are kept in" in notes
        assert len(list(tmp_path.glob("model-10-*.partial"))) == 1

        batches_read = []
        last = None
        reports = lsim.sweep(models, lsim.Data(data, batch_size=1), ANALYZERS, checkpoint=tmp_path)
        # Fewer forward passes than rows: those before the interrupt are not repeated.
        assert len(batches_read) < 8

        whole = lsim.analyze(models[10], lsim.Data(data, batch_size=1), ANALYZERS)
        assert equal(reports[10], whole)

    def test_an_interrupt_without_a_folder_says_how_to_keep_models(self, models):
        def interrupted():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            lsim.sweep({0: interrupted}, random_tokens(4), "cosine")
        assert "checkpoint= keeps finished models" in caught.value.__notes__[-1]

    def test_other_analyzers_options_and_data_are_refused_by_name(self, tmp_path, models):
        def run(data=None, analyzers=ANALYZERS, **options):
            return called(
                lsim.sweep, models, random_tokens(4) if data is None else data, analyzers, checkpoint=tmp_path, **options
            )

        run(batch_size=2)
        run(batch_size=2)

        for arguments, match in (
            ({"batch_size": 4}, "options: batch_size: 4"),
            ({"batch_size": 2, "intervals": True}, "intervals: True"),
            ({"batch_size": 2, "analyzers": [lsim.Cosine(), lsim.Trajectory()]}, "analyzers: cosine"),
            ({"batch_size": 2, "analyzers": "cosine"}, "trajectory: None"),
            ({"batch_size": 2, "data": random_tokens(4, seed=1)}, "data: "),
            ({"batch_size": 2, "positions": lambda ids: ids > 0}, "positions: .*lambda"),
        ):
            with pytest.raises(lsim.LayersimError, match=rf"belongs to another run[\s\S]*{match}"):
                run(**arguments)

    def test_a_folder_that_cannot_be_made_is_refused(self, tmp_path, models):
        with pytest.raises(lsim.LayersimError, match=r"`checkpoint` .*does not exist"):
            lsim.sweep(models, random_tokens(4), "cosine", checkpoint=tmp_path / "no" / "folder")

    def test_names_with_signs_have_files_of_their_own(self, tmp_path, models):
        names = {"org/a b": models[0], "org_a_b": models[10]}
        reports = lsim.sweep(names, random_tokens(4), "cosine", checkpoint=tmp_path)

        assert len(list(tmp_path.glob("model-org_a_b-*.safetensors"))) == 2

        repeated = lsim.sweep(names, random_tokens(4), "cosine", checkpoint=tmp_path)
        assert all(equal(reports[name], repeated[name]) for name in names)

    def test_digests_tell_data_apart(self):
        tokens = random_tokens(4)
        kinds = [
            ["a", "b"],
            ["ab"],
            ["a", "b", "c"],
            ("a", ["b"]),
            [b"a", "b"],
            [1, True],
            [1, 1],
            tokens,
            tokens.clone().add_(1),
            tokens.int(),
            tokens.view(-1, 2),
            {"input_ids": tokens},
            {"inputs": tokens},
            [{"text": "a", "label": 1}],
            [{"text": "a", "label": 2}],
            tokens.numpy(),
            [tokens[0].numpy()],
            [object()],
            [None],
        ]

        assert len({data_digest(kind) for kind in kinds}) == len(kinds)
        assert data_digest([{"b": 1, "a": 2}]) == data_digest([{"a": 2, "b": 1}])
        assert data_digest(["x"] * 1500) != data_digest(["x"] * 1501)
        assert data_digest(["x"] * 1500 + ["y"]) != data_digest(["x"] * 1501)
