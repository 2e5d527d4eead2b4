"""Plausible mistakes of first-time users: calls that would train, run or write something else without an error."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures import layer_names
from tl_layersim.cli import main
from tl_layersim.early_exit import frequent_tokens
from tl_layersim.sources import eval_mode

from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer

NAN = float("nan")
TOKENS = random_tokens(2)

# 0 for tokens, a large negative number for padding, as models add it to scores.
ADDITIVE = torch.zeros(TOKENS.shape).index_fill(1, torch.tensor([0]), -1e9)
# What the error names, the argument and its value, and the call.
MISTAKES = [
    ("`weight_decay`.* nan", lambda m: lsim.AlignedTraining(weight_decay=NAN)),
    ("`beta`.* nan", lambda m: lsim.AlignedTraining(objective="cosine-reg", beta=NAN)),
    ("`kl`.* nan", lambda m: lsim.AlignedTraining(objective="multi-head", kl=NAN)),
    ("`remote`.* ''", lambda m: lsim.analyze(lsim.open_model(m, remote=""), TOKENS, "cosine")),
    ("`ridge`.* nan", lambda m: lsim.stitch(m, m, TOKENS, at=(1, 1), fit="lstsq", ridge=NAN)),
    ("`rule`.*max-probs", lambda m: lsim.early_exit.ExitCosts.measure(m, rule="max-probs")),
    ("`batch`.* 0", lambda m: lsim.early_exit.ExitCosts.measure(m, batch=0)),
    ("`shortlist`.* 3", lambda m: lsim.early_exit.ExitCosts.measure(m, shortlist=3)),
    ("`data`", lambda m: frequent_tokens(m, [], 5)),
    ("`kind`.*linear", lambda m: lsim.stitching.Adapter(["linear"])),
    ("`data`", lambda m: lsim.linear_probe(m, [])),
    ("`max_memory_gb`.* nan", lambda m: lsim.CKA(max_memory_gb=NAN)),
    ("`max_memory_gb`.* nan", lambda m: lsim.CKA(estimator="exact", max_memory_gb=NAN)),
    ("`seed`.* True", lambda m: lsim.LinearPredictivity(seed=True)),
    (f"`seed`.* {2**63}", lambda m: lsim.CKA(seed=2**63)),
    ("`runs`.*CausalLM", lambda m: lsim.stack({"a": m})),
    (r"`layers`.* \[\]", lambda m: lsim.prompts.block_jacobians(m, TOKENS[0], layers=[])),
    ("`module`.* 3", lambda m: eval_mode(3)),
    (r"`results`.* \[\]", lambda m: lsim.Report([])),
    ("`prompt`", lambda m: lsim.EarlyExit(m).generate(TOKENS[:1] + 1000)),
    ("`tokens`", lambda m: lsim.EarlyExit(m).logits(TOKENS[:0])),
    (f"`seed`.* {2**65}", lambda m: lsim.EarlyExit(m).generate(TOKENS, seed=2**65)),
    ("`threshold`.* nan", lambda m: lsim.analyze(m, TOKENS, lsim.ExitCurve())["exit_curve"].at(NAN)),
    (r"`tokens`.* 10\d\d", lambda m: lsim.training.aligned_loss(m, TOKENS + 1000)),
    ("`tokens`.*0, 20", lambda m: lsim.training.aligned_loss(m, TOKENS[:0])),
    ("`blocks`.* '3'", lambda m: layer_names("3")),
    ("`lens_memory_mb`.* nan", lambda m: lsim.prompts.prediction_grid(m, TOKENS[0], lens_memory_mb=NAN)),
    ("`lens_memory_mb`.* -1", lambda m: lsim.prompts.prediction_grid(m, TOKENS[0], lens_memory_mb=-1)),
    ("`top_p`.* 95", lambda m: lsim.training.Continuations(["w3"], top_p=95)),
    ("`threshold`.* 95", lambda m: lsim.evaluate_layers(m, m, TOKENS, threshold=95)),
    ("`analyzers`", lambda m: lsim.analyze(m, TOKENS, {"input_ids": TOKENS})),
    ("`attention_mask`.* -1e", lambda m: lsim.analyze(m, {"input_ids": TOKENS, "attention_mask": ADDITIVE}, "cosine")),
    ("`attention_mask`.* -1e", lambda m: lsim.training.aligned_loss(m, TOKENS, attention_mask=ADDITIVE)),
    ("`attention_mask`.* -1e", lambda m: lsim.EarlyExit(m).logits(TOKENS, ADDITIVE)),
    ("`attention_mask`.* -1e", lambda m: lsim.EarlyExit(m).generate(TOKENS, attention_mask=ADDITIVE)),
    ("`attention_mask`.* -1e", lambda m: setattr(lsim.attach(m, "cka"), "mask", ADDITIVE)),
    ("`path`.* None", lambda m: lsim.analyze(m, TOKENS, "cosine").save(None)),
    ("`path`.* None", lambda m: lsim.analyze(m, TOKENS, "cosine").to_html(None)),
]


@pytest.mark.parametrize(("says", "call"), MISTAKES)
def test_a_mistake_is_named_with_its_value(says, call):
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    with pytest.raises(lsim.LayersimError, match=says):
        call(model)


@pytest.mark.parametrize("tokenizer", [lsim.CKA, lambda text: [1, 2], "gpt2"])
def test_what_is_no_tokenizer_is_refused_by_name(llama, tokenizer):
    for call in (
        lambda: lsim.analyze(llama, lsim.Data(["w5 w6"], tokenizer=tokenizer), "cosine"),
        lambda: lsim.finetune_aligned(tiny_llama(), lsim.Data(["w5 w6"], tokenizer=tokenizer)),
        lambda: lsim.EarlyExit(llama).generate("w5 w6", max_new_tokens=1, tokenizer=tokenizer),
    ):
        with pytest.raises(lsim.LayersimError, match="`tokenizer`"):
            call()


def test_truncate_does_not_replace_a_file(llama, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises((lsim.LayersimError, OSError), match="file"):
        lsim.truncate(llama, 1, save_to=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["missing", "empty folder", "a file", "broken", "no text"])
def test_the_command_line_names_the_option_and_the_path(kind, tmp_path, monkeypatch, capsys):
    place = tmp_path / "given"
    if kind in ("empty folder", "broken"):
        place.mkdir()
    if kind == "broken":
        (place / "config.json").write_text('{"model_type": "no_such_type"}')
    if kind in ("a file", "no text"):
        place.write_bytes(b"a text \xff\xfe\x00")
    option = "--data" if kind == "no text" else "--model"
    monkeypatch.setattr("sys.argv", ["tl-layersim", "report", option, str(place), "--out", str(tmp_path / "out")])

    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2

    said = capsys.readouterr().err
    assert f"Error: `{option}`" in said
    assert str(place) in said


def test_a_model_without_weights_is_measured():
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    data = torch.randn(4, 3).abs()
    result = lsim.analyze(model, data, lsim.Cosine(center="none"), at=["0", "1"])["cosine"]
    torch.testing.assert_close(result.values[0, 1], torch.cosine_similarity(data, data.tanh()).double().mean())
