"""Models: sources that run a model on batches, views of its activations, its blocks, and its logit lens.

Other packages may import from these modules:

- `source`, `view`, `model_info`: `Source` runs a model, `View` holds the activations of one batch, `Model` describes a model.
- `hooked`, `nnsight`, `site_reader`, `stream_test`: sources of models in this process, and what they read of a forward pass.
- `site_buffer`, `firing_order`, `trace_steps`: the activations that a forward pass has at its sites, the order in which it
    reaches them, and the reading of them in a trace.
- `stream_sums_check`: the check that sublayer outputs add up to the residual stream.
- `hugging_face_check`: the check that a TransformerLens model has the residual stream of its Hugging Face model.
- `open`: opening of a model, tests of its type, the table of its sites.
- `hooks`: forward hooks, early ends of forward passes, evaluation mode.
- `model_inputs`: the arguments of a forward pass, and the errors of one that fails.
- `chunked_logit_lens`, `cross_entropy`: statistics of the logit lens at every layer, cross-entropy.
- `exit_heads`: heads of layers below the last, as users pass them.
- `weights_hash`: `hash_weights`, a checksum of a model's weights; `model_changes`: hooks of others and edits of nnsight.
- `activation_checks`: refusals of activations that are not finite, and of a lens that is not the model's.
- `targets`: the token or class that a model should predict at each position.
- `named_model`: Hugging Face models by their folder or hub name, for the command line.
- `firing_order`: the order in which a forward pass reaches hook points.
- `tower_source`, `zero_shot_classifier`: the source of each tower of a CLIP, and a classifier with classes made of texts.
- `out_of_memory`: forward passes that run out of memory and are split, refusals of what cannot be split, and memory given back.
- `block_call`: repeated calls of a block.
- `pools`: samples drawn from pools of rows; `activation_sizes`: sums of the sizes of activations.
- `vector_norms`: directions and norms of vectors of any size.
- `untrained_twins`: models of the same architecture with fresh weights.
- `quantised`: refusals of quantised weights.
- `without_weights`: models on the meta device, whose tensors have shapes and no values.
- `split_model`: models that are split at a layer.
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
