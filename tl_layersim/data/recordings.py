"""Padding of recordings, which processors of speech models return as zeros at the ends of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core.errors import LayersimError
from .padding_masks import as_mask

WAVES = "input_values"
# Number of zeros at the end of a recording from which they are taken for padding: a millisecond at 16 kHz.
PADDING_SAMPLES = 16


def without_padded_samples(waves: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Cut the zeros at the ends of recordings that come as one table. Returns the recordings, and how many were cut.

    Recordings of different lengths are not padded, and neither is a single one.

    Args:
        waves: `sample`, one for each row.
    """
    if len(waves) < 2 or len({len(wave) for wave in waves}) > 1:
        return [*waves], 0
    recordings = []
    cut = 0
    for wave in waves:
        places = wave.nonzero()[:, 0]
        # A recording of zeros throughout is silence.
        length = int(places[-1]) + 1 if len(places) else len(wave)
        if len(wave) - length < PADDING_SAMPLES:
            length = len(wave)
        if length < len(wave):
            cut += 1
        recordings.append(wave[:length])
    return recordings, cut


def masked_recording(wave: Tensor, mask: Any, column: str) -> Tensor:
    """A recording without its masked ends.

    Args:
        wave: `sample`.
        mask: the mask of the row, one value for each sample.
        column: name of the column of masks.

    Raises:
        LayersimError: the mask has another length, hides all samples, or hides samples between others.
    """
    attended = as_mask(mask, column)
    places = attended.nonzero()[:, 0]
    has_samples = attended.shape == wave.shape and len(places) > 0
    span = int(places[-1]) - int(places[0]) + 1 if has_samples else 0
    if span != len(places) or not span:
        raise LayersimError(
            f"`{column}` of shape {tuple(attended.shape)} has {len(places)} ones for a recording of {len(wave)} samples; it "
            "must have one value for each sample, with all ones side by side."
        )
    return wave[int(places[0]) : int(places[-1]) + 1]


def cut_warning(count: int, total: int) -> str:
    """The warning that zeros at the ends of recordings were cut."""
    return (
        f"{count} of {total} recordings in `{WAVES}` end in zeros, which were taken for padding and cut. To keep them, pass "
        "the recordings as a list, each at its own length; to set the padding yourself, pass the processor's attention_mask."
    )
