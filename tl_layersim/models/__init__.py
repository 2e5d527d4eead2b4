"""Models: sources that run a model on batches, views of its activations, its blocks, and its logit lens.

Other packages may import from these modules:

- `source`, `view`, `model_info`: `Source` runs a model, `View` holds the activations of one batch, `Model` describes a model.
- `site_map`: `StreamSum`, an identity of the residual stream.
- `hooked`, `nnsight`, `reading`: sources of models in this process, and the forward passes that they record.
- `site_buffer`, `firing_order`, `trace_steps`: the activations that a forward pass has at its sites, the order in which it
    reaches them, and the reading of them in a trace.
- `stream_sums_check`: the check that sublayer outputs add up to the residual stream.
- `hugging_face_check`: the check that a TransformerLens model has the residual stream of its Hugging Face model.
- `open`, `transformer_lens`: tests of the type of a model.
- `hooks`: forward hooks, early ends of forward passes, evaluation mode.
- `layout`, `model_inputs`: the classes of models with a head, and the arguments of a forward pass.
- `unembed`, `chunked_logit_lens`, `cross_entropy`: the logit lens, its statistics at every layer, cross-entropy.
- `head_layout`, `detection_heads`: the final norm and the head of a model; the class head and the box head of a DETR.
- `exit_heads`, `layer_heads`: heads of layers below the last, as users pass them and as kernels carry them.
- `weights_hash`: `hash_weights`, a checksum of a model's weights; `model_changes`: hooks of others and edits of nnsight.
- `head_layouts`: the table of heads, and why some models have none.
- `activation_checks`: refusals of activations that are not finite, and of a lens that is not the model's.
- `targets`: the token or class that a model should predict at each position.
- `hook_point`, `hook_points`, `site_table`: places at which activations are read, their resolution from `at=`, and their table.
- `layer_numbers`: blocks by number or name.
- `named_model`: Hugging Face models by their folder or hub name, for the command line.
- `firing_order`: the order in which a forward pass reaches hook points.
- `module_sites`, `block_lists`: the blocks of models with one stack or two.
- `towers`, `tower_source`, `zero_shot_classifier`: the towers of a CLIP, the source of each, and a classifier with classes made
    of texts.
- `out_of_memory`: forward passes that run out of memory and are split, refusals of what cannot be split, and memory given back.
- `block_call`: repeated calls of a block.
- `pools`: samples drawn from pools of rows; `activation_sizes`: sums of the sizes of activations.
- `vector_norms`: directions and norms of vectors of any size.
- `untrained_twins`: models of the same architecture with fresh weights.
- `quantised`: refusals of quantised weights.
- `without_weights`: models on the meta device, whose tensors have shapes and no values.
- `split_model`: models that are split at a layer.
"""

from .block_call import BlockCall
from .exit_heads import ExitHeads
from .hook_point import HookPoint, Part
from .hook_points import find_points, stream_sums
from .hooks import eval_mode
from .model_info import Model, ServerOffer, layer_names
from .module_sites import find_stacks
from .site_buffer import SiteBuffer
from .site_map import StreamSum
from .site_table import sites
from .source import PartialSums, Source
from .unembed import Head, Unembed
from .untrained_twins import untrained
from .view import Kernel, View, reduce

__all__ = [
    "BlockCall",
    "ExitHeads",
    "Head",
    "HookPoint",
    "Kernel",
    "Model",
    "Part",
    "PartialSums",
    "ServerOffer",
    "SiteBuffer",
    "Source",
    "StreamSum",
    "Unembed",
    "View",
    "eval_mode",
    "find_points",
    "find_stacks",
    "layer_names",
    "reduce",
    "sites",
    "stream_sums",
    "untrained",
]
