"""Recordings as processors return them: padded with zeros, with and without a mask."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import tl_layersim as lsim

LENGTHS = (400, 250, 320)


@lru_cache
def speech_model() -> Wav2Vec2ForCTC:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 32}
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**size, **convolutions, **positions)).eval()


def recordings() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, generator=generator) for length in LENGTHS]


def padded(waves: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)


def measured(data: object) -> lsim.CosineResult:
    return lsim.analyze(speech_model(), lsim.Data(data, batch_size=1), lsim.Cosine(center="none"))["cosine"]


def test_padded_recordings_are_measured_as_without_padding():
    alone = measured({"input_values": recordings()})
    table = padded(recordings())
    with pytest.warns(lsim.LayersimWarning, match=r"2 of 3 .*`input_values`"):
        without_mask = measured({"input_values": table})
    mask = padded([torch.ones(length) for length in LENGTHS])
    with_mask = measured({"input_values": table, "attention_mask": mask})
    for found in (without_mask, with_mask):
        assert found.provenance.tokens == alone.provenance.tokens
        assert found.provenance.data == alone.provenance.data
        assert torch.equal(found.values, alone.values)


def test_silence_at_the_end_of_a_recording_is_kept():
    waves = recordings()
    waves[0][-50:] = 0.0
    waves[1] = torch.zeros(250)
    assert measured({"input_values": waves}).provenance.tokens == measured({"input_values": recordings()}).provenance.tokens


@pytest.mark.parametrize("hidden", [slice(0, None), slice(100, 200)])
def test_a_mask_that_is_no_span_is_refused(hidden):
    table = torch.randn(2, 400)
    mask = torch.ones(2, 400)
    mask[1, hidden] = 0
    with pytest.raises(lsim.LayersimError, match="`attention_mask`"):
        measured({"input_values": table, "attention_mask": mask})
