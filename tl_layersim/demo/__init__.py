"""A small trained model and some text, so that everything can be tried without a network."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from ..core.typed import typed


@typed
def demo_model(aligned: bool = False) -> Any:
    """The model that ships with the package: a Llama of 8 blocks and d_model 128, with its tokenizer as `.tokenizer`.

    Trained from scratch on simple stories and a little other text; `demo/README.md` says how, and how good it is.

    Args:
        aligned: the fine-tune of it by aligned training, whose shallow layers are of use.

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
    """Short stories and notes that were written for this package, one text each.

    >>> len(demo_text()) > 20
    True
    """
    text = (files(__package__) / "text.txt").read_text(encoding="utf-8")
    return [piece.strip() for piece in text.split("\n\n") if piece.strip()]
