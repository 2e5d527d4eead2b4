"""Functions that load models in other processes, which import them by name, and the data of these tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import tl_layersim as lsim

from ..models.tiny_models import VOCABULARY, random_tokens


class Plain(torch.nn.Module):
    """A model whose processes need not import transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = (
            torch.nn.Embedding(VOCABULARY, 16),
            torch.nn.LayerNorm(16),
            torch.nn.Linear(16, VOCABULARY),
        )
        self.part = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in self.part:
            x = part(x)
        return self.head(self.norm(x))


PLAIN_PARTS = {"layers": [f"part.{i}" for i in range(3)], "unembed": ["norm", "head"]}


def load_plain():
    return lsim.open_model(Plain().eval(), **PLAIN_PARTS)


def load_plain_nan():
    opened = load_plain()
    opened.model.part[1][1].weight.data[0, 0] = float("nan")
    return opened


def load_mortal(flag: Path, passes: int):
    """A model whose process is killed before it has run so many forward passes, as long as the file exists."""
    opened, left = load_plain(), [passes]

    def count(*_):
        left[0] -= 1
        if left[0] == 0 and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    opened.model.register_forward_pre_hook(count)
    return opened


def load_stuck(flag: Path):
    """A model whose process stops with its first forward pass, in one process alone."""
    opened = load_plain()

    def wait(*_):
        if flag.exists():
            flag.unlink()
            time.sleep(3600)

    opened.model.register_forward_pre_hook(wait)
    return opened


def load_mortal_and_drawn(flag: Path):
    """Another model in each process, of which the first one is killed."""
    opened = load_mortal(flag, 3)
    opened.model.part[1][1].weight.data[0, 0] = os.getpid()
    return opened


def data():
    return lsim.Data(random_tokens(60, 12).tolist(), batch_size=2)


def load_missing():
    raise FileNotFoundError("no such checkpoint")


def assert_same(a, b, unlike=("seconds",), intervals=True):
    """Equal to the last bit, with intervals and provenance."""
    assert list(a) == list(b)
    for name, one in a.items():
        for field in ("values", "cross_entropy", "std", "to_last"):
            if hasattr(one, field):
                assert torch.equal(getattr(one, field), getattr(b[name], field)), (name, field)
                if not intervals:
                    continue
                mine, theirs = one.interval(field), b[name].interval(field)
                assert torch.equal(mine.low, theirs.low), (name, field)
                assert torch.equal(mine.high, theirs.high), (name, field)
        records = [{k: v for k, v in vars(result.provenance).items() if k not in unlike} for result in (one, b[name])]
        assert records[0] == records[1]
