"""The hash of integers, against the published numbers of SplitMix64."""

from __future__ import annotations

import torch

from tl_layersim.core.integer_hash import mixed

STEP = 0x9E3779B97F4A7C15
# The first outputs for the seed 1234567, as unsigned integers.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_it_is_the_finaliser_of_splitmix64():
    states = [(1234567 + number * STEP) % 2**64 for number in range(1, 6)]
    signed = [state - 2**64 if state >= 2**63 else state for state in states]

    hashes = mixed(torch.tensor(signed))

    assert [value % 2**64 for value in hashes.tolist()] == PUBLISHED
