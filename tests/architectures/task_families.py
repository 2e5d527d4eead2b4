"""Small random models of transformers that are no causal language models, one for each family and task.

A task is one of transformers' mappings from configurations to classes, such as `MODEL_FOR_MASKED_LM_MAPPING`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .causal_families import LARGEST, LAYERS, OPTIONS, SIZES, WIDTH

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
CLASSES, IMAGE, BINS, FRAMES, SAMPLES = 5, 32, 16, 64, 400
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


def configuration(family: str) -> Any:
    """The small configuration of a family."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    aliases = getattr(kind, "attribute_map", None) or {}
    sizes = SIZES | MORE_SIZES
    options: dict[str, Any] = {}
    for name, value in sizes.items():
        if name in aliases and aliases[name] in sizes:
            continue
        with contextlib.suppress(Exception):
            # Some attributes cannot be read, as they differ by layer.
            if hasattr(default, name) or name.endswith("_token_id"):
                options[name] = value
    options |= OPTIONS.get(family, {})
    return kind(**{name: value for name, value in options.items() if value is not None})


def task_model(task: str, family: str, seed: int = 0) -> Any:
    """A small random model of a family for a task, in evaluation mode.

    Args:
        task: a key of `TASKS`.
        family: the `model_type`.
        seed: seed of the weights.

    Raises:
        Exception: transformers cannot build the family small from the common sizes.
    """
    config = configuration(family)
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    kind: Any = getattr(modeling_auto, TASKS[task])[type(config)]
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{family} has {size} weights")
    torch.manual_seed(seed)
    model = kind(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "embed_positions" in name:
            # Waves of fixed lengths are computed anew where a model is loaded.
            continue
        if weight.dim() >= 2:
            # A fresh model is nearly the identity.
            weight.data.mul_(2)
        elif weight.is_floating_point():
            weight.data.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.eval().requires_grad_(False)


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
        has_decoder = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in _arguments(model)
        if has_decoder:
            assert tokens is not None
            row["decoder_input_ids"] = tokens[: max(3, length - 2)].flip(0)
        rows.append(row)
    return rows


def _features_shape(config: Any) -> tuple[int, int]:
    """Shape of the features of one recording: frames first, but in Whisper and its like."""
    width = getattr(config, "feature_projection_input_dim", None) or getattr(config, "input_feat_per_channel", None)
    return (BINS, FRAMES) if width is None else (24, width)


def _arguments(model: Any) -> tuple[str, ...]:
    code = type(model).forward
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    return code.__code__.co_varnames[: code.__code__.co_argcount]
