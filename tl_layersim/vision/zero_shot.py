"""`zero_shot`: zero-shot image classification by every layer of a CLIP's vision tower."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..analyzers.logit_lens import LogitLens, LogitLensResult
from ..architectures.blocks import PRE_NORM, layer_names, refuse_paths
from ..architectures.layouts import Tower
from ..architectures.unembed import Head, rounding, tensor_of
from ..core.arguments import FilePath, typed
from ..core.errors import LayersimError, as_argument
from ..core.results import Report
from ..core.wording import brief
from ..data.batches import Batches
from ..data.data import Data
from ..engine.analyze_and_compare import analyze
from ..engine.run_arguments import with_tokenizer
from ..sources.hooked_module import HookedSource
from ..sources.hooks import eval_mode
from ..sources.model_description import processor_of
from ..sources.open_local import OpenedModel
from ..sources.tower import TowerSource, open_towers, text_position, unit

# Names of the modules that a zero-shot classifier has beside those of the model.
NORMALISE = "normalise"
CLASSIFIER = "classifier"


class Normalise(torch.nn.Module):
    """Divides vectors by their norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide vectors (`... width`) by their norm."""
        return torch.nn.functional.normalize(x, dim=-1, eps=0.0)


class ZeroShotClassifier(torch.nn.Module):
    """Image classifier: a CLIP's vision tower and projection, and a linear layer with one row per class.

    Args:
        clip: the model; its modules are shared, not copied.
        tower: vision tower of the model.
        vectors: `class width`, vectors of the classes, of norm 1.
        class_names: names of the classes.
    """

    main_input_name = "pixel_values"

    def __init__(self, clip: torch.nn.Module, tower: Tower, vectors: Tensor, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.config: Any = clip.config.vision_config  # type: ignore[union-attr]  # a configuration
        self.clip_name = getattr(clip.config, "_name_or_path", "") or type(clip).__name__
        self.processor: Any = processor_of(clip)
        self.class_names = class_names
        for path in (tower.path, *tower.head.modules):
            self.add_module(path, clip.get_submodule(path))
        self.add_module(NORMALISE, Normalise())
        scale: Any = clip.logit_scale
        weight = scale.detach().exp() * vectors.to(scale.detach())
        self.classifier = torch.nn.Linear(weight.shape[1], len(weight), bias=False, device=weight.device, dtype=weight.dtype)
        self.classifier.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._tower = tower
        self.training = clip.training

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (`batch class`): cosines between images and classes, times the model's scale.

        Args:
            pixel_values: `batch channel height width`.
        """
        x = self.get_submodule(self._tower.path)(pixel_values=pixel_values).pooler_output
        for path in (*self._tower.head.modules, NORMALISE, CLASSIFIER):
            x = self.get_submodule(path)(x)
        return tensor_of(x)

    def open_source(self, layers: list[str] | None, unembed: list[str] | None) -> ZeroShotSource:
        """A `ZeroShotSource`, through which `analyze` and `attach` run this model."""
        refuse_paths(layers, unembed, "a zero-shot classifier")
        path = f"{self._tower.path}.{self._tower.blocks}"
        count = len(self.get_submodule(path))  # type: ignore[arg-type]  # a list of modules
        return ZeroShotSource(self, [f"{path}.{number}" for number in range(count)])

    @property
    def head(self) -> Head:
        """The modules between the last block and the logits."""
        projection = self._tower.head
        return replace(projection, parts=(*projection.parts, NORMALISE, CLASSIFIER))


class ZeroShotSource(HookedSource):
    """Runs a zero-shot classifier and reads its activations.

    It reads the vision tower's residual stream, with the classifier as the lens.
    """

    module: ZeroShotClassifier

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        super()._open(layers, unembed)
        self._model = replace(
            self._model,
            name=f"{self.module.clip_name}, zero-shot",
            source=f"{type(self.module).__name__} of {len(self.module.class_names)} classes",
            basis=PRE_NORM,
            layers=layer_names(len(self.paths)),
            stream="whole",
            head=self.module.head,
        )


TEMPLATE = "a photo of a {}."


@typed
def zero_shot(
    clip: Any,
    images: Any,
    class_names: Sequence[str] | None = None,
    *,
    template: str | Sequence[str] = TEMPLATE,
    prompts: Any = None,
    labels: Any = "data",
    top_k: int | tuple[int, ...] | list[int] | None = None,
    checkpoint: FilePath | None = None,
) -> LogitLensResult:
    """Zero-shot accuracy of every layer of a CLIP's vision tower, with a prompt for each class.

    Each layer's [CLS] goes through the vision tower's own final norm and projection; its logits are the cosines with the
    vectors of the classes, times the model's logit scale. At the last layer these are the model's own logits, which is checked
    on a generated image and on the first row of the images.

    Args:
        clip: `CLIPModel`, `MetaClip2Model`, `ChineseCLIPModel` or `AltCLIPModel` of transformers.
        images: a `Data`, or raw data: images or `pixel_values`, with a column `label` for `labels="data"`. Its `tokenizer` is
            the model's processor, or the tokenizer of the prompts if images come as pixels.
        class_names: names of the classes, in the order of their labels.
        template: the prompt for a class, with {} in place of its name; or several prompts.
        prompts: prompts for each class, one or a list, as texts or token ids; in place of `class_names` and `template`.
        labels: the true classes, as in `LogitLens`: "data" for the column `label` or `labels`, or a tensor with an entry for
            each row.
        top_k: the k of top-k accuracy. Default: 1, and 5 if there are more than five classes.
        checkpoint: a file for partial sums, see `analyze`.

    Returns:
        A `LogitLensResult` over the blocks of the vision tower: `accuracy`, `top_k_accuracy`, `agreement` with the last layer,
        `cross_entropy` and more, each `layer`.

    Raises:
        LayersimError: the model has no two towers or lacks a projection; a class has no prompt; a label is no class; or the
            data are no images.

    Source:
        Radford et al. 2021 (arXiv 2103.00020), section 3.1; by layer as in Jiang, Zhou and Zhu 2024, appendix D.

    Examples:
        Token ids in place of texts, for a model without a tokenizer.

        >>> import tl_layersim as lsim, torch
        >>> from tl_layersim.vision import zero_shot
        >>> from transformers import CLIPConfig, CLIPModel
        >>> tiny = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> text = tiny | dict(vocab_size=20, eos_token_id=19)
        >>> vision = tiny | dict(image_size=8, patch_size=4)
        >>> clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
        >>> prompts = [torch.tensor([1, 5, 19]), torch.tensor([1, 6, 7, 19])]
        >>> images, labels = torch.randn(8, 3, 8, 8), torch.tensor([0, 1] * 4)
        >>> found = zero_shot(clip, images, prompts=prompts, labels=labels)
        >>> found.accuracy.shape, float(found.agreement[-1])
        (torch.Size([2]), 1.0)
    """
    data = Data.of(images)
    model = zero_shot_classifier(clip, class_names, template=template, prompts=prompts, tokenizer=data.tokenizer)
    if top_k is None:
        top_k = (1, 5) if len(model.class_names) > 5 else (1,)
    lens = LogitLens(labels=labels, top_k=top_k)
    # A tokenizer alone reads the prompts only.
    image_data = replace(data, tokenizer=getattr(data.tokenizer, "image_processor", None))
    with as_argument("data", "images"):
        report = analyze(model, image_data, lens, checkpoint=checkpoint)
    assert isinstance(report, Report)
    result: LogitLensResult = report["logit_lens"]
    return result


@typed
def zero_shot_classifier(
    clip: Any,
    class_names: Sequence[str] | None = None,
    *,
    template: str | Sequence[str] = TEMPLATE,
    prompts: Any = None,
    tokenizer: Any = None,
) -> ZeroShotClassifier:
    """A classifier for `analyze`: a CLIP's vision tower with class vectors as its head.

    A class's vector is the mean of its prompts' vectors of norm 1, divided by its norm, as CLIP's own code computes it. The
    text tower runs once, here. The logits for one prompt are checked against the model's `logits_per_image`.

    Args:
        clip: see `zero_shot`.
        class_names: see `zero_shot`.
        template: see `zero_shot`.
        prompts: see `zero_shot`.
        tokenizer: the model's processor or tokenizer. Default: `clip.tokenizer`.

    Returns:
        A torch module from `pixel_values` to logits `batch class`, for `LogitLens`, `Saturation`, `ExitCurve` and others.

    Raises:
        LayersimError: as for `zero_shot`, on the model and its prompts.

    Examples:
        >>> import tl_layersim as lsim, torch
        >>> from tl_layersim.vision import zero_shot_classifier
        >>> from transformers import CLIPConfig, CLIPModel
        >>> tiny = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> text = tiny | dict(vocab_size=20, eos_token_id=19)
        >>> vision = tiny | dict(image_size=8, patch_size=4)
        >>> clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
        >>> prompts = [torch.tensor([1, 5, 19]), torch.tensor([1, 6, 7, 19])]
        >>> model = zero_shot_classifier(clip, prompts=prompts)
        >>> data = {"pixel_values": torch.randn(8, 3, 8, 8), "label": torch.tensor([0, 1] * 4)}
        >>> list(lsim.analyze(model, data, [lsim.Saturation(), lsim.ExitCurve(labels="data")]))
        ['saturation', 'exit_curve']
    """
    clip = OpenedModel.of(clip).model
    vision, text = open_towers(clip)
    names, prompts_by_class = _prompts_by_class(class_names, template, prompts)
    all_prompts = list(itertools.chain.from_iterable(prompts_by_class))
    tokens, vectors = _read_prompts(text, all_prompts, tokenizer)
    _verify_logits(clip, vision.tower, tokens[0], vectors[0])
    counts = [len(class_prompts) for class_prompts in prompts_by_class]
    means = torch.stack([class_vectors.mean(0) for class_vectors in torch.split(vectors, counts)])
    return ZeroShotClassifier(clip, vision.tower, unit(means), names)


def _prompts_by_class(
    class_names: Sequence[str] | None, template: str | Sequence[str], prompts: Any
) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Names of the classes, and the prompts for each class.

    Raises:
        LayersimError: neither names nor prompts are given, or both; a template has no place for a name; or a class has no
            prompt.
    """
    if (class_names is None) == (prompts is None):
        raise LayersimError("Exactly one of `class_names` and `prompts` must be given.")
    if class_names is not None:
        names = [class_names] if isinstance(class_names, str) else list(class_names)
        templates = [template] if isinstance(template, str) else list(template)
        if not templates or not all("{}" in prompt_template for prompt_template in templates):
            raise LayersimError(f"`template` is {brief(template)}; it must contain '{{}}', the place of the class name.")
        prompts_by_class = []
        for name in names:
            prompts_by_class.append([prompt_template.replace("{}", name) for prompt_template in templates])
    else:
        names = [str(name) for name in prompts] if isinstance(prompts, Mapping) else []
        prompts_of_classes = list(prompts.values()) if isinstance(prompts, Mapping) else prompts
        prompts_by_class = [_as_list(class_prompts) for class_prompts in prompts_of_classes]
        names = names or [str(number) for number in range(len(prompts_by_class))]
    empty = [number for number, class_prompts in enumerate(prompts_by_class) if not len(class_prompts)]
    if empty or len(prompts_by_class) < 2:
        missing = f", and no prompt for class {empty[0]}" if empty else ""
        raise LayersimError(
            f"`prompts` has {len(prompts_by_class)} classes{missing}; it must have two classes or more, with a prompt for each."
        )
    return tuple(names), prompts_by_class


def _as_list(prompts: Any) -> list[Any]:
    """Convert one or several prompts for a class to a list. A prompt is a text or a row of token ids."""
    if isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], int):
        prompts = torch.tensor(prompts)
    if isinstance(prompts, Tensor) and prompts.dim() == 2:
        return list(prompts)
    if isinstance(prompts, str | Mapping | Tensor):
        prompts = [prompts]
    prompt_list = []
    for prompt in prompts:
        if torch.is_tensor(prompt) and prompt.dim() == 1:
            # A row of ids alone has no padding.
            prompt = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        prompt_list.append(prompt)
    return prompt_list


def _read_prompts(text: TowerSource, prompts: list[Any], tokenizer: Any) -> tuple[list[Tensor], Tensor]:
    """Token ids of each prompt, and the prompt vectors scaled to norm 1 (`prompt width`, float64).

    Raises:
        LayersimError: a prompt is longer than the context of the text tower, or has no end-of-text token.
    """
    description = with_tokenizer(text.model, getattr(tokenizer, "tokenizer", tokenizer))
    data = Data(prompts, batch_size=64, positions=text_position(text.clip, text.tower))
    project = text.projected()
    tokens = []
    vectors_of_batches = []
    with torch.no_grad(), text.evaluating():
        for batch in Batches(data, description, argument="prompts"):
            tokens += [row[mask] for row, mask in zip(batch.tokens, batch.attention, strict=True)]
            vectors_of_batches.append(unit(project(text.collect(batch).activations[-1])))
    vectors = torch.cat(vectors_of_batches) if vectors_of_batches else torch.zeros(0, 0)
    if len(vectors) != len(prompts):
        raise LayersimError(
            f"`prompts` holds {len(prompts)} prompts, which give {len(vectors)} rows of tokens; each must be one row."
        )
    return tokens, vectors


def _verify_logits(clip: torch.nn.Module, tower: Tower, tokens: Tensor, vector: Tensor) -> None:
    """Check that the logit of one prompt and one random image equals the model's own `logits_per_image`.

    Raises:
        LayersimError: the logits differ by more than rounding.
    """
    classifier = ZeroShotClassifier(clip, tower, vector[None], ("",))
    size = classifier.config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(classifier.config, "num_channels", 3)
    image = torch.randn(1, channels, height, width, generator=torch.Generator().manual_seed(0))
    weight = next(clip.parameters())
    with torch.no_grad(), eval_mode(clip):
        output: Any = clip(input_ids=tokens[None].to(weight.device), pixel_values=image.to(weight))
        logit = float(classifier(image.to(weight))[0, 0])
        model_logit = float(output.logits_per_image[0, 0])
        scale = float(clip.logit_scale.double().exp())  # type: ignore[operator]  # a parameter
    if not abs(logit - model_logit) <= scale * rounding(weight.dtype):
        raise LayersimError(
            f"`clip` is a {type(clip).__name__} whose `logits_per_image` is {model_logit:.4g} for the first prompt and a "
            f"generated image; it must be the scaled cosine of image and text, {logit:.4g}."
        )
