"""Architectures: what lies where in a model, from tables, and the hook points at which activations are read.

Other packages may import from these modules:

- `layouts`: the tables, one row for each kind of block, head and tower; a new architecture is a row here.
- `blocks`: the blocks of a model by these tables, their stacks, and the basis of their residual stream.
- `heads`: the final norm and the head of a model, the logit lens made of them, and the heads of a DETR.
- `unembed`: `Unembed`, from a residual to logits; `LayerHeads`, heads of layers below the last, as kernels carry them.
- `points`: `HookPoint`, `Site`, `SiteMap`, `StreamSum`, the families of sites and their names.
- `resolve`: what `at=` names: hook points, one stack of several, blocks by number; refusals of sites that ranks share.
- `hugging_face`, `transformer_lens`: the sites of models of each library.
- `towers`: the towers of a CLIP, and the position of a text.
- `feature_maps`: feature maps of convolutions as positions.
"""

import lazy_loader

# Loaded at their first use, as `__init__.pyi` lists them: kernels import torch alone.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
