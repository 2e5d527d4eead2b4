"""Plausible mistakes of first-time users that were taken without a word: settings that would train or run something else."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.models import layer_names

from ..tiny_models import random_tokens, tiny_llama

NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight_decay": NAN}, "`weight_decay` of AlignedTraining cannot be nan"),
        ({"objective": "cosine-reg", "beta": NAN}, "`beta` of AlignedTraining cannot be nan"),
        ({"objective": "multi-head", "kl": NAN}, "`kl` of AlignedTraining cannot be nan"),
        ({"weights": []}, "`weights` must be one number for each layer"),
        ({"weights": [0.5, NAN]}, "`weights` must be one number for each layer"),
        ({"weights": ""}, "`weights` cannot be ''"),
    ],
)
def test_settings_of_a_training_are_checked_when_they_are_written(options, says):
    with pytest.raises(lsim.LayersimError, match=says):
        lsim.AlignedTraining(**options)


def test_an_empty_address_does_not_run_here(llama):
    with pytest.raises(lsim.LayersimError, match="`remote` is an empty string"):
        lsim.analyze(lsim.open_model(llama, remote=""), random_tokens(4), "cosine")


@pytest.mark.parametrize("tokenizer", [lsim.CKA, lambda text: [1, 2], "gpt2"])
def test_what_is_no_tokenizer_is_refused_by_name(llama, tokenizer):
    for call in (
        lambda: lsim.analyze(llama, lsim.Data(["w5 w6"], tokenizer=tokenizer), "cosine"),
        lambda: lsim.finetune_aligned(tiny_llama(), lsim.Data(["w5 w6"], tokenizer=tokenizer)),
        lambda: lsim.EarlyExit(llama).generate("w5 w6", max_new_tokens=1, tokenizer=tokenizer),
    ):
        with pytest.raises(lsim.LayersimError, match="`tokenizer` must be a loaded tokenizer"):
            call()


def test_a_ridge_that_is_not_a_number_is_refused(llama):
    with pytest.raises(lsim.LayersimError, match="ridge"):
        lsim.stitch(llama, llama, random_tokens(4), at=(1, 1), fit="lstsq", ridge=NAN)


def test_truncate_checks_its_folder_and_early_exit_its_lowest_layer(llama, tmp_path):
    (tmp_path / "file").write_text("mine")
    for save_to in (tmp_path / "file", 3, True):
        with pytest.raises(lsim.LayersimError, match="`save_to`"):
            lsim.truncate(llama, 1, save_to=save_to)
    assert (tmp_path / "file").read_text() == "mine"
    for min_layer in (0, -1):
        with pytest.raises(lsim.LayersimError, match="`min_layer` must be at least 1"):
            lsim.EarlyExit(llama, min_layer=min_layer)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: lsim.ExitCosts.count(m, rule="max-probs"), "`rule` must be the name of an exit rule"),
        (lambda m: lsim.ExitCosts.count(m, batch=0), "`batch` of ExitCosts"),
        (lambda m: lsim.ExitCosts.count(m, shortlist=3), "`shortlist` must be a list of token ids"),
        (lambda m: lsim.frequent_tokens(m, [], 5), "empty"),
        (lambda m: lsim.Adapter(["linear"]), "`kind` of Adapter cannot be"),
        (lambda m: lsim.linear_probe(m, []), "`data` is empty"),
        (lambda m: lsim.CKA(max_memory_gb=NAN), "max_memory_gb=nan"),
        (lambda m: lsim.LinearPredictivity(seed=True), "`seed` of LinearPredictivity cannot be True"),
        (lambda m: lsim.CKA(seed=2**63), "`seed` of CKA cannot be"),
        (lambda m: lsim.overlay({"a": lsim.analyze(m, random_tokens(2), "cosine")}, level=1), "level=1"),
        (lambda m: lsim.Devices("x", 0, 1.0, 1.0, 1.0, 1.0, 1.0, "me"), "count=0"),
        (lambda m: lsim.block_jacobians(m, random_tokens(1)[0], layers=[]), "`layers` is empty"),
        (lambda m: lsim.eval_mode(3), "`module` of eval_mode cannot be 3"),
        (lambda m: lsim.Report([]), "`results` must be a mapping"),
        (lambda m: lsim.EarlyExit(m).generate(random_tokens(1) + 1000), "`prompt`"),
        (lambda m: lsim.EarlyExit(m).logits(random_tokens(2)[:0]), "`tokens`"),
        (lambda m: lsim.analyze(m, lsim.Data(random_tokens(2), tokenizer=tiny_llama()), "cosine"), "`tokenizer`"),
        (lambda m: layer_names("3"), "`blocks` of layer_names cannot be '3'"),
        (lambda m: lsim.prediction_grid(m, random_tokens(1)[0], lens_memory_mb=NAN), "lens_memory_mb=nan"),
        (lambda m: lsim.prediction_grid(m, random_tokens(1)[0], lens_memory_mb=-1), "lens_memory_mb=-1"),
        (lambda m: lsim.Continuations(["w3"], top_p=95), "`top_p`"),
        (lambda m: lsim.evaluate_layers(m, m, random_tokens(2), threshold=95), "threshold=95"),
        (lambda m: lsim.analyze(m, random_tokens(2), lsim.CKA(estimator="exact", max_memory_gb=NAN)), "max_memory_gb=nan"),
    ],
)
def test_numbers_and_kinds_that_mean_nothing_are_refused_by_name(llama, call, says):
    model = tiny_llama()
    from ..tiny_models import tiny_tokenizer

    model.tokenizer = tiny_tokenizer()
    with pytest.raises(lsim.LayersimError, match=says):
        call(model)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "a file", "broken"])
def test_the_command_line_names_a_model_that_is_not_there(kind, tmp_path, monkeypatch, capsys):
    from tl_layersim.cli import main

    place = tmp_path / "model"
    if kind == "empty folder":
        place.mkdir()
    if kind == "broken":
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "no_such_type"}')
    if kind == "a file":
        place.write_text("x")
    monkeypatch.setattr("sys.argv", ["tl-layersim", "report", "--model", str(place), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "Error: `--model`" in said
    assert str(place) in said
    assert "expected:" in said


def test_the_command_line_names_data_that_is_no_text(tmp_path, monkeypatch, capsys):
    from tl_layersim.cli import main

    (tmp_path / "data.txt").write_bytes(b"a text \xff\xfe\x00")
    monkeypatch.setattr("sys.argv", ["x", "report", "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    assert "`--data` is a file that cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["save", "to_html"])
def test_a_place_that_is_none_is_refused_by_name(call):
    report = lsim.analyze(tiny_llama(), random_tokens(2), "cosine")
    with pytest.raises(lsim.LayersimError, match=f"`path` of .*{call} cannot be None"):
        getattr(report, call)(None)


def test_a_model_without_weights_is_measured():
    model, data = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.randn(4, 3).abs()
    found = lsim.analyze(model, data, lsim.Cosine(center="none"), at=["0", "1"])["cosine"]
    torch.testing.assert_close(found.values[0, 1], torch.cosine_similarity(data, data.tanh()).double().mean())


def test_a_mapping_of_data_is_not_taken_for_analyzers():
    with pytest.raises(lsim.LayersimError, match="`analyzers`"):
        lsim.analyze(tiny_llama(), random_tokens(2), {"input_ids": random_tokens(2)})
