"""The digest of an adapter: twelve digits of its kind and numbers."""

from __future__ import annotations

import hashlib

import torch

import tl_layersim as lsim


def test_the_digest_is_of_the_kind_and_of_the_numbers_in_float64():
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    bias = torch.tensor([5.0, 6.0])
    by_hand = hashlib.sha256(b"affine" + weight.double().numpy().tobytes() + b"|" + bias.double().numpy().tobytes() + b"|")

    assert lsim.stitching.Adapter("affine", weight, bias).digest() == by_hand.hexdigest()[:12]
    assert lsim.stitching.Adapter("identity").digest() == hashlib.sha256(b"identity||").hexdigest()[:12]


def test_adapters_that_differ_have_other_digests():
    weight = torch.eye(2)
    bias = torch.zeros(2)
    adapters = [
        lsim.stitching.Adapter("affine", weight, bias),
        lsim.stitching.Adapter("affine-norm", weight, bias),
        lsim.stitching.Adapter("affine", 2 * weight, bias),
        lsim.stitching.Adapter("affine", weight, bias + 1e-6),
        lsim.stitching.Adapter("linear", weight),
        lsim.stitching.Adapter("identity"),
    ]

    assert len({adapter.digest() for adapter in adapters}) == len(adapters)
    assert lsim.stitching.Adapter("affine", weight.double(), bias).digest() == adapters[0].digest()
