"""Law 3 for the measures that read sublayers or call blocks again: one tiny model through every source gives one answer."""

from __future__ import annotations

import numpy as np
import pytest

import tl_layersim as lsim

from ..models.tiny_models import tiny_gpt2
from ..models.wrapped_models import hooked_transformer
from ..running.options import called
from .test_every_source import MODELS, SOURCES


def run(model, data, **options):
    return called(lsim.analyze, model, data, [lsim.Contribution(), lsim.SkipEffect(keep_first=2, splits=2)], **options)


def check_equal(found, expected):
    for name in ("contribution", "skip_effect"):
        for field in expected[name].tensor_fields():
            own, other = (getattr(report[name], field) for report in (found, expected))
            np.testing.assert_allclose(own, other, atol=1e-5, rtol=1e-4, err_msg=field)
    assert found["contribution"].sublayers == expected["contribution"].sublayers
    assert found["contribution"].layers == found["skip_effect"].layers


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("source", "make"), MODELS)
def test_every_source_gives_one_answer(source, make, data, tmp_path):
    model, options = SOURCES[source](make, tmp_path)
    check_equal(run(model, data, **options), run(make(), data))


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_gives_the_same_answer(data):
    module = tiny_gpt2()
    expected = run(module, data)
    check_equal(run(hooked_transformer(module), data), expected)
