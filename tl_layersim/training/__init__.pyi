"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .adapter_training import AlignedAdapters as AlignedAdapters
from .adapter_training import train_adapters as train_adapters
from .finetune import AlignedResult as AlignedResult
from .hugging_face_trainer import AlignedTrainer as AlignedTrainer
from .layer_comparison import Continuations as Continuations
from .layer_comparison import GenerationQuality as GenerationQuality
from .layer_comparison import LayerChange as LayerChange
from .residual_stream import aligned_loss as aligned_loss
