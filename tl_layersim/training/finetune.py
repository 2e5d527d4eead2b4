"""`finetune_aligned`: fine-tune a model with the aligned loss."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import InitVar, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..core.arguments import FilePath, typed
from ..core.distributed import refuse_sharded
from ..core.errors import LayersimError, warn
from ..core.file_format import refuse_unwritable, refuse_unwritable_folder, replacing_model
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.resumable_file import Snapshot
from ..core.training_loop import Descent, Shuffle, run_steps, save_state
from ..core.wording import brief
from ..data.data import Data
from ..data.labels import NO_LABEL
from ..engine.run_arguments import with_tokenizer
from ..lens.exit_heads import ExitHeads
from ..sources.hooks import eval_mode, in_mode
from ..sources.identity import refuse_quantised
from ..sources.open_local import OpenedModel
from .losses import refuse_other_labels
from .objectives import OBJECTIVES, Objective
from .residual_stream import open_residual_stream, refuse_float16
from .settings import AlignedTraining
from .training_data import TrainingData, open_training_data, open_training_file, record_of_training, rows_in_words

# Steps whose mean loss the progress bar shows.
RECENT = 25


class FineTuning(Descent):
    """Optimiser steps of AdamW that fine-tune a model.

    Args:
        objective: the training objective.
        rows: training rows and held-out rows.
        settings: settings of the training.
        batch_size: number of rows in a forward pass.

    Attributes:
        evaluations: sums of `Objective.evaluate` over the held-out data, `3 layer`, by step.
    """

    moments = ("step", "exp_avg", "exp_avg_sq")
    settings: AlignedTraining

    def __init__(
        self, objective: Objective, rows: tuple[TrainingData, TrainingData], settings: AlignedTraining, batch_size: int
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        parameters = objective.trained_parameters()
        matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": float(settings.weight_decay)},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr)
        super().__init__(settings.objective, parameters, optimiser, settings)
        self.objective = objective
        self.batch_size = batch_size
        self.training_data, self.eval_data = rows
        self.device = objective.stream.device
        refuse_sharded(objective.module)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            device_placement=False,
            # Some steps give no gradient to heads of lower layers, or to blocks above the highest drawn layer.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.leads = self.accelerator.is_main_process
        self.ranks = self.accelerator.num_processes
        self.rank = self.accelerator.process_index
        self.wrapped = self.accelerator.prepare_model(objective) if self.ranks > 1 else objective
        self.evaluations: dict[int, Tensor] = {}
        self._shuffle = Shuffle(len(self.training_data), settings.seed)
        self._bar: Any = None

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        self._bar = bar
        with super().running(bar), in_mode(self.objective.module, training=True):
            yield

    def loss_and_gradients(self) -> float:
        accelerator = self.accelerator
        eval_every = self.settings.eval_every
        if self.step == 0 or (eval_every is not None and self.step % eval_every == 0):
            self._evaluate()
        batches = [self.training_data.take(rows).to(self.device) for rows in self._rows_of_step()]
        target_counts = torch.stack([batch.targets.ne(NO_LABEL).sum() for batch in batches])
        # Targets of all processes: every target of the step has the same weight.
        count = accelerator.reduce(target_counts.sum().float(), "sum")
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with (
                nullcontext() if last or self.wrapped is self.objective else accelerator.no_sync(self.wrapped),
                self._seeded(self.step * self.settings.accumulation + number),
                torch.enable_grad(),
            ):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.mixed_precision == "bf16"):
                    loss = self.wrapped(batch, self.step)
                # DistributedDataParallel averages gradients over processes.
                (loss * (self.ranks / count)).backward()
            total += loss.detach().double().cpu()
        # MPS has no float64.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        total_of_ranks = accelerator.reduce(total.to(self.device, dtype), "sum")
        return float(total_of_ranks / count)

    def finish(self) -> None:
        self._evaluate()

    def on_divergence(self, losses: Sequence[float]) -> None:
        self._refuse_not_finite(f"The loss is {losses[0]} at step {self.step + 1}.")

    def status(self) -> str:
        recent = self.curve[-RECENT:]
        sums = list(self.evaluations.values())[-1]
        by_layer = " ".join(f"{loss:.2f}" for loss in (sums[0] / sums[2]).tolist())
        return f"loss {sum(recent) / len(recent):.3f}, held out by layer {by_layer}"

    def snapshot(self) -> Snapshot | None:
        if not self.consistent:
            return None
        curve = {"curve": torch.tensor(self.curve, dtype=torch.float64)}
        evaluations = {f"look/{step}": sums for step, sums in self.evaluations.items()}
        return {}, self.tensors() | curve | evaluations

    def restore(self, _notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        self.load(tensors)
        evaluations = {}
        for key, sums in tensors.items():
            if key.startswith("look/"):
                step = int(key.split("/")[1])
                evaluations[step] = sums
        self.curve = tensors["curve"].tolist()
        # A file does not keep the order of its tensors.
        self.evaluations = dict(sorted(evaluations.items()))

    def _refuse_not_finite(self, symptom: str) -> None:
        self.consistent = False
        raise LayersimError(
            f"{symptom} The learning rate was {self.settings.rate(min(self.step, self.steps - 1)):.3g}, and the weights are in "
            f"{self.objective.stream.source.model.dtype}. Use a lower `lr`, a longer `warmup` or float32 weights."
        )

    def _rows_of_step(self) -> Iterator[list[int]]:
        """Row indices of the next step for this process, one list for each forward pass."""
        for part in range(self.settings.accumulation):
            forward_pass = self.step * self.settings.accumulation + part
            start = (forward_pass * self.ranks + self.rank) * self.batch_size
            yield [self._shuffle.row(place) for place in range(start, start + self.batch_size)]

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Context in which dropout has a seed of this forward pass, derived from `seed`."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + number * self.ranks + self.rank)
            yield

    def _evaluate(self) -> None:
        """Evaluate every layer on the held-out rows, at most once for each step."""
        if self.step in self.evaluations:
            return
        total = torch.zeros(3, self.objective.stream.n_layers, dtype=torch.float64)
        starts = range(self.rank * self.batch_size, len(self.eval_data), self.batch_size * self.ranks)
        with eval_mode(self.objective.module):
            for start in tqdm(starts, desc="held out", unit="batch", leave=False, disable=self._bar.disable or None):
                rows = range(start, min(start + self.batch_size, len(self.eval_data)))
                total += self.objective.evaluate(self.eval_data.take(rows).to(self.device))
        if self.ranks > 1:
            total = self.accelerator.reduce(total.to(self.device), "sum").cpu()
        mean = float(total[0].sum() / total[2].sum())
        if self.diverges([mean]):
            self._refuse_not_finite(f"The held-out loss is {mean} after {self.step} steps.")
        self.evaluations[self.step] = total


@result_class
class AlignedResult(Result):
    """Training loss of a fine-tune, and held-out loss and accuracy of each layer. Tensors are float64.

    `exit_heads` are the trained heads of the layers below the last, None if all layers use the model's head. Files of the
    result do not hold them.

    Attributes:
        values: `look layer`, the same as `held_out_loss`: cross-entropy of each layer in nats, under its trained head.
        accuracy: `look layer`, top-1 accuracy of each layer.
        loss: `step`, training loss at each optimiser step. In the alternating schedule, odd steps train the last layer alone.
        looks: number of optimiser steps before each evaluation.
        unit: unit of a target: "token", or "row" for a classifier.
    """

    file_kind: ClassVar[str] = "aligned_training"
    values_name = "held_out_loss"
    values: Float64[Tensor, "look layer"] = axes(
        "look",
        "layer",
        label="Held-out cross-entropy",
        unit="nats",
        title="Held-out loss of each layer",
        caption="Before, during and after training.",
        better="lower",
        within=(0, math.inf),
    )
    accuracy: Float64[Tensor, "look layer"] = axes(
        "look",
        "layer",
        label="Held-out accuracy",
        unit="fraction of targets",
        title="Held-out accuracy of each layer",
        caption="Before, during and after training.",
        better="higher",
        within=(0, 1),
    )
    loss: Float64[Tensor, " step"] = axes(
        "step",
        label="Training loss",
        unit="nats",
        title="Training loss",
        caption="At each step of the optimiser (Jiang, Zhou and Zhu 2024, equation 5); with the alternating schedule every "
        "other step trains the last layer alone.",
    )
    looks: tuple[int, ...]
    unit: str
    exit_heads: InitVar[ExitHeads | None] = None

    def __post_init__(self, exit_heads: ExitHeads | None) -> None:
        super().__post_init__()
        object.__setattr__(self, "_exit_heads", exit_heads)

    @property
    def heads(self) -> ExitHeads:
        """The trained heads of the layers below the last.

        Raises:
            LayersimError: the layers have no heads of their own, or the result was read from a file.
        """
        heads: ExitHeads | None = vars(self)["_exit_heads"]
        if heads is None:
            raise LayersimError(
                "This result has no heads: only objective='multi-head' trains heads, and the file of a result does not hold "
                "heads. ExitHeads.load(path) loads saved heads."
            )
        return heads

    @property
    def held_out_loss(self) -> Tensor:
        """Held-out cross-entropies in nats, one row for each evaluation (`look layer`). The same tensor as `values`."""
        return self.values

    def measured_on(self, field: str) -> str:
        return rows_in_words(self.provenance, field == "loss")

    def headline(self) -> dict[str, float]:
        numbers = {
            "held-out loss of the last layer before": float(self.values[0, -1]),
            "held-out loss of the last layer after": float(self.values[-1, -1]),
        }
        if self.values.shape[1] > 1:
            numbers["mean over the other layers before"] = float(self.values[0, :-1].mean())
            numbers["mean over the other layers after"] = float(self.values[-1, :-1].mean())
        return numbers


@typed
def finetune_aligned(
    model: Any,
    data: Any,
    training: AlignedTraining | None = None,
    *,
    eval_data: Any = None,
    labels: Any = None,
    checkpoint: FilePath | None = None,
) -> AlignedResult:
    """Fine-tune a model so that its own head predicts the targets from every layer.

    The model is trained in place; its mode (training or evaluation) is restored at the end. Processes started by `accelerate
    launch` share each step: n processes take n times as many rows in a step.

    Args:
        model: HookedTransformer, TransformerBridge or Hugging Face model: language models, token and row classifiers, vision
            classifiers; or the result of `open_model`.
        data: a `Data`, whose `batch_size` is the number of rows in a forward pass, or raw data, which is read with
            `batch_size=8`; for a vision model with `pixel_values` and `labels`. Positions that are not counted have no targets.
        training: the settings; default `AlignedTraining()`. Those of the paper are `AlignedTraining.paper_gpt2()` and
            `AlignedTraining.paper_bert(rows)`.
        eval_data: held-out data for the curves by layer; raw data is read like `data`. Default: the last tenth of the rows of
            `data`, which are then not trained on.
        labels: the targets: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for a
            classifier, and for rows without tokens that have labels, `"data"`.
        checkpoint: file with the state of the run. The same call on the untrained model resumes from it, with the same numbers.

    Returns:
        An `AlignedResult`: the training loss, and held-out loss and accuracy by layer before, during and after; with
        `objective="multi-head"` also the trained heads.

    Raises:
        LayersimError: the model cannot be trained in this process, or the arguments contradict one another.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3, appendices B.3 and C.2.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> training = lsim.AlignedTraining(steps=2, lr=1e-4)
        >>> result = lsim.finetune_aligned(model, lsim.Data(lsim.demo_text()[:8], batch_size=2, seq_len=32), training)
        >>> result.looks
        (0, 2)
    """
    training = training or AlignedTraining()
    data = Data.of(data, batch_size=8)
    opened = OpenedModel.of(model)
    model = opened.model
    refuse_unwritable(checkpoint, "checkpoint")
    if training.save_to is not None:
        folder = Path(training.save_to).resolve()
        refuse_unwritable_folder(folder if folder.exists() else folder.parent, "save_to")
        if hasattr(model, "peft_config"):
            raise LayersimError(
                f"`save_to` is {str(training.save_to)!r}, but `model` has adapters, which Hugging Face would write without "
                "the weights of the model. Merge them first, such as by merge_and_unload() of a PeftModel, or leave out "
                "`save_to`."
            )
        if not isinstance(model, PreTrainedModel):
            raise LayersimError(
                f"`model` is a {type(model).__name__}; `save_to` needs a Hugging Face model. Save model.state_dict() instead."
            )
    # In a model with adapters, only the adapters are trained.
    if isinstance(model, torch.nn.Module) and (training.lora is not None or not hasattr(model, "peft_config")):
        refuse_quantised(
            model,
            "`model` has quantised weights, which cannot be trained",
            do="peft.get_peft_model(model, peft.LoraConfig(...)) without lora=",
        )
    start = time.perf_counter()
    with ExitStack() as stack:
        # A notebook or service may run under torch.no_grad() or torch.inference_mode(), which compute no gradients.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        description = open_residual_stream(opened, either_stack=True).source.model
        refuse_float16(description)
        # Record the weights before the training.
        description = replace(description, weights=description.weights_hash)
        finish = stack.enter_context(_with_lora(model, training))
        if training.gradient_checkpointing:
            if not model.is_gradient_checkpointing:
                stack.callback(model.gradient_checkpointing_disable)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for parameter in _additions(model):
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        stream = open_residual_stream(opened, either_stack=True)
        description_with_tokenizer = with_tokenizer(description, data.tokenizer)
        count_positions = stream.source.count_positions
        rows = open_training_data(data, eval_data, labels, description_with_tokenizer, model, count_positions)
        training_rows, held_out_rows = rows
        if opened.verify is not None:
            stream.source.settle(training_rows.batch([0]))
        classes = stream.check(training_rows.take([0]).to(stream.device))
        refuse_other_labels(torch.tensor(training_rows.label_range), classes)
        # Without eval_data, both ranges are that of `data`.
        refuse_other_labels(torch.tensor(held_out_rows.label_range), classes, " of `eval_data`")
        objective = OBJECTIVES.named(training.objective)(stream, training)
        tuning = FineTuning(objective, rows, training, data.batch_size)
        parameter_count = sum(parameter.numel() for parameter in tuning.parameters.values())
        names_digest = hashlib.sha256(" ".join(sorted(tuning.parameters)).encode()).hexdigest()
        settings = training.options() | {"blocks": opened.layers, "unembed": opened.unembed, "learns": names_digest}
        file = open_training_file(checkpoint, description_with_tokenizer, rows, settings)
        file.resume(tuning.restore)
        run_steps(tuning, file)
        save_state(tuning, file)
        finish()
    heads = objective.exit_heads()
    if training.save_to is not None and tuning.accelerator.is_main_process:
        _save_trained_model(model, training.save_to, description_with_tokenizer.tokenizer, heads)
    tuning.accelerator.wait_for_everyone()
    options = {"parameters": parameter_count} | training.options()
    loss, hits, count = torch.stack(list(tuning.evaluations.values())).unbind(1)
    return AlignedResult(
        values=loss / count,
        accuracy=hits / count,
        loss=torch.tensor(tuning.curve, dtype=torch.float64),
        looks=tuple(tuning.evaluations),
        unit="token" if stream.reads == "every" else "row",
        layers=description.layers,
        provenance=record_of_training(description, rows, options, time.perf_counter() - start, training.seed),
        exit_heads=heads,
    )


@contextmanager
def _with_lora(model: Any, training: AlignedTraining) -> Iterator[Callable[[], Any]]:
    """Add LoRA adapters to the model. Yields a function that merges them; unmerged adapters are removed at the end."""
    if training.lora is None:
        yield lambda: None
        return
    from peft import PeftConfig, get_peft_model

    if hasattr(model, "peft_config"):
        raise LayersimError(
            "`lora` is given, but `model` has adapters already. Without `lora`, the adapters of the model are trained."
        )
    if not isinstance(training.lora, PeftConfig) or not isinstance(model, PreTrainedModel):
        raise LayersimError(
            f"`lora` is {brief(training.lora)} and `model` a {type(model).__name__}; they must be a peft.LoraConfig and a "
            "Hugging Face model."
        )
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        wrapped = get_peft_model(model, training.lora)
    try:
        yield wrapped.merge_and_unload
    finally:
        # This has no effect on merged adapters.
        wrapped.unload()
        model.__dict__.pop("peft_config", None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(requires_grad.get(name, parameter.requires_grad))


def _additions(model: Any) -> list[nn.Parameter]:
    """Parameters with value 0 that a TransformerBridge adds to the model, such as a bias of the head.

    They are frozen, so that a bridge learns what the model inside would learn.
    """
    inner = getattr(model, "original_model", None)
    if inner is None or not hasattr(inner, "save_pretrained"):
        return []
    with torch.device("meta"):
        plain_model = type(inner)(copy.deepcopy(inner.config))
    plain_names = {name for name, _ in plain_model.named_parameters(remove_duplicate=False)}
    # The bridge splits the joint matrix of query, key and value. The parts have new names, but are weights of the model.
    split_ids = set()
    for module in inner.modules():
        if hasattr(module, "split_qkv_matrix"):
            for projection in (module.q, module.k, module.v):
                split_ids |= {id(parameter) for parameter in projection.parameters()}
    # A tied weight has several names; one of them is enough to find it in the plain model.
    names_of_parameters: dict[nn.Parameter, set[str]] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        names_of_parameters.setdefault(parameter, set()).add(name.replace("._original_component", ""))
    additions = []
    for parameter, names in names_of_parameters.items():
        added = not names & plain_names and id(parameter) not in split_ids
        if added and parameter.requires_grad and not bool(parameter.detach().any()):
            additions.append(parameter)
    return additions


def _save_trained_model(model: Any, folder: FilePath, tokenizer: Any, heads: ExitHeads | None) -> None:
    """Write model, tokenizer and heads. A failed write only warns."""
    try:
        with replacing_model(folder) as temporary:
            model.save_pretrained(temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            if heads is not None:
                heads.save(temporary / "heads.safetensors")
    except OSError as error:
        heads_remedy = ", and result.heads.save(path)" if heads is not None else ""
        warn(
            f"The trained model could not be written to {folder}: {error}. The model is still in memory. Call "
            f"model.save_pretrained(folder){heads_remedy}, with another folder or after freeing space."
        )
