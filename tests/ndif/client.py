"""A user's script, run in a process of its own by the tests: python -m tests.ndif.client URL MODEL OUT [CHECKPOINT]"""

from __future__ import annotations

import sys
from dataclasses import fields

import torch

import tl_layersim as lsim


def load(name: str, dtype: torch.dtype | None = None):
    """As a user does: without weights, or (`dtype`) with them for a run here."""
    from nnsight import TransformersModel
    from transformers import AutoTokenizer

    here = {} if dtype is None else {"dtype": dtype, "dispatch": True}
    return TransformersModel(name, task="text-generation", tokenizer=AutoTokenizer.from_pretrained(name), **here)


def counting(model, url: str):
    """Nnsight's own backend, which also counts the bytes of a trace."""
    from nnsight.intervention.backends.remote import RemoteBackend

    class Counting(RemoteBackend):
        sent = received = 0

        def _serialize(self, tracer):
            blob = super()._serialize(tracer)
            self.sent = len(blob)
            return blob

        def finalize(self, content):
            self.received = len(content)
            return super().finalize(content)

    return Counting(model.to_model_key(), host=url)


def rows(count: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right."""
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=made)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(3, 100, (count, length), generator=made), "attention_mask": mask}


def furthest(report, other) -> float:
    """The largest difference of any field of any result, relative where values are above 1; whole numbers must be equal."""
    assert report.keys() == other.keys()
    most = 0.0
    for name in report:
        for field in fields(report[name]):
            a, b = getattr(report[name], field.name), getattr(other[name], field.name)
            if not isinstance(a, torch.Tensor):
                continue
            assert a.shape == b.shape
            if a.is_floating_point():
                assert torch.equal(a.isnan(), b.isnan())
                gap = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num()
                most = max(most, float(gap.max()) if gap.numel() else 0.0)
            else:
                assert torch.equal(a, b), (name, field.name)
    return most


def equal(report, other) -> bool:
    return furthest(report, other) == 0.0


def main(url: str, name: str, out: str, checkpoint: str | None = None) -> None:
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=64), lsim.Trajectory()]
    report = lsim.analyze(
        lsim.open_model(load(name), remote=url, tokens_per_request=480),
        lsim.Data(rows(96, 60), batch_size=4),
        analyzers,
        checkpoint=checkpoint,
    )
    report.save(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
