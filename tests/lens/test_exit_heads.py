"""Heads of layers as an object: shapes, files, copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Head, Pool
from tl_layersim.core import file_format
from tl_layersim.lens import ExitHeads
from tl_layersim.sources.model_description import ModelDescription

from ..data import helpers


def heads(**options) -> ExitHeads:
    torch.manual_seed(0)
    return ExitHeads(torch.randn(2, 5, 3), torch.randn(2, 5), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_gives_back_the_same_heads(tmp_path, dtype):
    for saved in (heads(norm="none", layers=["a", "b"], weights_hash="12").to(dtype), ExitHeads(torch.ones(1, 2, 2))):
        loaded = ExitHeads.load(saved.save(tmp_path / "heads.safetensors"))
        assert torch.equal(loaded.weight, saved.weight)
        assert loaded.weight.dtype == saved.weight.dtype
        assert (loaded.bias is None) == (saved.bias is None)
        assert saved.bias is None or torch.equal(loaded.bias, saved.bias)
        assert (loaded.norm, loaded.layers, loaded.weights_hash) == (saved.norm, saved.layers, saved.weights_hash)
        assert (repr(loaded), loaded.digest) == (repr(saved), saved.digest)


def test_the_digest_is_of_weights_biases_and_norm():
    plain_heads = heads()
    variants = [
        ExitHeads(plain_heads.weight),
        ExitHeads(plain_heads.weight, plain_heads.bias, norm="none"),
        ExitHeads(plain_heads.weight + 1),
    ]

    assert len({plain_heads.digest, *(variant.digest for variant in variants)}) == 4
    assert heads().digest == plain_heads.digest


def test_names_of_layers_and_size():
    plain_heads = heads()
    assert plain_heads.layers == ("blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
    assert (len(plain_heads), plain_heads.nbytes) == (2, 4 * (30 + 10))
    assert plain_heads.to("cpu") is plain_heads


def test_heads_read_what_the_model_s_head_joins():
    """Without the head's weights in this process, its width follows from the vectors that it joins."""
    layers = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))

    def model(pool: Pool | None) -> ModelDescription:
        head = Head("norm", ("classifier",), "every" if pool is None else "rows", pool=pool)
        return replace(helpers.model(), layers=layers, d_model=3, vocabulary=None, head=head)

    for pool, width in ((None, 3), (Pool(mean_from=0), 3), (Pool((0,), 1), 6), (Pool((0, 1), 2), 9)):
        for head_width in (3, 6, 9):
            exit_heads = ExitHeads(torch.ones(2, 5, head_width))
            if head_width == width:
                exit_heads.check(model(pool))
            else:
                with pytest.raises(lsim.LayersimError, match=rf"`heads`.*, {head_width}\).*, {width}\)"):
                    exit_heads.check(model(pool))


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((torch.zeros(2, 5, 3),), {"layers": ["a"]}, "1 names for 2 heads"),
        ((torch.zeros(0, 5, 3),), {}, r"`weight`.*\(0, 5, 3\)"),
        ((torch.zeros(2, 5, 3), torch.zeros(2, 5).half()), {}, "`bias`.*float16.*float32"),
        ((torch.full((2, 5, 3), torch.nan),), {}, "NaN or infinite"),
        ((torch.zeros(2, 5, 3),), {"norm": "last"}, "norm"),
    ],
)
def test_tensors_that_are_no_heads_are_refused(arguments, options, says):
    with pytest.raises(lsim.LayersimError, match=says):
        ExitHeads(*arguments, **options)


@pytest.mark.parametrize("analyzer", [lsim.LogitLens, lsim.Saturation, lsim.ExitCurve])
def test_an_analyzer_takes_a_file_of_heads_and_reads_with_their_norm(analyzer, tmp_path):
    exit_heads = heads(norm="none")
    path = exit_heads.save(tmp_path / "heads.safetensors")

    assert analyzer(heads=path, norm="none").heads.digest == exit_heads.digest
    with pytest.raises(lsim.LayersimError, match=r"`norm` is .*norm='none'"):
        analyzer(heads=exit_heads)
    with pytest.raises(FileNotFoundError, match="nothing"):
        analyzer(heads=tmp_path / "nothing")


def test_files_that_hold_no_heads_are_refused(tmp_path):
    with pytest.raises(lsim.LayersimError, match=r"/x .*result"):
        ExitHeads.load(file_format.write(tmp_path / "x", "result", {}, {"weight": torch.ones(1, 2, 2)}))
    with pytest.raises(lsim.LayersimError, match=r"/x .*KeyError: 'layers'"):
        ExitHeads.load(file_format.write(tmp_path / "x", "heads", {"norm": "final"}, {"weight": torch.ones(1, 2, 2)}))
    with pytest.raises(FileNotFoundError):
        ExitHeads.load(tmp_path / "nothing")
