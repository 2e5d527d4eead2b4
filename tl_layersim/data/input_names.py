"""Names of the inputs of models, and the stack of an encoder-decoder that they belong to.

Of an encoder-decoder, one stack is measured. Inputs of the other stack have positions of their own: each row holds them without
padding, and batches pad them on the right with their own mask.
"""

from __future__ import annotations

from ..core.errors import LayersimError
from .row import ModelInputs

TOKEN_IDS = "input_ids"
EMBEDDINGS = "inputs_embeds"
PIXELS = "pixel_values"
MASK = "attention_mask"
DECODER_IDS = "decoder_input_ids"
# Number of axes that one row has in inputs of these names.
ROW_AXES = {PIXELS: 3, "input_features": 2, "input_values": 1, EMBEDDINGS: 2}
# Inputs that may have a single row for all rows of a batch.
SHARED = ("position_ids", "token_type_ids")
# Names of columns of tokens, and further outputs of tokenizers.
TOKENS = ("input_ids", "tokens")
OF_TOKENS = ("token_type_ids", "position_ids")
# The mask of a stack, and its inputs with one value for each position.
ENCODER = ("attention_mask", "input_ids", "inputs_embeds")
DECODER = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds")


def reads_decoder(model: ModelInputs) -> bool:
    """Whether the model is an encoder-decoder whose decoder layers are measured."""
    return model.token_input == DECODER_IDS


def other_stack(model: ModelInputs) -> tuple[str, ...]:
    """Names of the mask and the inputs of the encoder or decoder that is not measured. The mask is first."""
    return ENCODER if reads_decoder(model) else DECODER


def decoder_alone(content: str, model: ModelInputs) -> LayersimError:
    """The error for data that lacks the inputs of the encoder or of the decoder."""
    return LayersimError(
        f"`data` holds {content}, but the decoder of {model.name} needs the inputs of both stacks, such as `input_ids` and "
        f"`decoder_input_ids`. To measure only the encoder, pass texts or token ids with `at='encoder.resid_post'`."
    )
