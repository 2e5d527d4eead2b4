"""Every function on a tiny model of every encoder and vision family: it works, or is refused for the reason in the docs."""

from __future__ import annotations

import re

import pytest

import tl_layersim as lsim

from ..docs.helpers import ROOT
from .family_cases import CASES
from .family_functions import FUNCTIONS
from .family_matrix import ERRORS, header, reason, rows

PAGE = (ROOT / "docs/models.md").read_text()


@pytest.mark.light(
    "bert-`analyze`",
    "roberta-predictions by layer",
    "distilbert-`evaluate_layers`",
    "distilbert classes-`truncate`",
    "electra classes-`analyze`",
    "deberta classes-`analyze`",
    "deberta-v2 classes-`analyze`",
    "modernbert classes-`analyze`",
    "mpnet classes-`analyze`",
    "vit classes-`analyze`",
    "deit distilled-`analyze`",
    "beit-`analyze`",
    "swin classes-`analyze`",
    "clip vision-`analyze`",
    "clip text projected-`analyze`",
    "t5-`analyze`",
    "mlp-`analyze`",
    "convnext-`analyze`",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("key", CASES)
def test_a_function_works_on_a_family_or_says_why_not(key, function):
    why = reason(key, function)
    if why is None:
        FUNCTIONS[function](key)
        return
    with pytest.raises(lsim.LayersimError, match=ERRORS[why]):
        FUNCTIONS[function](key)


def test_the_table_of_the_docs_is_what_was_found():
    lines = PAGE.splitlines()
    start = lines.index(header())
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    assert lines[start + 2 : end] == rows(), "python -m tests.architectures.family_matrix prints the table"


def test_every_reason_of_the_table_is_explained():
    for why in ERRORS:
        assert any(why in row for row in rows())
        assert re.search(rf"^- (\*\*[^*]+\*\*, )*\*\*{why}\*\*(, \*\*[^*]+\*\*)*: ", PAGE, re.M), why
