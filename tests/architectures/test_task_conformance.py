"""A few families of the conformance run of models that are no causal language models."""

from __future__ import annotations

import pytest

from .conformance import guarded_outcome
from .task_conformance import CAPABILITIES, RowReference, run, table
from .task_families import rows_of, task_model

CASES = [
    ("masked language models", "convbert", "stream"),
    ("masked language models", "deberta-v2", "lens"),
    ("encoder-decoders", "t5", "lens"),
    ("classifiers of texts", "mpt", "lens"),
    ("classifiers of images", "imagegpt", "stream"),
    ("classifiers of images", "dinov2_with_registers", "truncate"),
    ("classifiers of speech", "whisper", "stream"),
    ("classifiers of speech", "wavlm", "lens"),
    ("classifiers of speech", "wav2vec2-bert", "lens"),
    ("recognition of speech (CTC)", "hubert", "stream"),
    ("recognition of speech (decoder)", "speech_to_text", "lens"),
]


@pytest.mark.light("convbert-stream", "imagegpt-stream", "wavlm-lens")
@pytest.mark.parametrize(
    ("task", "family", "capability"), CASES, ids=[f"{family}-{capability}" for _, family, capability in CASES]
)
def test_a_family_is_as_its_own_modules(task, family, capability):
    model = task_model(task, family)
    reference = RowReference(model, rows_of(model))
    assert guarded_outcome(CAPABILITIES[capability], reference) == ("right", "")


@pytest.mark.heavy("a further case")
def test_a_family_without_one_stream_is_refused_in_a_sentence():
    outcomes = run("masked language models", ["albert"])
    assert outcomes["albert"]["stream"][0] == "refused"


def test_the_table_has_a_row_for_each_task_and_capability():
    outcomes = {"encoders": {"a": {"stream": ("right", "")}, "b": {"stream": ("refused", "why")}}}
    lines = table(outcomes)
    assert "| encoders | stream | 1 | 1 | 0 | 0 |" in lines
    assert "| encoders | stream | b |" in lines
