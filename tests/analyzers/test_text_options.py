"""Options of analyzers written as text."""

from __future__ import annotations

from dataclasses import fields

import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.commands.models_and_data import with_options
from tl_layersim.lens import ExitHeads


@pytest.mark.parametrize("name", sorted(find_analyzers()))
def test_every_option_of_every_analyzer_can_be_written(name):
    plain = find_analyzers()[name]()
    texts = [f"{name}.{field.name}={getattr(plain, field.name)!r}" for field in fields(plain)]
    assert with_options({name: plain}, texts)[name].options() == plain.options()


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("cosine.center=none", "center", "none"),
        ("cosine.center='none'", "center", "none"),
        ("cka.minibatch=100", "minibatch", 100),
    ],
)
def test_values_are_python_or_plain_text(text, option, value):
    changed = with_options({"cosine": lsim.Cosine(), "cka": lsim.CKA()}, [text])
    assert getattr(changed[text.partition(".")[0]], option) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("minibatch=128", "`--option` is 'minibatch=128'"),
        ("cka", "`--option` is 'cka'"),
        ("cak.minibatch=128", r"'cak\.minibatch=128'.* cka"),
        ("cka.minibach=128", r"'cka\.minibach=128'.* cka\.minibatch\b"),
        ("cka.minibatch=many", "`minibatch`.*many"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(lsim.LayersimError, match=says):
        with_options({"cka": lsim.CKA()}, [text])


def test_heads_of_layers_are_a_file(tmp_path):
    import torch

    heads = ExitHeads(torch.ones(2, 5, 3))
    path = heads.save(tmp_path / "heads.safetensors")
    chosen = with_options({"logit_lens": lsim.LogitLens()}, [f"logit_lens.heads={path}"])["logit_lens"]

    assert chosen.heads.digest == heads.digest
    with pytest.raises(FileNotFoundError, match=r"nothing.safetensors"):
        with_options({"saturation": lsim.Saturation()}, ["saturation.heads=nothing.safetensors"])
