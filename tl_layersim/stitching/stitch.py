"""`stitch` and `stitch_grid`: join two models by an adapter and measure the loss."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..architectures.blocks import entering
from ..architectures.site_selection import block_number
from ..core.arguments import FilePath, Layer, NonNegativeFloat, typed
from ..core.errors import LayersimError, in_words, warn
from ..core.file_format import refuse_unwritable, refuse_unwritable_folder
from ..core.result_declarations import Provenance
from ..core.resumable_file import Snapshot
from ..core.sums import Tally
from ..core.wording import WHY_NOT_FINITE, amount, brief
from ..data.batches import Batches, fingerprint, found_in, new_digest
from ..data.data import Data
from ..data.labels import NO_LABEL, warn_of_unused
from ..engine.report_assembly import notes_on_texts, record
from ..engine.run_arguments import shared_tokens, with_tokenizer
from ..engine.run_identity import identity_of
from ..lens.targets import answers, usual_labels
from ..many.compare_grid import group_labels
from ..remote.open_model import open_split_model
from ..sources.model_description import ModelDescription
from ..sources.open_local import OpenedModel, records_of
from ..sources.partial_forward import LocalSplitModel, SplitModel
from ..sources.shared_modules import refuse_one_model
from ..sources.source import position_counter, refuse_inference_weights
from .activation_store import ActivationStore, fit_and_evaluation
from .adapters import ADAPTER_KINDS, Adapter, AdapterKind
from .fitting import Fit, Progress, StitchDescent, StitchTraining, identity_adapter, least_squares
from .stitch_results import TEXT_SUMS, StitchGrid, StitchResult, over_texts
from .stitched_model import StitchedModel


class StitchExperiment:
    """Fits and evaluates all stitches of one call.

    Args:
        pairs: front and back model of each stitch.
        adapter: see `stitch`, as for all further arguments.
        fit: see `stitch`.
        training: see `stitch`.
        ridge: see `stitch`.
        data: data for the fit, and for the evaluation if `eval_data` is None.
        eval_data: see `stitch`.
        labels: see `stitch`.
        cache: folder for the front model's activations; None for memory.

    Attributes:
        kind: the kind of adapter.
        fit: `"lstsq"`, `"sgd"`, `"lstsq+sgd"`, or "" if nothing is fitted.
        unit: unit of a target: "token", or "row" for a classifier.
    """

    def __init__(
        self,
        pairs: list[tuple[SplitModel, SplitModel]],
        adapter: str | Adapter,
        fit: Fit | None,
        training: StitchTraining | None,
        ridge: float,
        data: Data,
        eval_data: Any,
        labels: Any,
        cache: FilePath | None,
    ) -> None:
        # Every model once, in the order of the call.
        self.models = list(dict.fromkeys(itertools.chain.from_iterable(pairs)))
        self.backs = list(dict.fromkeys(back for _, back in pairs))
        self._choose_fit(adapter, fit, training, ridge)
        for front, back in pairs:
            self._refuse_pair(front, back)
        self.cache = None if cache is None else Path(cache)
        if self.cache is not None:
            refuse_unwritable_folder(self.cache, "cache")
        description = self.models[0].model
        for split_model in self.models[1:]:
            description = shared_tokens(description, split_model.model, given=data.tokenizer is not None)
        tokenizers = (split_model.model.tokenizer for split_model in self.models)
        first_tokenizer = next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)
        description = with_tokenizer(replace(description, tokenizer=first_tokenizer), data.tokenizer)
        self.labels = usual_labels(labels, [(back.model, back.module) for back in self.backs], data.source)
        if isinstance(self.labels, Tensor) and eval_data is not None:
            raise LayersimError(
                "`labels` is a tensor; with `eval_data`, it must be 'next_token' or 'data'. 'data' reads the column `labels` "
                "of each data set."
            )
        labelled = isinstance(self.labels, str) and self.labels == "data"
        self.batches = Batches(
            data, description, labelled, position_counter([split_model.source for split_model in self.models])
        )
        held_out = None
        if eval_data is not None:
            held_out_data = data.like(eval_data)
            held_out_description = with_tokenizer(description, held_out_data.tokenizer)
            held_out = replace(self.batches, data=held_out_data, model=held_out_description, argument="eval_data")
        self.tokenizer = description.tokenizer
        head = self.backs[0].model.head
        self.unit = "token" if head is None or head.reads == "every" else "row"
        self.fit_data, self.evaluation = fit_and_evaluation(
            self.batches, held_out, self.labels, self.backs[0].model, self.fit != ""
        )
        data_sets = [self.batches] if held_out is None else [self.batches, held_out]
        self._row_counts = found_in(*data_sets)
        wide = any(split_model.model.dtype == "torch.float64" for split_model in self.models)
        self.dtype = torch.float64 if wide else torch.float32

    def _choose_fit(self, adapter: str | Adapter, fit: Fit | None, training: StitchTraining | None, ridge: float) -> None:
        """Set the kind of adapter and the method of its fit.

        Raises:
            LayersimError: the arguments contradict one another.
        """
        self.given_adapter: Adapter | None = None
        if isinstance(adapter, Adapter):
            self.given_adapter = adapter
            self.kind: AdapterKind = adapter.definition
        else:
            self.kind = ADAPTER_KINDS.named(adapter, "adapter")()
        self.fit = ""
        self.training = training or StitchTraining()
        self.ridge = float(ridge)
        if self.given_adapter is None and self.kind.has_weight:
            gradients = all(back.model.calls == "gradients" for back in self.backs)
            self.fit = fit or ("lstsq+sgd" if gradients else "lstsq")
        elif fit is not None:
            raise LayersimError(f"`fit` is {fit!r}; it must be None with adapter={brief(adapter)}, which is not fitted.")
        for name, is_set, method in (("training", training is not None, "sgd"), ("ridge", ridge, "lstsq")):
            if is_set and method not in self.fit:
                raise LayersimError(f"`{name}` has no effect with adapter={brief(adapter)} and fit={self.fit or None!r}.")

    def _refuse_pair(self, front: SplitModel, back: SplitModel) -> None:
        """Raise an error if the adapter and its fit do not suit two models.

        Raises:
            LayersimError: the widths, the dtype or the sandbox of a server does not allow it.
        """
        lower = front.model
        upper = back.model
        widths = (lower.d_model, upper.d_model)
        if not self.kind.has_weight and None not in widths and widths[0] != widths[1]:
            raise LayersimError(
                f"`adapter` is {self.kind.name!r}, which needs residual streams of equal width; {lower.name} has width "
                f"{widths[0]} and {upper.name} {widths[1]}."
            )
        weight = None if self.given_adapter is None else self.given_adapter.weight
        if weight is not None and None not in widths and weight.shape != (widths[1], widths[0]):
            raise LayersimError(
                f"`adapter` maps width {weight.shape[1]} to {weight.shape[0]}; it must map {widths[0]}, the width of "
                f"{lower.name}, to {widths[1]}, that of {upper.name}."
            )
        bases_are_known = "unknown" not in (lower.stream, upper.stream)
        if not self.kind.has_weight and bases_are_known and lower.basis != upper.basis:
            warn(
                f"The residual streams of front and back have different bases: {lower.basis}; {upper.basis}. The penalty "
                "includes this difference."
            )
        if "sgd" not in self.fit:
            return
        if upper.calls != "gradients":
            raise LayersimError(
                f"`fit` is {self.fit!r}, which needs gradients; the sandbox that runs {upper.name} computes none. Use "
                "fit='lstsq'."
            )
        if isinstance(back, LocalSplitModel):
            refuse_inference_weights(back.module)
        if upper.dtype == "torch.float16":
            raise LayersimError(
                f"`fit` is {self.fit!r}, but {upper.name} is in float16, in which small gradients are 0. Use fit='lstsq' or "
                "bfloat16."
            )

    def options(self) -> dict[str, Any]:
        """Dict of the adapter and the settings of its fit, for the provenance."""
        adapter = self.kind.name
        if self.given_adapter is not None:
            adapter = f"{adapter} {self.given_adapter.digest()}"
        options: dict[str, Any] = {"adapter": adapter, "fit": self.fit}
        if "lstsq" in self.fit:
            options["ridge"] = self.ridge
        if "sgd" in self.fit:
            # The seed is recorded separately.
            options["training"] = {name: value for name, value in asdict(self.training).items() if name != "seed"}
        return options

    def progress(self, checkpoint: FilePath | None, **where: Any) -> Progress:
        """Open a checkpoint file with the states of the stitches.

        Args:
            checkpoint: path of the file; None to keep no state.
            **where: the stitch points, for the identity.
        """
        if checkpoint is None:
            return Progress(None, {})
        local_models = [split_model for split_model in self.models if isinstance(split_model, LocalSplitModel)]
        descriptions = [split_model.model for split_model in self.models]
        with ExitStack() as stack:
            for split_model in local_models:
                # Split models run outside autocast.
                stack.enter_context(torch.autocast(split_model.device.type, enabled=False))
            identity_of_models = identity_of(descriptions, [split_model.module for split_model in local_models], "checkpoint")
        identity = identity_of_models | {
            "task": self.options() | {"seed": self.training.seed},
            "data": self.batches.record() | {"digest": self._digest(with_targets=True)},
        }
        return Progress(checkpoint, identity | where)

    def _digest(self, with_targets: bool = False) -> str:
        """SHA-256 of all rows, and of their texts and targets if `with_targets`."""
        digest = new_digest()
        # The roles are part of the digest.
        for role, batches in ((b"fit", self.fit_data), (b"judged", self.evaluation)):
            for batch in batches:
                fingerprint(digest, batch)
                if with_targets:
                    digest.update(repr([tuple(text) for text in batch.texts]).encode())
                    digest.update(role + answers(batch, self.labels, self.backs[0].model).numpy().tobytes())
        hexadecimal: str = digest.hexdigest()
        return hexadecimal

    def provenance(self, models: list[SplitModel], seconds: float, points: Mapping[str, Any]) -> Provenance:
        """The provenance of the call. Its counts are those of the evaluation data.

        Args:
            models: the models.
            seconds: duration of the call.
            points: the stitch points, which are recorded among the options.
        """
        target_count = 0
        for batch in self.evaluation:
            target_count += int((answers(batch, self.labels, self.backs[0].model) != NO_LABEL).sum())
        rows = sum(len(batch.tokens) for batch in self.evaluation)
        texts = int(self._text_of_row()[-1]) + 1
        tally = Tally(len(self.evaluation), rows, target_count, self._digest(), seconds, texts=texts)
        options = self.batches.record() | self._row_counts | self.options() | dict(points)
        options["labels"] = self.labels if isinstance(self.labels, str) else "a table"
        options["fit_batches"] = len(self.fit_data)
        options["fit_positions"] = sum(int(batch.attention.sum()) for batch in self.fit_data)
        seed = self.training.seed if "sgd" in self.fit else None
        provenance = record([split_model.model for split_model in models], tally, options, seed)
        fit_rows = sum(len(batch.tokens) for batch in self.fit_data)
        warn_of_unused(self.labels, replace(provenance, sequences=fit_rows + rows))
        for text, _ in notes_on_texts(texts, rows, 0, ["stitch"]):
            warn(text)
        return provenance

    def run(self, stitches: Mapping[str, tuple[SplitModel, int, SplitModel, int]], progress: Progress) -> dict[str, Snapshot]:
        """Fit and evaluate the stitches that are not complete yet. Returns the states of all stitches.

        Meanwhile dropout is off and no gradient reaches the models' weights.

        Args:
            stitches: front, its layer, back and its layer, by name of the stitch.
            progress: the states of the stitches.
        """
        self._report_traffic()
        remaining = {key: points for key, points in stitches.items() if not progress.done(key)}
        back_points = dict.fromkeys((back, layer) for _, _, back, layer in remaining.values())
        # The activations of a front are shared by all its stitches.
        keys_by_front: dict[tuple[SplitModel, int], list[str]] = {}
        for key, (front, front_layer, _, _) in remaining.items():
            keys_by_front.setdefault((front, front_layer), []).append(key)
        completed = len(stitches) - len(remaining)
        bar = tqdm(total=len(stitches), initial=completed, desc="stitches", disable=len(stitches) == 1 or None)
        with ExitStack() as stack, bar:
            for split_model in self.models:
                stack.enter_context(split_model.evaluating())
                split_model.settle(self.evaluation[0])
                split_model.refuse_dependent_rows([*self.fit_data, *self.evaluation])
            # Errors of back models and of evaluation data come before the fits.
            for back, back_layer in back_points:
                self._check(back, back_layer)
            backs = dict.fromkeys(back for back, _ in back_points)
            back_scores = {back: self._scores_of_back(back) for back in backs}
            for (front, front_layer), keys in keys_by_front.items():
                fit_acts = ActivationStore(front, front_layer, self.fit_data)
                evaluation_acts = ActivationStore(front, front_layer, self.evaluation)
                with ExitStack() as kept_activations:
                    for store, required in ((fit_acts, "sgd" in self.fit), (evaluation_acts, False)):
                        # Activations that are read more than once are kept, if memory allows.
                        if len(store) and (required or len(keys) > 1):
                            kept_activations.enter_context(store.keep(self.cache, required))
                    for key in keys:
                        _, _, back, back_layer = remaining[key]
                        adapter, note, fit_tensors = self._fit(key, back, back_layer, fit_acts, progress)
                        with progress.saved_on_interrupt():
                            text_sums = self._evaluate(back, back_layer, evaluation_acts, adapter, back_scores[back])
                        tensors = dict(adapter.named_buffers()) | fit_tensors | text_sums
                        progress.states[key] = (note | {"done": True}, tensors)
                        progress.save()
                        bar.update()
        return {key: progress.states[key] for key in stitches}

    def _fit(
        self, key: str, back: SplitModel, layer: int, acts: ActivationStore, progress: Progress
    ) -> tuple[Adapter, dict[str, Any], dict[str, Tensor]]:
        state = progress.states.get(key)
        if state is None:
            with progress.saved_on_interrupt():
                adapter, explained = self._initial_adapter(back, layer, acts)
        else:
            note, tensors = state
            adapter = Adapter(note["kind"], tensors.get("start weight"), tensors.get("start bias"))
            explained = note["explained"]
        curve = list[float]()
        stopped = -1
        if "sgd" in self.fit:
            targets = [answers(batch, self.labels, back.model) for batch in acts.batches]
            descent = StitchDescent(adapter, explained, acts, back, layer, targets, self.training, progress, key)
            if state is not None:
                with progress.file.parsing():
                    descent.restore(*state)
            adapter = descent.run()
            curve = descent.curve
            stopped = descent.stopped
        note = {"kind": adapter.kind, "explained": explained, "stopped": stopped}
        return adapter, note, {"curve": torch.tensor(curve, dtype=torch.float64)}

    def _initial_adapter(self, back: SplitModel, layer: int, acts: ActivationStore) -> tuple[Adapter, float]:
        """The adapter before gradient descent, and R² of its least-squares fit (NaN without such a fit).

        The adapter has the dtype in which it is evaluated and returned.
        """
        if self.given_adapter is not None:
            return copy.deepcopy(self.given_adapter).to(self.dtype), float("nan")
        if not self.kind.has_weight:
            return Adapter(self.kind.name), float("nan")
        if "lstsq" in self.fit:
            adapter, explained = least_squares(self.kind, acts, back, layer, self.ridge)
            return adapter.to(self.dtype), explained
        width = acts[0].shape[-1]
        return identity_adapter(self.kind, width, back.model.d_model or width).to(self.dtype), float("nan")

    def _evaluate(
        self, back: SplitModel, layer: int, acts: ActivationStore, adapter: Adapter, back_scores: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Evaluate a stitched model on each text. Returns the tensors in `TEXT_SUMS` (`text`), by name."""
        adapter_on_device = copy.deepcopy(adapter).to(back.device)
        scores = []
        for index in tqdm(range(len(acts)), desc="evaluation", unit="batch", disable=None, leave=False):
            batch = acts.batches[index]
            with torch.no_grad():
                x = adapter_on_device(acts[index].to(back.device))
            scores.append(back.score(batch, answers(batch, self.labels, back.model), layer, x))
        row_sums = _sums_by_row(scores, "loss", "correct")
        bad_rows = (~row_sums["loss"].isfinite()).nonzero()[:, 0].tolist()
        if bad_rows:
            point = f"from {acts.front.model.layers[acts.layer]} into {back.model.layers[layer]}"
            warn(
                f"The loss of the model stitched {point} is not finite in rows {bad_rows[:5]}. Check the activations of "
                "both models for NaN and overflow."
            )
        row_sums_of_back = {
            "tokens": back_scores["count"],
            "back_loss": back_scores["loss"],
            "back_correct": back_scores["correct"],
        }
        return {name: self._sums_by_text(values) for name, values in (row_sums_of_back | row_sums).items()}

    def _sums_by_text(self, values: Tensor) -> Tensor:
        """Sums over the rows of each text of the evaluation (`text`).

        Args:
            values: `row`, sums over each row of the evaluation.
        """
        text_of_row = self._text_of_row()
        return values.new_zeros(int(text_of_row[-1]) + 1).index_add_(0, text_of_row.to(values.device), values)

    def _text_of_row(self) -> Tensor:
        """Index of the text of each row of the evaluation, from 0 and ascending (`row`)."""
        texts = itertools.chain.from_iterable(batch.texts for batch in self.evaluation)
        units = torch.tensor([text.unit for text in texts])
        text_of_row: Tensor = torch.unique_consecutive(units, return_inverse=True)[1]
        return text_of_row

    def _scores_of_back(self, back: SplitModel) -> dict[str, Tensor]:
        """Evaluate the back model alone on each row. Returns tensors (`row`): "loss", "correct" and "count" of targets."""
        scores = [back.score(batch, answers(batch, self.labels, back.model)) for batch in self.evaluation]
        row_sums = _sums_by_row(scores, "loss", "correct", "count")
        if not bool(row_sums["loss"].isfinite().all()):
            bad_rows = (~row_sums["loss"].isfinite()).nonzero()[:, 0].tolist()
            raise LayersimError(
                f"The loss of {back.model.name} alone, in {back.model.dtype}, is not finite in rows {bad_rows[:5]}. "
                f"{WHY_NOT_FINITE}"
            )
        return row_sums

    def _check(self, back: SplitModel, layer: int) -> None:
        """Raise an error if the back model cannot run from this layer."""
        batch = self.evaluation[0].first_row
        targets = answers(batch, self.labels, back.model)
        # The first row may have no target; each batch has one.
        if not bool((targets != NO_LABEL).any()):
            batch = self.evaluation[0]
            targets = answers(batch, self.labels, back.model)
        back.check(batch, targets, layer)

    def _report_traffic(self) -> None:
        """Print the number of bytes and requests of remote models."""
        remote_models = [split_model for split_model in self.models if not isinstance(split_model, LocalSplitModel)]
        if not remote_models:
            return
        fit_positions = sum(batch.tokens.numel() for batch in self.fit_data)
        evaluation_positions = sum(batch.tokens.numel() for batch in self.evaluation)
        width = max(split_model.model.d_model or 0 for split_model in self.models)
        bytes_of_number = 2 if all("16" in split_model.model.dtype for split_model in remote_models) else 4
        bytes_of_position = bytes_of_number * width
        activations = in_words(bytes_of_position * (fit_positions + evaluation_positions))
        transfers = f"Each stitch transfers {activations} of activations for each remote model"
        if "sgd" in self.fit and not set(remote_models).isdisjoint(self.backs):
            positions_of_batch = fit_positions / max(len(self.fit_data), 1)
            # A step sends activations and receives their gradients.
            bytes_of_step = in_words(2 * bytes_of_position * positions_of_batch)
            transfers += f", and {bytes_of_step} at each of {self.training.steps:,} training steps"
        requests = 2 * (len(self.fit_data) + len(self.evaluation))
        tqdm.write(
            f"{transfers}. A stitch needs about {requests} requests besides training. Other activations stay on the server.",
            file=sys.stderr,
        )


def _sums_by_row(scores: list[dict[str, Tensor]], *names: str) -> dict[str, Tensor]:
    """The sums of all batches (`row`), by name."""
    return {name: torch.cat([score[name] for score in scores]) for name in names}


def point_number(model: ModelDescription, layer: Layer, argument: str) -> int:
    """Index of a stitch point in the residual stream of a model. 0 is the input of block 0, and i + 1 the output of block i.

    Args:
        model: description of the model.
        layer: the block before the point, as in `block_number`; or the name of the point.
        argument: name of the argument, for the message.

    Raises:
        LayersimError: the model has no such layer.
    """
    # The residual that enters block i is the one that left block i - 1.
    numbers = {name: number for number, name in enumerate(model.layers)}
    numbers |= {entering(name): number for number, name in enumerate(model.layers[1:])}
    if isinstance(layer, str) and layer in numbers:
        return numbers[layer]
    return block_number(layer, model.layers[1:], argument) + 1


def stitch_points_of(models: Mapping[str, SplitModel], layers: Any) -> dict[str, list[int]]:
    """Indices of the stitch points in each model, by model name.

    Args:
        models: models by name.
        layers: see `stitch_grid`.

    Raises:
        LayersimError: there are no models, or the lists do not fit them or name a stitch point twice.
    """
    if not models:
        raise LayersimError("`models` is empty; it must have at least one model.")
    if layers is None:
        layers = {name: split_model.model.layers[1:] for name, split_model in models.items()}
    layers_of_models = layers if isinstance(layers, Mapping) else dict.fromkeys(models, layers)
    counts = {name: len(names) for name, names in layers_of_models.items()}
    if set(layers_of_models) != set(models) or len(set(counts.values())) > 1 or 0 in counts.values():
        lists = ", ".join(f"{amount(count, 'layer')} for {name}" for name, count in counts.items()) or "no lists"
        raise LayersimError(
            f"`layers` has {lists}; it must have the same number of layers, at least one, for each of {', '.join(models)}."
        )
    points = {}
    for name, split_model in models.items():
        points[name] = [point_number(split_model.model, layer, "layers") for layer in layers_of_models[name]]
    stitch_points = list(zip(*points.values(), strict=True))
    if len(set(stitch_points)) < len(stitch_points):
        raise LayersimError(f"`layers` is {brief(layers)}; it must not name a stitch point twice.")
    return points


@typed
def stitch(
    front: Any,
    back: Any,
    data: Any,
    *,
    at: tuple[Layer, Layer],
    adapter: str | Adapter = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: NonNegativeFloat = 0.0,
    eval_data: Any = None,
    labels: Any = None,
    cache: FilePath | None = None,
    checkpoint: FilePath | None = None,
) -> StitchResult:
    """Join the lower blocks of one model to the upper blocks of another by an adapter, and measure the loss.

    Neither model is changed; only the adapter is trained. The front model's activations are computed once, and a training step
    runs only the back model's blocks above the stitch point. Adapters are fitted on all attended positions, also on those that
    `Data(skip_first=..., positions=...)` leaves out: the back attends to them too.

    Args:
        front: the model whose lower blocks are used; as in `analyze`. If a model is on a server, the front model's activations
            at one layer are transferred, and their size is printed first. Training needs a trusted server for the back model.
        back: the model whose upper blocks are used. Widths and depths may differ, tokenizers may not.
        data: a `Data`, or raw data, read by the front model's tokenizer, or by the back model's if the front model has none. A
            training step takes one batch.
        at: the stitch point (l, m): the front runs up to block l, the back from the block after m. Blocks are given by number,
            negative from the end, or by name, such as `blocks.2.hook_resid_post`; `blocks.0.hook_resid_pre` is the input of
            block 0.
        adapter: `"identity"`, `"linear"`, `"affine"`, `"affine-norm"`, see `Adapter`; or an `Adapter`, which is only evaluated.
        fit: `"lstsq"` for least squares against the back model's own residual; `"sgd"` for training by the back model's loss,
            from the identity; `"lstsq+sgd"` for one after the other. Default: `"lstsq+sgd"`; `"lstsq"` if the back model is in
            a server's sandbox.
        training: settings of `"sgd"`; default `StitchTraining()`. The paper's stitching is `adapter="affine-norm"`, `fit="sgd"`
            and `training=StitchTraining.paper()`.
        ridge: regularisation of `"lstsq"`: the diagonal of X'X is raised by this fraction of itself.
        eval_data: data for measuring the penalty: a `Data`, or raw data, which is read like `data`. Default: about the last
            fifth of the rows of `data`, from documents that are not in the fit; all rows if nothing is fitted.
        labels: targets of the back model: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for
            a classifier, and for rows without tokens that have labels, `"data"`.
        cache: folder for a memory-mapped file of the front model's activations; default: they are kept in memory.
        checkpoint: file with the state of the training; the same call resumes from it, with the same numbers.

    Returns:
        A `StitchResult`: losses, penalty with its interval, learning curve, adapter, and the stitched model.

    Raises:
        LayersimError: the models read different tokens, a layer does not exist, or the arguments contradict one another.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), sections 2 and 3, appendix C.1; Bansal, Nakkiran and Barak 2021 (arXiv
        2106.07682).

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> same = lsim.stitch(model, model, lsim.demo_text()[:8], at=(3, 3), adapter="identity")
        >>> same.penalty
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    opened_front = OpenedModel.of(front, "front")
    opened_back = OpenedModel.of(back, "back")
    refuse_one_model({"front": front, "back": back})
    lower = open_split_model(opened_front)
    upper = open_split_model(opened_back)
    numbers = (point_number(lower.model, at[0], "at"), point_number(upper.model, at[1], "at"))
    experiment = StitchExperiment([(lower, upper)], adapter, fit, training, ridge, Data.of(data), eval_data, labels, cache)
    progress = experiment.progress(checkpoint, at=list(numbers), blocks=[opened_front.layers, opened_back.layers])
    start = time.perf_counter()
    note, tensors = experiment.run({"stitch": (lower, numbers[0], upper, numbers[1])}, progress)["stitch"]
    names = (lower.model.layers[numbers[0]], upper.model.layers[numbers[1]])
    join = None
    if isinstance(lower, LocalSplitModel) and isinstance(upper, LocalSplitModel):
        join = partial(StitchedModel, lower, upper, numbers, experiment.tokenizer)
    text_sums: dict[str, Any] = {f"text_{name}": tensors[name] for name in TEXT_SUMS}
    return StitchResult(
        values=tensors["curve"],
        weight=tensors.get("weight", torch.zeros(0, 0)).double(),
        bias=tensors.get("bias", torch.zeros(0)).double(),
        kind=experiment.kind.name,
        fit=experiment.fit,
        explained=note["explained"],
        stopped=note["stopped"] + 1,
        unit=experiment.unit,
        layers=names,
        provenance=experiment.provenance([lower, upper], time.perf_counter() - start, {"at": list(names)}),
        join=join,
        **text_sums,
    )


@typed
def stitch_grid(
    models: Mapping[str, Any],
    data: Any,
    *,
    layers: Sequence[Layer] | Mapping[str, Sequence[Layer]] | None = None,
    groups: Any = None,
    adapter: str = "affine",
    fit: Fit | None = None,
    training: StitchTraining | None = None,
    ridge: NonNegativeFloat = 0.0,
    eval_data: Any = None,
    labels: Any = None,
    cache: FilePath | None = None,
    checkpoint: FilePath | None = None,
) -> StitchGrid:
    """Stitch every pair of models in both directions, and each model with itself.

    Activations are computed once for each front model and stitch point, the loss of a back model alone once for each back
    model. With `adapter="identity"` nothing is trained: do fine-tunes of one model fall into groups? See `compare_groups`.

    Args:
        models: a mapping from names to models, each as in `analyze`.
        data: as in `stitch`.
        layers: layers of the stitch points, as in `at` of `stitch`: one list for all models, or a list for each model by name,
            all of one length. Stitch point i joins the i-th layers. Default: the output of each block, for models of equal
            depth.
        groups: a mapping from names of models to groups, or a list of groups in the order of the models, for `compare_groups`.
        adapter: see `stitch`, as for all further options.
        fit: see `stitch`.
        training: see `stitch`.
        ridge: see `stitch`.
        eval_data: see `stitch`.
        labels: see `stitch`.
        cache: folder for the front model's activations, see `stitch`; here those of the evaluation and of all fits are kept.
        checkpoint: file with the finished stitches and the state of the current training; the same call resumes from it.

    Returns:
        A `StitchGrid`: penalties with intervals, a tidy table, a plot.

    Raises:
        LayersimError: as in `stitch`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), figures 1 and 2.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> grid = lsim.stitch_grid({"a": model, "b": model}, lsim.demo_text()[:4], layers=[1, 5], adapter="identity")
        >>> grid.penalty.abs().max().item()
        0.0
    """
    refuse_unwritable(checkpoint, "checkpoint")
    names = tuple(models)
    groups_of_models = () if groups is None else group_labels(groups, names)
    opened_models = {name: OpenedModel.of(model, f"models {name!r}") for name, model in models.items()}
    refuse_one_model({f"models[{name!r}]": model for name, model in models.items()})
    split_models = {name: open_split_model(opened) for name, opened in opened_models.items()}
    points = stitch_points_of(split_models, layers)
    point_names = {}
    for name, numbers in points.items():
        point_names[name] = [split_models[name].model.layers[number] for number in numbers]
    pairs = [(front, back) for front in split_models.values() for back in split_models.values()]
    experiment = StitchExperiment(pairs, adapter, fit, training, ridge, Data.of(data), eval_data, labels, cache)
    blocks = records_of(list(opened_models.values()))["layers"]
    progress = experiment.progress(checkpoint, names=list(opened_models), seams=points, blocks=blocks)
    start = time.perf_counter()
    seams = range(len(points[names[0]]))
    keys: dict[tuple[str, int, str], str] = {}
    stitches = {}
    for front, seam, back in itertools.product(names, seams, names):
        # Keys have indices, because names may hold any character.
        key = f"{names.index(front)} {names.index(back)} {seam}"
        keys[front, seam, back] = key
        stitches[key] = (split_models[front], points[front][seam], split_models[back], points[back][seam])
    states = experiment.run(stitches, progress)
    seconds = time.perf_counter() - start
    provenance = experiment.provenance(list(split_models.values()), seconds, {"layers": point_names})
    _, first_tensors = states[keys[names[0], 0, names[0]]]
    tokens = first_tensors["tokens"]

    def table(value_of: Callable[[Mapping[str, Any]], Any]) -> Tensor:
        """Tensor with a value for each stitch (`front back seam ...`). `value_of` maps the state of a stitch to its value."""
        values = {key: value_of({**note, **tensors}) for key, (note, tensors) in states.items()}
        rows = []
        for front in names:
            rows.append([[values[keys[front, seam, back]] for seam in seams] for back in names])
        return torch.tensor(rows, dtype=torch.float64)

    def mean(name: str) -> Tensor:
        return table(lambda state: float(state[name].sum() / tokens.sum()))

    def intervals(better: str, worse: str) -> tuple[Tensor, ...]:
        return table(lambda state: over_texts(state[worse] - state[better], tokens, 0.95)).unbind(-1)

    penalty, low, high = intervals("back_loss", "loss")
    accuracy_penalty, accuracy_low, accuracy_high = intervals("correct", "back_correct")
    return StitchGrid(
        values=penalty,
        low=low,
        high=high,
        loss=mean("loss"),
        back_loss=mean("back_loss"),
        accuracy=mean("correct"),
        accuracy_penalty=accuracy_penalty,
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        stopped=table(lambda state: state["stopped"] + 1.0),
        text_tokens=tokens,
        text_penalty=table(lambda state: (state["loss"] - state["back_loss"]).tolist()),
        fronts=names,
        groups=groups_of_models,
        seams=tuple(_seam_label({name: point_names[name][seam] for name in names}) for seam in seams),
        kind=experiment.kind.name,
        fit=experiment.fit,
        unit=experiment.unit,
        layers=(),
        provenance=provenance,
    )


def _seam_label(layers: Mapping[str, str]) -> str:
    """Label of a stitch point: the name of the layer, or the layer of each model if they differ."""
    distinct = set(layers.values())
    if len(distinct) == 1:
        return distinct.pop()
    return ", ".join(f"{name} {layer}" for name, layer in layers.items())
