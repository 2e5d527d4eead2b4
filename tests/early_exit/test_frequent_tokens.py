"""The tokens that a text has most of."""

from __future__ import annotations

import tl_layersim as lsim
from tl_layersim.early_exit import frequent_tokens

from ..models.tiny_models import tiny_llama, tiny_tokenizer


def test_frequent_tokens():
    model = tiny_llama(3)
    model.tokenizer = tiny_tokenizer()
    tokens = frequent_tokens(model, ["w5 w5 w5 w7 w7 w9", "w5"], 3)
    # BOS stands before each text.
    assert tokens.tolist()[:1] == [5]
    assert set(tokens.tolist()) == {5, 7, 1}

    data = lsim.Data(["w5 w5 w5 w7 w7 w9", "w6 w6 w6 w6"], tokenizer=tiny_tokenizer(), max_tokens=7)
    assert 6 not in frequent_tokens(tiny_llama(3), data, 9).tolist()
