"""The conformance run: what works on every causal language model of transformers, against plain hooks.

`python -m tests.architectures.conformance [family ...]` builds each family small, asks for each capability and compares what it
gives with the model itself, read by hooks of torch alone. An outcome is "right", "refused" (with the reason), "wrong" or "raw"
(an error that is not ours).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import tl_layersim as lsim

from .causal_families import FAMILIES, VOCABULARY, causal_model

SECONDS = 60
ROWS = 6
POSITIONS = 10
TOKENS = torch.randint(5, VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(1))
TOLERANCE = 2e-4
# Families of what sublayers add to the residual stream.
SUBLAYER_FAMILIES = ("attn_out", "mixer_out", "mlp_out")


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in the arguments or the output of a module."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)


@contextmanager
def hooked(handles: list[Any]) -> Iterator[None]:
    """A context manager that removes hooks at its end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class NoReference(Exception):
    """The model has no list of blocks whose outputs are its hidden states."""


@dataclass
class Reference:
    """The residual stream of a model, read by hooks of torch.

    Attributes:
        model: the model.
        blocks: its blocks.
        stream: `residual row pos width`, what enters block 0 and what each block returns.
        logits: the model's own logits.
    """

    model: Any
    blocks: list[torch.nn.Module] = field(default_factory=list)
    stream: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        calls: dict[torch.nn.Module, list[tuple[Tensor, Tensor]]] = {}
        entered: dict[torch.nn.Module, list[Tensor]] = {}
        lists = [part for part in self.model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1]

        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            tensor = first_tensor((*args, *kwargs.values()))
            entered.setdefault(module, []).append(torch.empty(0) if tensor is None else tensor.clone())

        def leave(module: torch.nn.Module, _args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            calls.setdefault(module, []).append((entered[module][-1], torch.empty(0) if tensor is None else tensor.clone()))

        handles = []
        for part in {part for parts in lists for part in parts}:
            handles += [part.register_forward_pre_hook(enter, with_kwargs=True), part.register_forward_hook(leave)]
        with hooked(handles), torch.no_grad():
            output = self.model(TOKENS, use_cache=False, output_hidden_states=True)
        self.logits = output.logits
        states = getattr(output, "hidden_states", None) or ()
        for parts in lists:
            runs = [calls.get(part, []) for part in parts]
            if any(len(run) != 1 for run in runs):
                continue
            outputs = [run[0][1] for run in runs]
            chained = all(
                before.shape == after[0][0].shape and torch.equal(before, after[0][0])
                for before, after in zip(outputs, runs[1:], strict=False)
            )
            in_hidden_states = len(states) == len(outputs) + 1 and all(
                state.shape == block_output.shape and torch.equal(state, block_output)
                for state, block_output in zip(states[1:-1], outputs[:-1], strict=True)
            )
            if (chained or in_hidden_states) and outputs[0].shape[:2] == TOKENS.shape:
                self.blocks, self.stream = list(parts), [runs[0][0][0], *outputs]
                return
        raise NoReference("no list of blocks runs once, each block on the output of the one before")

    def loss(self, logits: Tensor) -> float:
        """The cross-entropy of the next token."""
        return float(cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten()))

    def tail(self, residual: Tensor, without_norm: bool = False) -> Tensor:
        """The logits of the model if the last block returns `residual`."""
        inside = {part for block in self.blocks for part in block.modules()}
        ended: list[bool] = []

        def replace(_module: Any, _args: Any, output: Any) -> Any:
            ended.append(True)
            return residual if isinstance(output, Tensor) else type(output)([residual, *list(output)[1:]])

        def skip(module: torch.nn.Module, args: Any, output: Any) -> Any:
            tensor = first_tensor(args)
            # The final norm reads the residual itself; others are parts of a head.
            if not ended or tensor is None or tensor.shape != residual.shape or not torch.equal(tensor, residual):
                return None
            return tensor

        handles = [self.blocks[-1].register_forward_hook(replace)]
        if without_norm:
            handles += [
                part.register_forward_hook(skip)
                for part in self.model.modules()
                if part not in inside and "norm" in type(part).__name__.lower() and not list(part.children())
            ]
        with hooked(handles), torch.no_grad():
            return self.model(TOKENS, use_cache=False).logits


def close(values: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether numbers agree."""
    values = torch.as_tensor(values).double()
    expected = torch.as_tensor(expected).double()
    return values.shape == expected.shape and bool((values - expected).norm() <= tolerance * expected.norm().clamp(min=1e-6))


def stream(reference: Reference) -> bool:
    """The residual stream: norms, and cosines of all pairs of layers."""
    report = lsim.analyze(reference.model, TOKENS, [lsim.Trajectory(), lsim.Cosine(center="none")])
    x = torch.stack(reference.stream).double().flatten(1, 2)
    cosines = torch.stack([cosine_similarity(x, y[None], dim=-1).mean(1) for y in x])
    norms = x.norm(dim=-1).mean(1)
    return close(report["cosine"].values, cosines) and close(report["trajectory"].norm, norms)


def lens(reference: Reference) -> bool:
    """The logit lens: the loss at each layer, by the model's own tail."""
    losses = lsim.analyze(reference.model, TOKENS, lsim.LogitLens())["logit_lens"].cross_entropy
    return close(losses, [reference.loss(reference.tail(x)) for x in reference.stream[1:]])


def lens_without_norm(reference: Reference) -> bool:
    """The logit lens without the final norm, below the last layer."""
    losses = lsim.analyze(reference.model, TOKENS, lsim.LogitLens(norm="none"))["logit_lens"].cross_entropy[:-1]
    return close(losses, [reference.loss(reference.tail(x, without_norm=True)) for x in reference.stream[1:-1]])


def sublayers(reference: Reference) -> bool:
    """`attn_out` and `mlp_out`: what they add up to."""
    from tl_layersim.sources.open_local import open_local

    source: Any = open_local(reference.model)
    points: list[Any] = []
    for family in SUBLAYER_FAMILIES:
        with contextlib.suppress(lsim.LayersimError):
            points += source.hook_points(family, False)
    if not points:
        source.hook_points("mlp_out", False)
    names = [point.name for point in points]
    from tl_layersim.data.batches import Batch

    every = torch.ones_like(TOKENS, dtype=torch.bool)
    with source.evaluating(), source.reading_at(tuple(points)):
        batch = Batch(TOKENS, every, every, 0)
        source.settle(batch)
        x = source.collect(batch).activations
    outputs_by_name = dict(zip(names, x.double(), strict=True))
    good = True
    for number, (before, after) in enumerate(zip(reference.stream, reference.stream[1:], strict=False)):
        parts = [
            outputs_by_name[name] for part in SUBLAYER_FAMILIES if (name := f"blocks.{number}.hook_{part}") in outputs_by_name
        ]
        added = (after.double() - before.double()).flatten(0, 1)
        good &= bool(parts) and (close(sum(parts), added, 1e-3) or _is_normed(reference, number, parts[-1]))
    if not good:
        # A family may be refused where several modules of a block could be called so.
        source.hook_points("mlp_out", False)
        good = _has_more_terms(source, reference, outputs_by_name)
    return good


def _has_more_terms(source: Any, reference: Reference, outputs_by_name: dict[str, Tensor]) -> bool:
    """Whether the stream is what sublayers with a family add, and modules without one."""
    for number, block in enumerate(source.watched_anatomy.blocks):
        outputs: dict[str, Tensor] = {}

        def note(path: str, output: Any, outputs: dict[str, Tensor] = outputs) -> None:
            outputs[path] = first_tensor(output)

        handles = [
            reference.blocks[number]
            .get_submodule(sublayer.path)
            .register_forward_hook(lambda _m, _a, output, path=sublayer.path: note(path, output))
            for sublayer in block.sublayers
            if not sublayer.family
        ]
        with hooked(handles), torch.no_grad():
            reference.model(TOKENS, use_cache=False)
        parts = [
            outputs_by_name[name] for part in SUBLAYER_FAMILIES if (name := f"blocks.{number}.hook_{part}") in outputs_by_name
        ]
        parts += [output.double().flatten(0, 1) for output in outputs.values()]
        added = (reference.stream[number + 1].double() - reference.stream[number].double()).flatten(0, 1)
        if not close(sum(parts), added, 1e-3):
            return False
    return True


def _is_normed(reference: Reference, number: int, last: Tensor) -> bool:
    """Whether the norm at the end of a post-norm block reads a stream plus the last sublayer's output."""
    block = reference.blocks[number]
    calls = list[tuple[torch.nn.Module, Tensor, Tensor]]()

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        calls.append((module, args[0], output))

    norms = [part for part in block.modules() if "norm" in type(part).__name__.lower()]
    with hooked([part.register_forward_hook(note) for part in norms]), torch.no_grad():
        reference.model(TOKENS, use_cache=False)
    streams = [reference.stream[number], *(output for _, _, output in calls)]
    ends = [reference.stream[number + 1]]
    ends += [
        entering
        for _, entering, output in calls
        if output.shape == streams[0].shape and torch.equal(output, reference.stream[number + 1])
    ]
    return any(
        close((end - stream).flatten(0, 1), last, 1e-3) for end in ends for stream in streams if stream.shape == end.shape
    )


def shortened(reference: Reference) -> bool:
    """`truncate`, saved and loaded again: the logits of the tail after the blocks that are kept."""
    blocks = len(reference.blocks) // 2
    with tempfile.TemporaryDirectory() as folder:
        lsim.truncate(reference.model, blocks, save_to=folder)
        loaded = (
            type(reference.model).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").eval()
        )
        with torch.no_grad():
            logits = loaded(TOKENS, use_cache=False).logits
    return close(logits, reference.tail(reference.stream[blocks]), 1e-3)


def early_logits(reference: Reference) -> bool:
    """`EarlyExit.logits` with a threshold that lets nothing exit."""
    return close(lsim.EarlyExit(reference.model, 1.0).logits(TOKENS).logits, reference.logits, 1e-3)


def early_generation(reference: Reference) -> bool:
    """`EarlyExit.generate` without exits: the tokens of `generate`, or of the same model without a cache."""
    prompt = TOKENS[:1, :6]
    tokens = lsim.EarlyExit(reference.model, 1.0).generate(prompt, max_new_tokens=8, eos_token_id=()).tokens[0]
    generated = reference.model.generate(
        prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(prompt)
    )
    greedy = prompt
    with torch.no_grad():
        for _ in range(8):
            greedy = torch.cat([greedy, reference.model(greedy, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    # The caches of some families give other tokens than the same model without a cache.
    return tokens.tolist() in (generated[0, 6:].tolist(), greedy[0, 6:].tolist())


def skipping(reference: Reference) -> bool:
    """`stitch` of a model to itself with the identity, which leaves out block 1: the loss without it."""
    if len(reference.blocks) < 3:
        return True
    loss = lsim.stitch(
        reference.model, reference.model, TOKENS, eval_data=TOKENS, at=("blocks.1.hook_resid_pre", 1), adapter="identity"
    ).loss

    def pass_on(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        entering = first_tensor((*args, *kwargs.values()))
        return entering if isinstance(output, Tensor) else (entering, *output[1:])

    with hooked([reference.blocks[1].register_forward_hook(pass_on, with_kwargs=True)]), torch.no_grad():
        return close(loss, reference.loss(reference.model(TOKENS, use_cache=False).logits))


CAPABILITIES: dict[str, Callable[[Reference], bool]] = {
    "stream": stream,
    "lens": lens,
    "lens without norm": lens_without_norm,
    "sublayers": sublayers,
    "stitch": skipping,
    "truncate": shortened,
    "EarlyExit.logits": early_logits,
    "EarlyExit.generate": early_generation,
}


def outcome(reference: Reference, capability: str) -> tuple[str, str]:
    """The outcome of a capability on a model, and the reason or error."""
    return guarded_outcome(CAPABILITIES[capability], reference)


def guarded_outcome(check: Callable[[Any], bool], reference: Any) -> tuple[str, str]:
    """The outcome of a check of a model, and the reason or error. A check that takes too long counts as an error."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            good = check(reference)
        return ("right" if good else "wrong"), ""
    except lsim.LayersimError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        signal.alarm(0)


def run(
    families: list[str], capabilities: list[str], note: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, tuple[str, str]]]:
    """The outcomes of all capabilities, by family. Families that transformers does not build small are missing.

    Args:
        families: the families.
        capabilities: names in `CAPABILITIES`.
        note: function that takes a line about each family.
    """
    by_family: dict[str, dict[str, tuple[str, str]]] = {}
    for family in families:
        start = time.time()
        try:
            model = causal_model(family)
            with torch.no_grad():
                model(TOKENS, use_cache=False)
        except Exception as error:
            note(f"{family}: not built: {type(error).__name__} {' '.join(str(error).split())[:80]}")
            continue
        try:
            reference = Reference(model)
        except NoReference as error:
            reference = None
            note(f"{family}: {error}")
        outcomes: dict[str, tuple[str, str]] = {}
        for name in capabilities:
            if reference is None:
                # Whatever it gives, it must not be an error of another library.
                try:
                    lsim.analyze(model, TOKENS, lsim.Cosine(center="none") if name == "stream" else lsim.LogitLens())
                    outcomes[name] = ("unknown", "")
                except lsim.LayersimError as error:
                    outcomes[name] = ("refused", str(error))
                except Exception as error:
                    outcomes[name] = ("raw", f"{type(error).__name__}: {' '.join(str(error).split())}")
                continue
            outcomes[name] = outcome(reference, name)
        by_family[family] = outcomes
        note(f"{family} ({time.time() - start:.1f} s): " + ", ".join(f"{name} {what}" for name, (what, _) in outcomes.items()))
    return by_family


def summary(by_family: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    """The number of families with each outcome, for each capability, as rows of a table."""
    columns = ("right", "refused", "wrong", "raw", "unknown")
    rows = [f"| transformers {transformers.__version__} | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(name for outcomes in by_family.values() for name in outcomes):
        counts = Counter(outcomes[name][0] for outcomes in by_family.values() if name in outcomes)
        rows.append(f"| {name} | {' | '.join(str(counts[column]) for column in columns)} |")
    return rows


# The lines of docs/models.md between which the table is written.
START = "<!-- the conformance run writes from here -->"
END = "<!-- to here -->"


def write_page(by_family: dict[str, dict[str, tuple[str, str]]], page: Path) -> None:
    """Write the counts, and the families that are refused, into the page.

    Args:
        by_family: the outcomes of all families.
        page: docs/models.md.
    """
    rows = ["| capability | right | refused | wrong | error of another library |", "| --- " * 5 + "|"]
    refused: dict[str, list[str]] = {}
    for name in next(iter(by_family.values())):
        counts = Counter(outcomes[name][0] for outcomes in by_family.values())
        rows.append(f"| {name} | {counts['right']} | {counts['refused']} | {counts['wrong']} | {counts['raw']} |")
        refused[name] = [family for family, outcomes in by_family.items() if outcomes[name][0] == "refused"]
    lines = [
        f"{len(by_family)} families with transformers {transformers.__version__}:",
        "",
        *rows,
        "",
        "| capability | families that are refused |",
        "| --- | --- |",
        *(f"| {name} | {', '.join(families)} |" for name, families in refused.items()),
    ]
    write_rows(lines, page, START, END)


def write_rows(lines: list[str], page: Path, start: str, end: str) -> None:
    """Write lines into a page, in place of those between two marks.

    Args:
        lines: the lines.
        page: the page.
        start: the mark before them.
        end: the mark behind them.
    """
    before, old = page.read_text().split(start)
    _, after = old.split(end)
    page.write_text("\n".join([f"{before}{start}", "", *lines, "", f"{end}{after}"]))


def main(arguments: list[str]) -> None:
    """Run the families and print the table.

    `--only=stream,lens` names capabilities, `--json=file` keeps the outcomes, `--page=docs/models.md` writes them there.
    """
    transformers.logging.set_verbosity_error()
    options = dict(item[2:].split("=", 1) for item in arguments if item.startswith("--"))
    families = [item for item in arguments if not item.startswith("--")] or list(FAMILIES)
    capabilities = options["only"].split(",") if "only" in options else list(CAPABILITIES)
    torch.set_num_threads(1)
    by_family = run(families, capabilities, lambda line: print(line, flush=True))
    if "json" in options:
        with open(options["json"], "w") as file:
            json.dump(by_family, file, indent=1)
    if "page" in options:
        write_page(by_family, Path(options["page"]))
    print("\n".join(summary(by_family)))


if __name__ == "__main__":
    main(sys.argv[1:])
