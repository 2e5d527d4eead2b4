"""Chats are rendered by their template, tokenised once, and marked where the template marks the assistant."""

from __future__ import annotations

import json
from dataclasses import replace

import datasets
import numpy as np
import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batches
from tl_layersim.data.data import Data

from ..models.tiny_models import hidden_states, tiny_llama, tiny_tokenizer
from ..running.options import called
from .helpers import batches, counted, model, rows

# User is w10, assistant w11, the end of a message </s>; only the second template marks what the assistant says.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ 'w10' if m['role'] == 'user' else 'w11' }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}w11{% endif %}"
)
MARKING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}w10 {{ m['content'] }} </s>{% else %} w11"
    "{% generation %} {{ m['content'] }} </s> {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w11{% endif %}"
)
FIRST = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5 w6"}]
SECOND = [*FIRST, {"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
IDS = [[1, 10, 3, 4, 2, 11, 5, 6, 2], [1, 10, 3, 4, 2, 11, 5, 6, 2, 10, 7, 2, 11, 8, 2]]
SAID = [[5, 6, 2], [5, 6, 2, 8, 2]]


def tokenizer(template=PLAIN):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


DATA = {
    "lists": [FIRST, SECOND],
    "dicts": [{"messages": FIRST}, {"messages": SECOND}],
    "a batch": {"messages": [FIRST, SECOND]},
    "a data set": datasets.Dataset.from_dict({"messages": [FIRST, SECOND]}),
    "other columns": datasets.Dataset.from_dict({"id": ["a", "b"], "messages": [FIRST, SECOND], "source": ["x", "y"]}),
    "a table": pandas.DataFrame({"messages": [FIRST, SECOND]}),
    "arrays": pandas.DataFrame({"messages": [np.array(FIRST, dtype=object), np.array(SECOND, dtype=object)]}),
    "lists of roles": [
        {"messages": {name: [m[name] for m in chat] for name in ("role", "content")}} for chat in (FIRST, SECOND)
    ],
    "empty fields": [[m | {"tool_calls": None, "name": None} for m in chat] for chat in (FIRST, SECOND)],
    "a stream": datasets.Dataset.from_dict({"messages": [FIRST, SECOND]}).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", DATA)
def test_chats_in_any_container_are_rendered(kind):
    assert rows(DATA[kind], model=model(tokenizer())) == IDS
    assert counted(DATA[kind], model=model(tokenizer(MARKING)), positions="assistant") == SAID


def test_one_chat_is_one_row():
    assert rows(FIRST, model=model(tokenizer())) == IDS[:1]


def test_the_tokens_are_those_of_apply_chat_template():
    for template in (PLAIN, MARKING):
        own = tokenizer(template)
        for generation in (False, True):
            expected = [own.apply_chat_template(c, add_generation_prompt=generation)["input_ids"] for c in (FIRST, SECOND)]
            assert rows([FIRST, SECOND], model=model(own), add_generation_prompt=generation) == expected
            assert expected[0][-1] == (11 if generation else 2)


def test_a_template_may_be_given():
    assert rows([FIRST], model=model(tokenizer()), chat_template="{{ messages[1]['content'] }}") == [[5, 6]]
    assert rows([FIRST], model=model(tiny_tokenizer()), chat_template=PLAIN) == IDS[:1]


def test_the_template_alone_writes_the_bos():
    """One BOS where the template writes one, also in a row that continues a chat; none where it writes none."""
    assert rows([FIRST], model=model(tokenizer()), seq_len=5) == [[1, 10, 3, 4, 2], [1, 11, 5, 6, 2]]
    bare = PLAIN.replace("{{ bos_token }}", "")
    assert rows([FIRST], model=model(tokenizer(bare)), seq_len=5) == [[10, 3, 4, 2, 11], [5, 6, 2]]
    before_each_turn = PLAIN.replace("{{ bos_token }}", "").replace("{% for m in messages %}", "{% for m in messages %}<s>")
    assert rows([FIRST], model=model(tokenizer(before_each_turn)), seq_len=5) == [[1, 10, 3, 4, 2], [1, 11, 5, 6, 2]]
    assert rows([FIRST], model=model(tokenizer()), prepend_bos=False, seq_len=5) == [[1, 10, 3, 4, 2], [11, 5, 6, 2]]


@pytest.mark.parametrize("seq_len", [2, 3, 4, 5, 7, 64])
def test_a_long_chat_loses_neither_token_nor_mark(seq_len):
    known = model(tokenizer(MARKING))
    found = rows([SECOND], model=known, seq_len=seq_len)
    assert [t for row in found for t in row if t != 1] == IDS[1][1:]
    assert all(row[0] == 1 and len(row) <= seq_len for row in found)
    assert [t for row in counted([SECOND], model=known, seq_len=seq_len, positions="assistant") for t in row] == SAID[1]


def test_a_chat_without_an_answer_contributes_nothing():
    assert counted([FIRST[:1], FIRST], model=model(tokenizer(MARKING)), positions="assistant") == [[], SAID[0]]


def test_labels_belong_to_the_whole_chat():
    data = [{"messages": FIRST, "label": 1}, {"messages": SECOND, "label": 0}]
    [batch] = Batches(Data(data), model(tokenizer()), labelled=True)
    assert [set(row[kept].tolist()) for row, kept in zip(batch.labels, batch.attention, strict=True)] == [{1}, {0}]


def test_known_columns_of_tokens_and_texts_go_first():
    both = {"text": "w3 w4", "messages": FIRST}
    assert rows([both], model=model(tokenizer())) == [[1, 3, 4]]
    assert rows([both], model=model(tokenizer()), column="messages") == IDS[:1]
    # The column of another name may be a part of the chat, such as its first prompt.
    assert rows([{"prompt": "w3 w4", "messages": FIRST}], model=model(tokenizer())) == IDS[:1]
    assert rows([{"conversation": FIRST}], model=model(tokenizer())) == IDS[:1]


def test_spaces_without_a_token_do_not_move_the_marks():
    """`return_assistant_tokens_mask` looks up the token of the first and of the last character, and spaces have none here."""
    own = tokenizer(MARKING)
    theirs = own.apply_chat_template(SECOND, return_assistant_tokens_mask=True)["assistant_masks"]
    assert sum(theirs) != len(SAID[1])
    assert counted([SECOND], model=model(own), positions="assistant") == SAID[1:]


def bytes_tokenizer(template):
    """A byte-level BPE, whose tokens cover every character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i for i, letter in enumerate(alphabet, 2)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=template)


def test_marks_of_bytes_are_those_of_the_tokenizer():
    own = bytes_tokenizer(MARKING)
    chat = [{"role": "user", "content": "h\u00e9 \U0001f600"}, {"role": "assistant", "content": "n\u00f6 \U0001f600 x"}]
    theirs = own.apply_chat_template(chat, return_assistant_tokens_mask=True)
    expected = [t for t, one in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if one]
    [found] = counted([chat], model=replace(model(own), vocabulary=300), positions="assistant")
    assert found == expected
    assert own.decode(found).strip() == "n\u00f6 \U0001f600 x </s>"


@pytest.mark.parametrize(
    ("template", "data", "options", "says"),
    [
        (PLAIN, [FIRST], {"positions": "assistant"}, "'assistant'.*generation"),
        (PLAIN, {"messages": [FIRST, None]}, {}, "row 1.*None"),
        (PLAIN, {"messages": [FIRST, []]}, {}, r"`data`.*row 1.*\[\]"),
        (PLAIN, [{"role": "user", "content": "w3"}, "w4"], {}, r"row 0\b.*dict.*str"),
        (PLAIN, {"role": ["user"], "content": ["w3"]}, {}, r"`data`.*role.*\[\["),
        (PLAIN, [{"role": "user", "content": "w3"}, {"role": "user", "content": "w4"}], {"column": "text"}, r"`data`.*\[\["),
        (PLAIN, [[{"role": "user", "content": "w3 \ud83d"}]], {}, "`data`.* row 0.*surrogate"),
        (None, [FIRST], {}, "`data`.*chat_template="),
        ("{{ raise_exception('roles must alternate') }}", [FIRST], {}, "row 0 .*roles must alternate"),
        ("{% for", [FIRST], {}, "row 0 .*TemplateSyntaxError"),
        (PLAIN, [[{"role": "user", "content": [{"type": "image", "url": "x"}]}]], {}, "row 0 .*image.*lsim.attach"),
        (PLAIN, [[*FIRST, {"role": "user", "contnt": "w3"}]], {}, "row 0 .*contnt"),
        (PLAIN, [[*FIRST, {"rol": "user", "content": "w3"}]], {}, "row 0 .*rol"),
        (PLAIN, [FIRST], {"pack": True}, "`pack`"),
        (PLAIN, ["w3 w4"], {"chat_template": PLAIN}, "`chat_template`"),
        (PLAIN, [[3, 4]], {"add_generation_prompt": True}, "`add_generation_prompt`"),
    ],
)
def test_what_cannot_be_rendered_is_refused(template, data, options, says):
    with pytest.raises(lsim.LayersimError, match=says):
        batches(data, model=model(tokenizer(template)), **options)


def test_text_parts_of_a_message_are_text():
    parts = [[{"role": "user", "content": [{"type": "text", "text": "w3"}]}]]
    template = "{{ messages[0]['content'][0]['text'] }}"
    assert rows(parts, model=model(tokenizer(template))) == [[3]]


def test_the_assistant_is_measured_as_by_hand_and_the_record_says_how(tmp_path):
    llama = tiny_llama(dtype=torch.float64)
    expected = []
    for ids, text in zip(IDS, ([6, 7, 8], [6, 7, 8, 13, 14]), strict=True):
        x = hidden_states(llama, torch.tensor(ids))[:, text]
        expected.append(x / np.linalg.norm(x, axis=-1, keepdims=True))
    x = np.concatenate(expected, axis=1)
    options = {"tokenizer": tokenizer(), "chat_template": MARKING, "positions": "assistant"}
    for size in (1, 2):
        found = called(lsim.analyze, llama, DATA["a data set"], lsim.Cosine(center="none"), batch_size=size, **options)[
            "cosine"
        ]
        np.testing.assert_allclose(found.values, np.einsum("ltd,mtd->lm", x, x) / x.shape[1], atol=1e-13)
    known = lsim.load(found.save(tmp_path / "x")).provenance
    assert (known.tokens, known.options["positions"], known.options["add_generation_prompt"]) == (8, "assistant", False)
    assert known.options["chat_template"].startswith("sha256 ")
    assert known.options["own_bos"] == 2
    json.dumps(known.options)


def test_two_models_read_one_chat():
    a, b = tiny_llama(), tiny_llama(seed=1)
    options = {"tokenizer": tokenizer(MARKING), "positions": "assistant"}
    found = called(lsim.compare, a, b, [FIRST, SECOND] * 2, lsim.CKA(estimator="exact"), **options)
    assert found.provenance.tokens == 16
