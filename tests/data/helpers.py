"""What several files of tests/data use."""

from __future__ import annotations

from tl_layersim.data.batches import Batches
from tl_layersim.data.data import Data
from tl_layersim.sources.model_description import ModelDescription

from ..models.tiny_models import tiny_tokenizer

TEXTS = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11 w12 w13"]
ROWS = [[1, 3, 4, 5], [1, 6, 7], [1, 8, 9, 10, 11, 12, 13]]


def model(tokenizer=None, context: int | None = 64) -> ModelDescription:
    return ModelDescription(
        name="m",
        config_hash="0",
        weights="0",
        source="s",
        basis="b",
        dtype="torch.float32",
        layers=("a", "b"),
        d_model=8,
        vocabulary=100,
        context=context,
        tokenizer=tokenizer or tiny_tokenizer(),
    )


def batches(data, **options) -> list:
    own = options.pop("model", None) or model()
    return list(Batches(Data(data, **({"batch_size": 2} | options)), own))


def rows(data, **options) -> list[list[int]]:
    return [t[a].tolist() for b in batches(data, **options) for t, a in zip(b.tokens, b.attention, strict=True)]


def counted(data, **options) -> list[list[int]]:
    return [t[c].tolist() for b in batches(data, **options) for t, c in zip(b.tokens, b.counted, strict=True)]
