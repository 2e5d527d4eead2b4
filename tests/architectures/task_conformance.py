"""The conformance run of models that are no causal language models: masked, encoder-decoders, encoders, images and speech.

`python -m tests.architectures.task_conformance [task ...]` builds the families of each task small and compares the residual
stream, the lens and `truncate` with the model's own modules, read by hooks of torch alone, one row at a time. Rows of texts
have different lengths and run in one batch here, so that padding that changes a number is found.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cosine_similarity

import tl_layersim as lsim

from .conformance import NoReference, close, first_tensor, guarded_outcome, hooked, summary, write_rows
from .task_families import TASKS, families_of, rows_of, task_model

BATCH = 4


class RowReference:
    """The residual stream and the logits of a model, row by row.

    Attributes:
        model: the model.
        rows: its input rows.
        path: path of the list of blocks that is compared, of an encoder-decoder the decoder's.
        blocks: its blocks.
        stream: for each row `residual 1 pos width`, what enters block 0 and what each block returns.
        logits: for each row the model's own logits; empty for a model without a head.
    """

    def __init__(self, model: Any, rows: list[dict[str, Tensor]]) -> None:
        self.model = model
        self.rows = rows
        self.logits: list[Tensor] = []
        streams: dict[str, list[Tensor]] = {}
        for row in rows:
            for path, stream in self._read(row).items():
                streams.setdefault(path, []).append(stream)
        whole = {path: stream for path, stream in streams.items() if len(stream) == len(rows)}
        if not whole:
            raise NoReference("no list of blocks runs once, each block on the output of the one before")
        # Lists inside a block come behind the list of the blocks.
        decoders = [path for path in whole if "decoder" in path]
        self.path = next(iter(decoders or whole))
        self.blocks = list(model.get_submodule(self.path))
        self.stream = whole[self.path]

    def run(self, row: dict[str, Tensor], **options: Any) -> Any:
        """The model's output for one row."""
        return self.model(**{name: value[None] for name, value in row.items()}, **options)

    def _read(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stream of each list of blocks that passes one tensor on, by path."""
        entered: dict[torch.nn.Module, list[Tensor | None]] = {}
        returned: dict[torch.nn.Module, list[Tensor | None]] = {}

        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            states = first_tensor((*args, *kwargs.values()))
            entered.setdefault(module, []).append(None if states is None else states.clone())

        def leave(module: torch.nn.Module, _args: Any, output: Any) -> None:
            states = first_tensor(output)
            returned.setdefault(module, []).append(None if states is None else states.clone())

        lists = {path: list(part) for path, part in self.model.named_modules() if isinstance(part, torch.nn.ModuleList)}
        handles = []
        for block in {block for blocks in lists.values() for block in blocks}:
            handles += [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
        with hooked(handles), torch.no_grad():
            output = self.run(row, output_hidden_states=True)
        if isinstance(getattr(output, "logits", None), Tensor):
            self.logits.append(output.logits)
        states = _hidden_states(output)
        streams: dict[str, Tensor] = {}
        for path, blocks in lists.items():
            inputs = [entered.get(block, []) for block in blocks]
            outputs = [returned.get(block, []) for block in blocks]
            if len(blocks) < 2 or any(len(runs) != 1 or runs[0] is None for runs in (*inputs, *outputs)):
                continue
            stream: list[Any] = [inputs[0][0], *(runs[0] for runs in outputs)]
            if len({part.shape for part in stream}) > 1 or stream[0].dim() != 3:
                continue
            chained = all(torch.equal(before, runs[0]) for before, runs in zip(stream[1:-1], inputs[1:], strict=True))
            if any(_agrees_with(stream, listed) for listed in states) or (chained and not states):
                streams[path] = torch.stack(stream)
        return streams

    def tail(self, layer: int) -> list[Tensor]:
        """The model's logits of each row if the last block returns the residual of a layer."""
        logits = []
        for row, stream in zip(self.rows, self.stream, strict=True):
            with hooked([self.blocks[-1].register_forward_hook(_returning(stream[layer]))]), torch.no_grad():
                logits.append(self.run(row).logits)
        return logits

    def head_positions(self) -> list[Tensor]:
        """For each row, the positions of the last residual on which the logits depend."""
        positions = []
        for row, stream in zip(self.rows, self.stream, strict=True):
            states = stream[-1].clone().requires_grad_(True)
            with hooked([self.blocks[-1].register_forward_hook(_returning(states))]), torch.enable_grad():
                logits = self.run(row).logits
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
            (gradient,) = torch.autograd.grad((logits * weights).sum(), states)
            positions.append(gradient[0].abs().amax(-1) > 0)
        return positions


def _hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    listed = [getattr(output, name, None) for name in names]
    return [states for states in listed if states is not None]


def _agrees_with(stream: list[Tensor], states: tuple[Tensor, ...]) -> bool:
    """Whether the outputs of blocks are the hidden states that the model lists; the last of these may be normed."""
    if len(states) != len(stream):
        return False
    pairs = zip(stream[1:-1], states[1:-1], strict=True)
    return all(
        block_output.shape == hidden_state.shape and torch.equal(block_output, hidden_state)
        for block_output, hidden_state in pairs
    )


def _returning(states: Tensor) -> Callable[..., Any]:
    """A hook that replaces the residual in a block's output."""

    def replace(_module: Any, _args: Any, output: Any) -> Any:
        return states if isinstance(output, Tensor) else type(output)([states, *list(output)[1:]])

    return replace


def stream(reference: RowReference) -> bool:
    """The residual stream, at the positions that the head reads: norms, and cosines of all pairs of layers."""
    data = lsim.Data(reference.rows, batch_size=BATCH)
    report = lsim.analyze(reference.model, data, [lsim.Trajectory(), lsim.Cosine(center="none")])
    rows = [stream[:, 0].double() for stream in reference.stream]
    if reference.logits and reference.logits[0].dim() == 2:
        positions = reference.head_positions()
        # Of a head that reads several positions, all are measured.
        if all(int(mask.sum()) == 1 for mask in positions):
            rows = [row[:, mask] for row, mask in zip(rows, positions, strict=True)]
    vectors = torch.cat(rows, 1)
    norms = vectors.norm(dim=-1).mean(1)
    # The cosine with a vector of zeros is not defined, and left out.
    vectors = torch.where(vectors.norm(dim=-1, keepdim=True) > 0, vectors, torch.nan)
    cosines = torch.stack([cosine_similarity(vectors, layer[None], dim=-1).nanmean(1) for layer in vectors])
    values = report["cosine"].values
    undefined = torch.equal(values.isnan(), cosines.isnan())
    return undefined and close(values.nan_to_num(), cosines.nan_to_num()) and close(report["trajectory"].norm, norms)


def lens(reference: RowReference) -> bool:
    """The logit lens at each layer, by the model's own forward pass from there: entropy and divergence from the last layer."""
    rows: list[dict[str, Any]] = [dict(row) for row in reference.rows]
    classifies_rows = reference.logits[0].dim() == 2
    if classifies_rows:
        for number, row in enumerate(rows):
            row["label"] = number % 2
    labels = "data" if classifies_rows else "next_token"
    report = lsim.analyze(reference.model, lsim.Data(rows, batch_size=BATCH), lsim.LogitLens(labels=labels))
    result = report["logit_lens"]
    last = _log_probabilities(reference.logits)
    entropies: list[Tensor] = []
    divergences: list[Tensor] = []
    for layer in range(1, len(reference.blocks) + 1):
        log_probabilities = _log_probabilities(reference.tail(layer))
        entropies.append(-(log_probabilities.exp() * log_probabilities).sum(-1).mean())
        divergences.append((last.exp() * (last - log_probabilities)).sum(-1).mean())
    return close(result.entropy, torch.stack(entropies), 1e-3) and close(
        result.kl_to_final[:-1], torch.stack(divergences)[:-1], 1e-3
    )


def _log_probabilities(logits: list[Tensor]) -> Tensor:
    return torch.cat([row.double().log_softmax(-1).flatten(0, -2) for row in logits])


def shortened(reference: RowReference) -> bool:
    """`truncate`, saved and loaded again: the logits of the tail after the blocks that are kept."""
    blocks = len(reference.blocks) // 2
    with tempfile.TemporaryDirectory() as folder:
        lsim.truncate(reference.model, blocks, save_to=folder)
        again = type(reference.model).from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = [again(**{name: value[None] for name, value in row.items()}).logits for row in reference.rows]
    expected = reference.tail(blocks)
    return all(close(ours, theirs, 1e-3) for ours, theirs in zip(logits, expected, strict=True))


CAPABILITIES: dict[str, Callable[[RowReference], bool]] = {"stream": stream, "lens": lens, "truncate": shortened}
# What a model without a head has.
HEADLESS = ("stream",)


def run(task: str, families: list[str], note: Callable[[str], None] = lambda _: None) -> dict[str, dict[str, tuple[str, str]]]:
    """The outcomes of all capabilities, by family. Families that transformers does not build or run small are missing.

    Args:
        task: a key of `TASKS`.
        families: the families.
        note: function that takes a line about each family.
    """
    outcomes: dict[str, dict[str, tuple[str, str]]] = {}
    for family in families:
        try:
            model = task_model(task, family)
            rows = rows_of(model)
            with torch.no_grad():
                model(**{name: value[None] for name, value in rows[0].items()})
        except Exception as error:
            note(f"{family}: not built: {type(error).__name__} {' '.join(str(error).split())[:80]}")
            continue
        try:
            reference = RowReference(model, rows)
        except NoReference as error:
            note(f"{family}: {error}")
            analysis = {"stream": lambda _, model=model, rows=rows: _refused(model, rows)}
            outcomes[family] = {"stream": guarded_outcome(analysis["stream"], None)}
            continue
        names = CAPABILITIES if reference.logits else HEADLESS
        outcomes[family] = {name: guarded_outcome(CAPABILITIES[name], reference) for name in names}
        note(f"{family}: " + ", ".join(f"{name} {outcome}" for name, (outcome, _) in outcomes[family].items()))
    return outcomes


def _refused(model: Any, rows: list[dict[str, Tensor]]) -> bool:
    """Whatever the analysis of a model without a reference gives, it must not be an error of another library."""
    lsim.analyze(model, lsim.Data(rows, batch_size=BATCH), lsim.Cosine(center="none"))
    return True


# The lines of docs/models.md between which the table is written.
START = "<!-- the conformance run of other models writes from here -->"
END = "<!-- other models end here -->"


def table(outcomes: dict[str, dict[str, dict[str, tuple[str, str]]]]) -> list[str]:
    """The counts of each task and capability, and the families that are refused, as rows of a table."""
    lines = ["| models | capability | right | refused | wrong | error of another library |", "| --- " * 6 + "|"]
    refused = ["| models | capability | families that are refused |", "| --- " * 3 + "|"]
    for task, families in outcomes.items():
        for name in CAPABILITIES:
            by_family = {family: outcome_of[name][0] for family, outcome_of in families.items() if name in outcome_of}
            if not by_family:
                continue
            counts = [list(by_family.values()).count(outcome) for outcome in ("right", "refused", "wrong", "raw")]
            lines.append(f"| {task} | {name} | {' | '.join(map(str, counts))} |")
            missing = [family for family, outcome in by_family.items() if outcome == "refused"]
            if missing:
                refused.append(f"| {task} | {name} | {', '.join(missing)} |")
    return [*lines, "", *refused]


def main(arguments: list[str]) -> None:
    """Run the families of tasks and print the table. `--page=docs/models.md` writes it there."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pages = [argument.removeprefix("--page=") for argument in arguments if argument.startswith("--page=")]
    tasks = [argument for argument in arguments if not argument.startswith("--")] or list(TASKS)
    outcomes = {}
    for task in tasks:
        print(f"== {task}", flush=True)
        outcomes[task] = run(task, list(families_of(task)), lambda line: print(line, flush=True))
        print("\n".join(summary(outcomes[task])), flush=True)
    for page in pages:
        write_rows(table(outcomes), Path(page), START, END)


if __name__ == "__main__":
    main(sys.argv[1:])
