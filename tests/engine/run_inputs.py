"""Changes of a run's inputs, and situations in which nothing has changed, for tests of checkpoints and shards.

A case is a function that changes a `Call`, or makes the same call in another way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer
from tl_layersim.lens import ExitHeads

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge

ROWS = 16
LENGTH = 7


@dataclass
class Call:
    """A call of `analyze`: its model, data, analyzers, options, and the contexts around it."""

    model: Any
    source: Any
    reading: dict[str, Any] = field(default_factory=lambda: {"batch_size": 4})
    analyzers: list[Any] = field(default_factory=lambda: [lsim.Cosine(center="none"), lsim.LogitLens(labels="data")])
    options: dict[str, Any] = field(default_factory=dict)
    contexts: list[Any] = field(default_factory=list)

    def run(self, **more: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            return lsim.analyze(self.model, lsim.Data(self.source, **self.reading), self.analyzers, **self.options, **more)


def base_call() -> Call:
    tokens = random_tokens(ROWS, LENGTH, seed=3)
    mask = torch.ones_like(tokens)
    mask[::3, -1] = 0
    columns = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.roll(1, 1), "keep": torch.ones_like(tokens)}
    return Call(tiny_llama(layers=2), columns)


Case = Callable[[Call], None]


def of_column(name: str, change: Callable[[torch.Tensor], object]) -> Case:
    """A change of a column of the data, in place."""

    def case(call: Call) -> None:
        change(call.source[name])

    return case


def of_reading(**options: Any) -> Case:
    return lambda call: call.reading.update(options)


def of_options(**options: Any) -> Case:
    return lambda call: call.options.update(options)


def of_analyzers(*analyzers: Any) -> Case:
    return lambda call: setattr(call, "analyzers", list(analyzers))


def of_model(change: Callable[[Any], object]) -> Case:
    """A change of the model, in place."""

    def case(call: Call) -> None:
        change(call.model)

    return case


def in_its_stead(make: Callable[[Any], Any]) -> Case:
    """Another model, which is made from the model."""

    def case(call: Call) -> None:
        call.model = make(call.model)

    return case


def inside(make: Callable[[], Any]) -> Case:
    return lambda call: call.contexts.append(make())


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def patched(owner: Any, name: str, value: Any) -> Any:
    return setting(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def weights(model: Any) -> torch.Tensor:
    return model.model.layers[1].mlp.down_proj.weight.data


def scaled(_module: Any, _args: Any, output: Any, by: float = 1.5) -> Any:
    return output * by


def scaling(by: float) -> Any:
    return lambda _module, _args, output: output * by


FACTORS = types.ModuleType("factors")
exec("BY = 1.25\ndef scaled(x):\n    return x * BY\n", vars(FACTORS))


def by_module(_module: Any, _args: Any, output: Any) -> Any:
    return FACTORS.scaled(output)


def hook(function: Any) -> Case:
    return of_model(lambda model: model.model.layers[0].mlp.register_forward_hook(function))


def times_two(function: Any) -> Any:
    """A decorator that keeps the name of what it changes."""

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return changed


def on_class(model: Any) -> Any:
    kind = type(model.model.layers[0].mlp)
    return patched(kind, "forward", times_two(kind.forward))


def module_named(name: str) -> Any:
    return sys.modules[name]


def attention_times_two(call: Call) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 2, weights

    AttentionInterface.register("tested", attend)
    call.model.config._attn_implementation = "tested"


def with_other_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = model.model.layers[1].mlp.forward


def with_forward_of_next_block(model: Any) -> None:
    # transformers decorates the forward of its blocks, not of all their parts.
    model.model.layers[0].forward = model.model.layers[1].forward


def with_outer_forward(model: Any) -> None:
    linear = torch.nn.Linear(32, 32)
    torch.nn.init.eye_(linear.weight)
    model.model.layers[0].mlp.forward = linear.forward


def with_own_config(model: Any, **entries: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    for name, value in entries.items():
        setattr(attention.config, name, value)


class Bilinear(torch.nn.Module):
    """A user's MLP with a constant of the class and a method that its forward calls."""

    GAIN: ClassVar[float] = 1.0

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.shape = inner, [1, {"gain": 1.0}]

    def gained(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.GAIN * self.shape[1]["gain"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # An activation that is kept for later is no setting.
        self.last = self.gained(self.inner(x))
        return self.last


def bilinear(model: Any) -> Any:
    model.model.layers[0].mlp = Bilinear(model.model.layers[0].mlp)
    return model


def adapted(model: Any, change: Callable[[Any], Any] = lambda _: None) -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    changed = peft.get_peft_model(model, config).eval()
    change(changed.base_model)
    return changed.base_model.model


@dataclass(frozen=True)
class OwnNorm(Analyzer):
    """Norms of the layers, as a user's analyzer with a constant and a helper."""

    name: ClassVar[str] = "own_norm"
    POWER: ClassVar[float] = 1.0

    def kernel(self, *_: Any) -> Any:
        return functools.partial(own_kernel, power=self.POWER)

    def compute(self, sums: Any, run: Any) -> Any:
        return lsim.Cosine(center="none").compute(sums, run)


HELPER = {"power": 1.0}


def own_kernel(view: Any, power: float) -> dict[str, torch.Tensor]:
    return {"norm": (view.activations.double().norm(dim=-1) ** (power * HELPER["power"])).sum(-1)}


def labels_of(seed: int) -> torch.Tensor:
    return random_tokens(ROWS, LENGTH, seed=seed)


def paired(row: int, distance: int = 1) -> list[int]:
    """Groups of one row each, but for one of two rows."""
    groups = list(range(ROWS))
    groups[row + distance] = row
    return groups


def of_column_of_groups(values: Any) -> Case:
    return lambda call: (call.source.update(document=values), call.reading.update(groups="document"))


def marks(start: int) -> Any:
    return lambda ids: torch.arange(len(ids)) >= start


class Selection:
    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, ids: Any) -> Any:
        return torch.arange(len(ids)) >= self.start


def texts(call: Call, tokenizer: Any = None) -> None:
    call.model.tokenizer = tokenizer or tiny_tokenizer()
    call.source = [" ".join(f"w{3 + (7 * row + place) % 60}" for place in range(5)) for row in range(ROWS)]
    call.analyzers = [lsim.Cosine(center="none")]


def text_case(change: Case) -> tuple[Case, Case]:
    """A pair of cases that read texts: as the base, and changed."""

    def changed(call: Call) -> None:
        texts(call)
        change(call)

    return texts, changed


def other_words(call: Call) -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = {word: (99 - number + 3 if number > 2 else number) for word, number in tokenizer.get_vocab().items()}
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    call.model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def nothing(_call: Call) -> None:
    pass


def two(*cases: Case) -> Case:
    def case(call: Call) -> None:
        for change in cases:
            change(call)

    return case


def tf32() -> Any:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")


def default_dtype() -> Any:
    return setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def exchanged_blocks(model: Any) -> None:
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[1], layers[0]])


def heads(scale: float) -> Any:
    return ExitHeads(weight=torch.eye(32).repeat(3, 1, 1) * scale, bias=None)


# By name: the input of `run_identity.INPUTS` that changes, and the change. A pair of changes has a base of its own.
CHANGES: dict[str, tuple[str, Case | tuple[Case, Case]]] = {
    # rows
    "one token": ("rows", of_column("input_ids", lambda x: x.__setitem__((0, 2), 50))),
    "order of rows": ("rows", lambda call: call.source.update({k: v.flip(0) for k, v in call.source.items()})),
    "first row left out": ("rows", lambda call: call.source.update({k: v[1:] for k, v in call.source.items()})),
    "mask": ("rows", of_column("attention_mask", lambda x: x.__setitem__((1, 6), 0))),
    "position ids": ("rows", lambda call: call.source.update(position_ids=torch.arange(LENGTH).repeat(ROWS, 1) + 3)),
    # labels
    "one label": ("labels", of_column("labels", lambda x: x.__setitem__((0, 1), 9))),
    "one missing label": ("labels", of_column("labels", lambda x: x.__setitem__((0, 1), -100))),
    "labels of other rows": ("labels", of_column("labels", lambda x: x.copy_(x.roll(1, 0)))),
    # positions
    "rule of positions": ("positions", of_reading(positions="last")),
    "slice": ("positions", of_reading(positions=slice(1, None))),
    "function of positions": ("positions", (of_reading(positions=marks(1)), of_reading(positions=marks(2)))),
    "object of positions": ("positions", (of_reading(positions=Selection(1)), of_reading(positions=Selection(2)))),
    "mask column": (
        "positions",
        (of_reading(positions="keep"), two(of_reading(positions="keep"), of_column("keep", lambda x: x[0].fill_(0)))),
    ),
    "first positions": ("positions", of_reading(skip_first=1)),
    # texts
    "an empty row before": (
        "texts",
        lambda call: setattr(call, "source", {k: torch.cat([torch.zeros_like(v[:1]), v]) for k, v in call.source.items()}),
    ),
    "groups": ("texts", of_reading(groups=paired(0))),
    "other groups": ("texts", (of_reading(groups=paired(0)), of_reading(groups=paired(4)))),
    "other values of a column of groups": ("texts", (of_column_of_groups(paired(0)), of_column_of_groups(paired(4)))),
    "a group that continues later": ("texts", (of_column_of_groups(paired(0)), of_column_of_groups(paired(0, 3)))),
    "documents in one row": (
        "texts",
        (
            lambda call: call.source.update(position_ids=torch.arange(LENGTH).repeat(ROWS, 1)),
            lambda call: call.source.update(position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]).repeat(ROWS, 1)),
        ),
    ),
    # options of the data
    "batch size": ("options of the data", of_reading(batch_size=2)),
    "row length": ("options of the data", of_reading(seq_len=3)),
    "most tokens": ("options of the data", of_reading(max_tokens=100)),
    "packing": ("options of the data", text_case(of_reading(pack=True, seq_len=8))),
    "no BOS": ("options of the data", text_case(of_reading(prepend_bos=False))),
    "other words": ("tokenizer and processor", text_case(other_words)),
    "tokenizer with more words": (
        "tokenizer and processor",
        text_case(lambda call: call.model.tokenizer.add_tokens(["w3 w10"])),
    ),
    # analyzers
    "option": ("analyzers", of_analyzers(lsim.Cosine(center="none"), lsim.LogitLens(labels="next_token"))),
    "another analyzer": ("analyzers", of_analyzers(lsim.Cosine(center="none"), lsim.Saturation())),
    "labels in a tensor": (
        "analyzers",
        (of_analyzers(lsim.LogitLens(labels=labels_of(1))), of_analyzers(lsim.LogitLens(labels=labels_of(2)))),
    ),
    "norm of the lens": ("analyzers", of_analyzers(lsim.Cosine(center="none"), lsim.LogitLens(labels="data", norm="none"))),
    "constant of a user's analyzer": (
        "analyzers",
        (of_analyzers(OwnNorm()), two(of_analyzers(OwnNorm()), inside(lambda: patched(OwnNorm, "POWER", 2.0)))),
    ),
    "value that a user's kernel reads": (
        "analyzers",
        (
            of_analyzers(OwnNorm()),
            two(
                of_analyzers(OwnNorm()),
                inside(lambda: setting(lambda: HELPER["power"], lambda x: HELPER.update(power=x), 2.0)),
            ),
        ),
    ),
    # weights
    "one weight": ("weights", of_model(lambda m: weights(m)[3, 4].add_(1e-3))),
    "one bit of a weight": ("weights", of_model(lambda m: weights(m).view(torch.int32)[0, 0].bitwise_xor_(1))),
    "buffer": ("weights", of_model(lambda m: m.model.rotary_emb.inv_freq[1].mul_(1.5))),
    "blocks exchanged": ("weights", of_model(exchanged_blocks)),
    "activation": ("weights", of_model(lambda m: setattr(m.model.layers[0].mlp, "act_fn", torch.nn.Tanh()))),
    "epsilon": ("weights", of_model(lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 0.1))),
    "another seed": ("weights", lambda call: setattr(call, "model", tiny_llama(layers=2, seed=1))),
    "adapter": ("weights", in_its_stead(adapted)),
    "adapter off": (
        "weights",
        (in_its_stead(adapted), in_its_stead(lambda m: adapted(m, lambda base: base.disable_adapter_layers()))),
    ),
    "scaling of an adapter": (
        "weights",
        (
            in_its_stead(adapted),
            in_its_stead(
                lambda m: adapted(m, lambda base: base.model.model.layers[1].self_attn.q_proj.scaling.update(default=3.0))
            ),
        ),
    ),
    "setting of a user's module": (
        "weights",
        (
            of_model(bilinear),
            of_model(lambda m: bilinear(m).model.layers[0].mlp.shape[1].update(gain=2.0)),
        ),
    ),
    # configuration
    "entry of the configuration": ("configuration", of_model(lambda m: setattr(m.config, "attention_dropout", 0.5))),
    "configuration of one block": ("configuration", of_model(lambda m: with_own_config(m, attention_dropout=0.5))),
    # code
    "hook": ("code", hook(scaled)),
    "default of a hook": ("code", (hook(scaled), hook(functools.partial(scaled, by=2.0)))),
    "closure of a hook": ("code", (hook(scaling(1.5)), hook(scaling(2.5)))),
    "value in a user's module": (
        "code",
        (hook(by_module), two(hook(by_module), inside(lambda: patched(FACTORS, "BY", 2.5)))),
    ),
    "function in a user's module": (
        "code",
        (hook(by_module), two(hook(by_module), inside(lambda: patched(FACTORS, "scaled", lambda x: x * 3)))),
    ),
    "decorated hook": ("code", (hook(scaled), hook(times_two(scaled)))),
    "pre-hook": (
        "code",
        of_model(lambda m: m.model.layers[1].register_forward_pre_hook(lambda _m, a: (a[0] * 2, *a[1:]))),
    ),
    "forward of another module": ("code", of_model(with_other_forward)),
    "forward of another block": ("code", of_model(with_forward_of_next_block)),
    "forward of a module outside": ("code", of_model(with_outer_forward)),
    "forward in a function": ("code", of_model(lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x * 2))),
    "constant of a user's class": (
        "code",
        (of_model(bilinear), two(of_model(bilinear), inside(lambda: patched(Bilinear, "GAIN", 2.0)))),
    ),
    "method of a user's class": (
        "code",
        (
            of_model(bilinear),
            two(of_model(bilinear), inside(lambda: patched(Bilinear, "gained", lambda self, x: x * 3 * self.GAIN))),
        ),
    ),
    "method of a user's module": (
        "code",
        (
            of_model(bilinear),
            of_model(lambda m: setattr(bilinear(m).model.layers[0].mlp, "gained", lambda x: x * 3)),
        ),
    ),
    "forward of a class": ("code", lambda call: call.contexts.append(on_class(call.model))),
    "function of transformers": (
        "code",
        inside(
            lambda: patched(
                module_named("transformers.models.llama.modeling_llama"), "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)
            )
        ),
    ),
    "function of torch": (
        "code",
        inside(lambda: patched(torch.nn.functional, "silu", lambda x, *_, **__: torch.relu(x))),
    ),
    # head, dtype, precision, attention
    "head": (
        "head",
        (
            of_analyzers(lsim.Cosine(center="none")),
            two(
                of_analyzers(lsim.Cosine(center="none")),
                lambda call: setattr(call, "model", lsim.open_model(call.model, unembed=["lm_head"])),
            ),
        ),
    ),
    "dtype": ("dtype", of_model(lambda m: m.double())),
    "half of the dtype": ("dtype", of_model(lambda m: m.bfloat16())),
    "autocast": ("precision", inside(lambda: torch.autocast("cpu", torch.bfloat16))),
    "dtype of autocast": (
        "precision",
        (inside(lambda: torch.autocast("cpu", torch.bfloat16)), inside(lambda: torch.autocast("cpu", torch.float16))),
    ),
    "precision of products": ("precision", inside(tf32)),
    "default dtype": ("precision", inside(default_dtype)),
    "eager attention": ("attention", of_model(lambda m: m.set_attn_implementation("eager"))),
    "eager attention in one block": ("attention", of_model(lambda m: with_own_config(m, _attn_implementation="eager"))),
    "user's attention": ("attention", attention_times_two),
    "kind of attention that is off": ("attention", inside(lambda: sdpa_kernel(SDPBackend.MATH))),
    # sites
    "sites": ("sites", two(of_analyzers(lsim.Cosine(center="none")), of_options(at="attn_out"))),
    "heads of sites": (
        "sites",
        (
            two(of_analyzers(lsim.Cosine(center="none")), of_options(at="z")),
            two(of_analyzers(lsim.Cosine(center="none")), of_options(at="z", per_head=True)),
        ),
    ),
    "intervals": ("options of the data", of_options(intervals=True)),
    "named blocks": (
        "sites",
        (
            of_analyzers(lsim.Cosine(center="none")),
            two(
                of_analyzers(lsim.Cosine(center="none")),
                lambda call: setattr(call, "model", lsim.open_model(call.model, layers=["model.layers.1"])),
            ),
        ),
    ),
}


def reloaded(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder)


def loaded_by_auto(model: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder)


def run_before(**options: Any) -> Case:
    return of_model(lambda model: model(random_tokens(2, 5), **options))


def generated(model: Any) -> None:
    model.generate(random_tokens(2, 5), max_new_tokens=3, do_sample=False, pad_token_id=2)


def probed(model: Any) -> None:
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model(random_tokens(2, 5))
    probe.results()


def with_loss(model: Any) -> None:
    tokens = random_tokens(2, 5)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    model.zero_grad()


def nnsight_of(model: Any) -> Any:
    from nnsight import NNsight

    return NNsight(model)


def dispatched(model: Any) -> Any:
    from accelerate import dispatch_model

    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def disk_offloaded(model: Any) -> Any:
    from accelerate import disk_offload

    model.folder = tempfile.TemporaryDirectory()
    return disk_offload(model, model.folder.name, execution_device="cpu", offload_buffers=False)


def rows_of(source: Any) -> list[dict[str, Any]]:
    return [{name: values[row] for name, values in source.items()} for row in range(ROWS)]


def as_lists(call: Call) -> None:
    call.source = {name: values.tolist() for name, values in call.source.items()}


def as_generator(call: Call) -> None:
    call.source = (row for row in rows_of(call.source))


def as_loader(call: Call) -> None:
    call.source = torch.utils.data.DataLoader(rows_of(call.source), batch_size=5)


def as_data_set(call: Call) -> None:
    import datasets

    call.source = datasets.Dataset.from_dict({name: values.tolist() for name, values in call.source.items()})


def as_iterable_data_set(call: Call) -> None:
    as_data_set(call)
    call.source = call.source.to_iterable_dataset()


def as_table(call: Call) -> None:
    import pandas

    call.source = pandas.DataFrame({name: values.tolist() for name, values in call.source.items()})


def observed(model: Any) -> None:
    """A hook of the user that only keeps activations, in the base and in the other call."""
    outputs: dict[str, Any] = {}

    def keep(module: Any, _args: Any, output: Any) -> None:
        outputs[type(module).__name__] = output

    model.model.layers[0].mlp.register_forward_hook(keep)


def merged_and_split(model: Any) -> Any:
    changed = adapted(model)
    before = {name: value.clone() for name, value in changed.state_dict().items()}
    for part in changed.modules():
        if hasattr(part, "merge") and hasattr(part, "lora_A"):
            part.merge()
            part.unmerge()
    # Rounding: the weights are those before only to the last bits.
    changed.load_state_dict(before)
    return changed


def through(dtype: torch.dtype) -> Case:
    return of_model(lambda model: model.to(dtype).to(torch.float32))


def compiled(model: Any) -> None:
    model.compile(backend="eager")


# By name: a situation in which no input has changed. A pair has a base of its own.
UNCHANGED: dict[str, Case | tuple[Case, Case]] = {
    "the same call": nothing,
    "groups in a tensor": (of_reading(groups=paired(2)), of_reading(groups=torch.tensor(paired(2)))),
    "names of the same groups": (
        of_column_of_groups(paired(2)),
        of_column_of_groups([f"document {number}" for number in paired(2)]),
    ),
    "loaded again": in_its_stead(reloaded),
    "loaded by AutoModel": in_its_stead(loaded_by_auto),
    "made from the same seed": lambda call: setattr(call, "model", tiny_llama(layers=2)),
    "deep copy": in_its_stead(copy.deepcopy),
    "through float64": through(torch.float64),
    "weights in another memory layout": of_model(lambda m: setattr(weights_owner(m), "data", weights(m).T.contiguous().T)),
    "moved to its device": of_model(lambda m: m.to("cuda" if torch.cuda.is_available() else "cpu")),
    "train mode": of_model(lambda m: m.train()),
    "weights without gradients": of_model(lambda m: m.requires_grad_(False)),
    "after a forward pass": run_before(),
    "after a forward pass with a cache": run_before(use_cache=True),
    "after a forward pass with captured states": run_before(output_hidden_states=True, use_cache=False),
    "after generation": of_model(generated),
    "after a loss": of_model(with_loss),
    "after a probe": of_model(probed),
    "gradient checkpointing": of_model(lambda m: m.gradient_checkpointing_enable()),
    "gradient checkpointing on and off": of_model(
        lambda m: (m.gradient_checkpointing_enable(), m.gradient_checkpointing_disable())
    ),
    "no cache": of_model(lambda m: setattr(m.config, "use_cache", False)),
    "another name": of_model(lambda m: setattr(m.config, "_name_or_path", "elsewhere")),
    "compiled": of_model(compiled),
    "opened": lambda call: setattr(call, "model", lsim.open_model(call.model)),
    "dispatched": of_model(dispatched),
    "offloaded to a disk": of_model(disk_offloaded),
    "no gradients": inside(torch.no_grad),
    "inference mode": inside(torch.inference_mode),
    "autocast that is off": inside(lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)),
    "deterministic algorithms": inside(
        lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)
    ),
    "another state of random numbers": lambda call: torch.manual_seed(99) and None,
    "hook that was removed": of_model(lambda m: m.model.layers[0].register_forward_hook(scaled).remove()),
    "hook of the user": (hook(scaled), hook(scaled)),
    "closure of equal values": (hook(scaling(1.5)), hook(scaling(1.5))),
    "hook that keeps activations": (of_model(observed), two(of_model(observed), run_before())),
    "module that keeps activations": (of_model(bilinear), two(of_model(bilinear), run_before())),
    "adapter": (in_its_stead(adapted), in_its_stead(adapted)),
    "adapter that was off": (
        in_its_stead(adapted),
        in_its_stead(lambda m: adapted(m, lambda base: (base.disable_adapter_layers(), base.enable_adapter_layers()))),
    ),
    "adapter that was merged": (in_its_stead(adapted), in_its_stead(merged_and_split)),
    "user's analyzer": (of_analyzers(OwnNorm()), of_analyzers(OwnNorm())),
    "labels in a tensor": (
        of_analyzers(lsim.LogitLens(labels=labels_of(1))),
        of_analyzers(lsim.LogitLens(labels=labels_of(1).clone())),
    ),
    "function of positions": (of_reading(positions=marks(1)), of_reading(positions=marks(1))),
    "lists": as_lists,
    "arrays": lambda call: call.source.update({name: values.numpy() for name, values in call.source.items()}),
    "list of rows": lambda call: setattr(call, "source", rows_of(call.source)),
    "generator": as_generator,
    "DataLoader": as_loader,
    "data set": as_data_set,
    "iterable data set": as_iterable_data_set,
    "table": as_table,
    "columns in another order": lambda call: setattr(call, "source", dict(reversed(call.source.items()))),
    "integers of 32 bits": lambda call: call.source.update({name: values.int() for name, values in call.source.items()}),
    "tokenizer made again": (texts, texts),
    "tokenizer that was used": (texts, two(texts, lambda call: call.model.tokenizer(["w3 w4"], padding=True))),
    "texts in a column": (texts, two(texts, lambda call: setattr(call, "source", {"text": call.source}))),
    "nnsight again": (in_its_stead(nnsight_of), in_its_stead(lambda m: nnsight_of(copy.deepcopy(m)))),
    "TransformerBridge again": (in_its_stead(bridge), in_its_stead(lambda m: bridge(copy.deepcopy(m)))),
    "GPT-2 loaded again": (
        lambda call: setattr(call, "model", tiny_gpt2()),
        lambda call: setattr(call, "model", reloaded(tiny_gpt2())),
    ),
}


def weights_owner(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj.weight


def calls_of(case: Case | tuple[Case, Case]) -> tuple[Call, Call]:
    """The base call of a case, and the call that continues it."""
    first, second = case if isinstance(case, tuple) else (nothing, case)
    calls = base_call(), base_call()
    for call, change in zip(calls, (first, second), strict=True):
        change(call)
    return calls
