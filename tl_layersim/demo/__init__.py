"""Small trained models for text and images that ship with the package, and data for them."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any, Literal

from ..core.arguments import typed


@typed
def demo_model(aligned: bool = False) -> Any:
    """Load the demo model: a Llama of 8 blocks and d_model 128, with its tokenizer as `.tokenizer`.

    It was trained from scratch on simple stories and a little other text; `demo/README.md` has the data and its perplexity.

    Args:
        aligned: load the model after aligned training, whose early layers predict tokens well too.

    Examples:
        >>> demo_model().config.num_hidden_layers
        8
    """
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    with as_file(files(__package__)) as folder:
        weights = folder / "aligned" if aligned else folder
        model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
        model.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model.config._name_or_path = "tl_layersim demo, aligned" if aligned else "tl_layersim demo"
    return model.eval()


@typed
def demo_text() -> list[str]:
    """Texts for the demo model: short stories and notes, written for this package.

    Examples:
        >>> len(demo_text()) > 20
        True
    """
    text = (files(__package__) / "text.txt").read_text(encoding="utf-8")
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if paragraph]


@typed
def demo_vision_model(aligned: bool = False) -> Any:
    """Load the vision demo: a ViT of 6 blocks and d_model 48 that reads scikit-learn's digits, 8 x 8 pixels.

    `demo/vision/README.md` has its training and its accuracy.

    Args:
        aligned: load the model with aligned training, from the same initial weights and with the same budget.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.demo import demo_images, demo_vision_model
        >>> images = demo_images()
        >>> lens = lsim.analyze(demo_vision_model(aligned=True), images, lsim.LogitLens(labels="data"))["logit_lens"]
        >>> bool(lens.accuracy[-1] > 0.9)
        True
    """
    import torch
    from transformers import ViTForImageClassification

    with as_file(files(__package__) / "vision") as folder:
        weights = folder / "aligned" if aligned else folder
        model = ViTForImageClassification.from_pretrained(
            weights, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    model.config._name_or_path = "tl_layersim vision demo, aligned" if aligned else "tl_layersim vision demo"
    return model.eval()


@typed
def demo_images(split: Literal["train", "test"] = "test") -> dict[str, Any]:
    """Images of handwritten digits from scikit-learn, with their classes, for the vision demo.

    Args:
        split: "test" for the 500 images that the model has not seen, "train" for the 1,297 others.

    Returns:
        `pixel_values`, `image 1 8 8` from -1 (background) to 1, and `labels`, `image`.

    Source:
        `sklearn.datasets.load_digits`: the test set of Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits
        (CC BY 4.0).

    Examples:
        >>> {name: tuple(column.shape) for name, column in demo_images().items()}
        {'pixel_values': (500, 1, 8, 8), 'labels': (500,)}
    """
    import torch
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    rows = order[:500] if split == "test" else order[500:]
    # Pixels of scikit-learn's digits are from 0 to 16.
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 8 - 1
    return {"pixel_values": images[rows], "labels": torch.from_numpy(labels).long()[rows]}
