"""Small random models of transformers that are no causal language models, one for each family and task.

A task is one of transformers' mappings from configurations to classes, such as `MODEL_FOR_MASKED_LM_MAPPING`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from .causal_families import LAYERS, SIZES, WIDTH, configuration, random_model

TASKS = {
    "masked language models": "MODEL_FOR_MASKED_LM_MAPPING",
    "encoder-decoders": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "text encoders": "MODEL_FOR_TEXT_ENCODING_MAPPING",
    "classifiers of texts": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "classifiers of images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "classifiers of speech": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "recognition of speech (CTC)": "MODEL_FOR_CTC_MAPPING",
    "recognition of speech (decoder)": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
}
CLASSES = 5
IMAGE = 32
BINS = 16
FRAMES = 64
SAMPLES = 400
MORE_SIZES: dict[str, Any] = {
    "dim": WIDTH,
    "hidden_dim": 2 * WIDTH,
    "embedding_size": WIDTH,
    "emb_dim": WIDTH,
    "d_kv": 8,
    "d_ff": 2 * WIDTH,
    "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "relative_attention_num_buckets": 8,
    "feedforward_proj": "relu",
    "num_labels": CLASSES,
    "max_target_positions": 64,
    "max_length": FRAMES,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_mel_bins": BINS,
    "feature_size": BINS,
    "input_feat_per_channel": BINS,
    "max_source_positions": FRAMES // 2,
    "conv_dim": (16, 16),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
# Rows of texts have different lengths, so that padding shows.
LENGTHS = (10, 7, 10, 5)


def families_of(task: str) -> tuple[str, ...]:
    """The families of a task."""
    return tuple(getattr(modeling_auto, f"{TASKS[task]}_NAMES"))


def task_model(task: str, family: str, seed: int = 0) -> Any:
    """A small random model of a family for a task, in evaluation mode.

    Args:
        task: a key of `TASKS`.
        family: the `model_type`.
        seed: seed of the weights.

    Raises:
        Exception: transformers cannot build the family small from the common sizes.
    """
    config = configuration(family, SIZES | MORE_SIZES)
    return random_model(getattr(modeling_auto, TASKS[task])[type(config)], config, 2.0, seed)


def rows_of(model: Any) -> list[dict[str, Tensor]]:
    """Input rows of a model, by name of the input."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    name = model.main_input_name
    rows: list[dict[str, Tensor]] = []
    for length in LENGTHS:
        tokens = torch.randint(5, config.vocab_size, (length,), generator=generator) if hasattr(config, "vocab_size") else None
        row: dict[str, Tensor] = {}
        if name == "pixel_values":
            row[name] = torch.randn(3, IMAGE, IMAGE, generator=generator)
        elif name == "input_values":
            row[name] = torch.randn(SAMPLES, generator=generator)
        elif name == "input_features":
            row[name] = torch.randn(*_features_shape(config), generator=generator)
        else:
            assert tokens is not None
            row["input_ids"] = tokens
        has_decoder = (
            getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in inspect.signature(model.forward).parameters
        )
        if has_decoder:
            assert tokens is not None
            row["decoder_input_ids"] = tokens[: max(3, length - 2)].flip(0)
        rows.append(row)
    return rows


def _features_shape(config: Any) -> tuple[int, int]:
    """Shape of the features of one recording: frames first, but in Whisper and its like."""
    width = getattr(config, "feature_projection_input_dim", None) or getattr(config, "input_feat_per_channel", None)
    return (BINS, FRAMES) if width is None else (24, width)
