"""A small trained language model and texts that ship with the package; users and other packages may import both functions."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from ..core.argument_checks import typed


@typed
def demo_model(aligned: bool = False) -> Any:
    """Load the demo model: a Llama of 8 blocks and d_model 128, with its tokenizer as `.tokenizer`.

    It was trained from scratch on simple stories and a little other text; `demo/README.md` has the data and its perplexity.

    Args:
        aligned: load the model after aligned training, whose shallow layers predict tokens well too.

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
    """Texts for the demo model: short stories and notes that were written for this package.

    Examples:
        >>> len(demo_text()) > 20
        True
    """
    text = (files(__package__) / "text.txt").read_text(encoding="utf-8")
    return [piece.strip() for piece in text.split("\n\n") if piece.strip()]
