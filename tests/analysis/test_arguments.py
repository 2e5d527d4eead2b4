"""Unknown, missing, swapped and mistyped arguments of every public call: the message names the argument and what to write."""

from __future__ import annotations

import inspect

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import exit_curve
from tl_layersim.core.argument_names import SYNONYMS
from tl_layersim.core.errors import LayersimTypeError

from ..tiny_models import random_tokens, tiny_llama

# Classes that travel to servers as source, or stand below the checks of arguments; the errors; a NamedTuple; and a type.
PLAIN = {"BlockCall", "Head", "Interval", "Kernel", "LayersimError", "LayersimWarning", "Sums", "Unembed", "View"}
PLAIN |= {"place", "reduce"}
ABSTRACT = {"Analyzer", "Result", "Source"}
CALLS = [name for name in lsim.__all__ if name not in PLAIN | ABSTRACT]
# A call that hands further arguments on looks at them when it has its own.
NEEDED = {"evaluate_layers": [None] * 3, "linear_probe": [None] * 2, "sweep": [None] * 3}
METHODS = ["EarlyExit.generate", "EarlyExit.logits", "ExitCurveResult.threshold_for", "ExitCurveResult.at"]


@pytest.mark.parametrize("name", [*CALLS, *METHODS])
def test_an_unknown_keyword_names_the_call_and_the_keyword(name):
    owner, _, method = name.partition(".")
    home = exit_curve if owner == "ExitCurveResult" else lsim
    call = getattr(home, owner) if not method else getattr(getattr(home, owner), method)
    with pytest.raises(LayersimTypeError) as caught:
        call(*([None] if method else NEEDED.get(name, [])), no_such_keyword="x" * 5000)
    error = caught.value
    assert isinstance(error, TypeError)
    assert isinstance(error, lsim.LayersimError)
    assert error.what == f"`no_such_keyword` is not an argument of {name}."
    assert len(str(error)) < 2000
    parameters = [p for p in inspect.signature(call).parameters if p not in ("self", "args", "options")]
    assert all(p in error.expected for p in parameters)


@pytest.mark.parametrize(
    ("call", "keyword", "value", "meant"),
    [
        ("analyze", "max_length", 512, "seq_len=512"),
        ("analyze", "n_tokens", 1000, "max_tokens=1000"),
        ("analyze", "bs", 4, "batch_size=4"),
        ("analyze", "layer", ["a"], "layers="),
        ("analyze", "skipfirst", 2, "skip_first=2"),
        ("analyze", "center", "none", "Cosine(..., center='none')"),
        ("analyze", "device", "cuda", "model.to('cuda')"),
        ("CKA", "batch_size", 64, "minibatch=64"),
        ("CKA", "batch_size", 64, "analyze(..., batch_size=64)"),
        ("CKA", "seq_len", 64, "analyze(..., seq_len=64)"),
        ("ExitCurve", "threshold", 0.9, "thresholds=0.9"),
        ("AlignedTraining", "learning_rate", 1e-3, "lr=0.001"),
        ("AlignedTraining", "gradient_accumulation_steps", 4, "accumulation=4"),
        ("AlignedTraining", "epochs", 3, "steps=..."),
        ("finetune_aligned", "learning_rate", 1e-3, "AlignedTraining(..., lr=0.001)"),
        ("stitch", "steps", 10, "StitchTraining(..., steps=10)"),
        ("stitch", "layer", (1, 2), "at=..."),
        ("truncate", "num_layers", 2, "n_layers=2"),
        ("EarlyExit", "tresh", 0.5, "threshold=0.5"),
        ("evaluate_layers", "max_length", 32, "seq_len=32"),
        ("AlignedTrainer", "train_data", None, "train_dataset="),
        ("MutualKNN", "neighbours", 5, "k=5"),
        ("MutualKNN", "n_neighbors", 5, "k=5"),
        ("analyze", "permutations", 100, "(..., permutations=100)"),
        ("analyze", "permutation", 100, "(..., permutations=100)"),
        ("analyze", "minibatches", 64, "(..., minibatch=64)"),
        ("compare", "permutations", 100, "(..., permutations=100)"),
    ],
)
def test_an_unknown_keyword_asks_for_the_one_that_was_meant(call, keyword, value, meant):
    with pytest.raises(LayersimTypeError) as caught:
        getattr(lsim, call)(*NEEDED.get(call, []), **{keyword: value})
    assert meant in caught.value.do


def test_every_word_of_the_table_of_synonyms_is_an_argument_of_some_call():
    signatures = [inspect.signature(getattr(lsim, name)) for name in CALLS]
    known = {p for signature in signatures for p in signature.parameters} | set(
        inspect.signature(lsim.EarlyExit.generate).parameters
    )
    assert set(SYNONYMS) <= known


def test_a_missing_argument_and_one_too_many_are_named(llama):
    tokens = random_tokens()
    for call, says in {
        lambda: lsim.analyze(llama, tokens): "`analyzers` of analyze is missing",
        lambda: lsim.stitch(llama, llama, tokens): "`at` of stitch is missing",
        lambda: lsim.truncate(): "`model`, `n_layers` of truncate are missing",
        lambda: lsim.analyze(llama, tokens, "cosine", 16): "`analyze` takes 3 positional arguments",
        lambda: lsim.analyze(llama, tokens, "cosine", model=llama): "`model` of analyze is given twice",
        lambda: lsim.EarlyExit(): "`model` of EarlyExit is missing",
    }.items():
        with pytest.raises(LayersimTypeError, match=says):
            call()


STORY = ["Once upon a time there was a very long story. " * 100] * 40
SWAPPED = {
    "analyze(data, model, analyzers)": (lambda m, d, a: lsim.analyze(d, m, a), r"`model` and `data` of \S+ are swapped"),
    "analyze(model, analyzers, data)": (lambda m, d, a: lsim.analyze(m, a, d), r"`data` and `analyzers` of \S+ are swapped"),
    "analyze(analyzers, data, model)": (
        lambda m, d, a: lsim.analyze(a, d, m),
        r"`model` and `analyzers` of \S+ are swapped",
    ),
    "analyze(data, analyzers, model)": (lambda m, d, a: lsim.analyze(d, a, m), "arguments of analyze are in another order"),
    "analyze(model, model, analyzers)": (lambda m, d, a: lsim.analyze(m, m, a), "`data` of analyze is a model"),
    "compare(model, data, model, ...)": (
        lambda m, d, a: lsim.compare(m, d, m, a),
        r"`model_b` and `data` of \S+ are swapped",
    ),
    "attach(analyzers, model)": (
        lambda m, d, a: lsim.attach(a, m).__enter__(),
        r"`model` and `analyzers` of \S+ are swapped",
    ),
    "stitch(data, model, model)": (lambda m, d, a: lsim.stitch(d, m, m, at=(1, 1)), r"`front` and `data` of \S+ are swapped"),
    "prediction_grid(text, model)": (
        lambda m, d, a: lsim.prediction_grid(d[0], m) if isinstance(d, list) else lsim.prediction_grid(d, m),
        "`model` and `prompt` of prediction_grid are swapped",
    ),
    "finetune_aligned(model, training, data)": (
        lambda m, d, a: lsim.finetune_aligned(m, lsim.AlignedTraining(), d),
        "`data` and `training` of finetune_aligned are swapped",
    ),
    "evaluate_layers(model, data, model)": (
        lambda m, d, a: lsim.evaluate_layers(m, d, m),
        "`after` and `data` of evaluate_layers are swapped",
    ),
}


@pytest.mark.parametrize("data", [STORY, random_tokens(), {"input_ids": random_tokens()}], ids=["texts", "tensor", "mapping"])
@pytest.mark.parametrize("order", SWAPPED)
@pytest.mark.parametrize("analyzers", [[lsim.Cosine()], lsim.CKA(), [lsim.Cosine]], ids=["list", "object", "class"])
def test_swapped_arguments_are_recognised_and_not_printed(llama, order, data, analyzers):
    call, says = SWAPPED[order]
    with pytest.raises(LayersimTypeError, match=says) as caught:
        call(llama, data, analyzers)
    assert len(str(caught.value)) < 600


def test_single_words_may_be_texts_and_names_of_analyzers(llama):
    from ..tiny_models import tiny_tokenizer

    words = [" ".join(f"w{i}" for i in range(start, start + 9)) for start in (5, 20, 40)]
    report = lsim.analyze(llama, words, ["cosine", "trajectory"], tokenizer=tiny_tokenizer(), prepend_bos=False)
    assert list(report) == ["cosine", "trajectory"]


@pytest.mark.parametrize(
    ("options", "do"),
    [
        ({"batch_size": True}, "help"),
        ({"max_tokens": False}, "help"),
        ({"batch_size": "16"}, "batch_size=16"),
        ({"batch_size": 8.0}, "batch_size=8"),
        ({"layers": "model.layers.0"}, "layers=['model.layers.0']"),
        ({"layers": ("a", "b")}, "layers=['a', 'b']"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named_and_written_as_it_should_be(options, do):
    name = next(iter(options))
    with pytest.raises(LayersimTypeError) as caught:
        lsim.analyze(tiny_llama(), random_tokens(), "cosine", **options)
    assert caught.value.what.startswith(f"`{name}` of analyze cannot be")
    assert do in caught.value.do


def test_a_misspelt_option_is_asked_back():
    with pytest.raises(LayersimTypeError, match=r"did you mean estimator='minibatch'"):
        lsim.CKA(estimator="minibach")
    with pytest.raises(LayersimTypeError) as caught:
        lsim.CKA(estimator="debiased")
    assert "did you mean" not in caught.value.do, "the biased estimator is the opposite"


def test_what_was_given_is_cut_to_a_sensible_length():
    error = lsim.LayersimError("It is too long.", given="a story\n" * 5000, expected="a word", do="one")
    assert len(str(error)) < 600
    assert "(39999 characters)" in str(error)
    assert len(str(error).splitlines()) == 4


@pytest.mark.parametrize("value", [95, 95.0])
def test_per_cent_are_asked_back_as_fractions(llama, value):
    curve = lsim.analyze(llama, random_tokens(), lsim.ExitCurve(thresholds=(0.5, 1.0)))["exit_curve"]
    calls = {
        "agreement": lambda: curve.threshold_for(agreement=value),
        "accuracy": lambda: curve.threshold_for(accuracy=value),
        "threshold": lambda: curve.at(value),
        "thresholds": lambda: lsim.ExitCurve(thresholds=(0.5, value)),
        "threshold=": lambda: lsim.EarlyExit(llama, threshold=value),
        "confidence": lambda: lsim.relate({"a": 1, "b": 2, "c": 4}, {"a": 3, "b": 4, "c": 9}, confidence=value),
    }
    for name, call in calls.items():
        with pytest.raises(lsim.LayersimError, match=rf"`{name.strip('=')}`(.|\n)*did you mean {name.strip('=')}=0\.95"):
            call()
    for wrong in (float("nan"), -0.5):
        with pytest.raises(lsim.LayersimError, match="`agreement` must be between 0 and 1"):
            curve.threshold_for(agreement=wrong)
        with pytest.raises(lsim.LayersimError, match="`thresholds` must be between 0 and 1"):
            lsim.ExitCurve(thresholds=(0.5, wrong))


def test_a_type_error_inside_a_call_stays_what_it_is():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

        def forward(self, tokens):
            raise TypeError("the model's own mistake")

    with pytest.raises(lsim.LayersimError, match="the model's own mistake") as caught:
        lsim.analyze(Broken(), random_tokens(), lsim.Cosine(center="none"), layers=["layers.0"])
    assert isinstance(caught.value.__cause__, TypeError)
