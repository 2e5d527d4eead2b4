"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .adapters import AlignedAdapters as AlignedAdapters
from .adapters import train_adapters as train_adapters
from .finetune import AlignedResult as AlignedResult
from .hugging_face_trainer import AlignedTrainer as AlignedTrainer
from .layer_evaluation import Continuations as Continuations
from .layer_evaluation import GenerationQuality as GenerationQuality
from .layer_evaluation import LayerChange as LayerChange
from .layer_evaluation import MetricChange as MetricChange
from .residual_stream import aligned_loss as aligned_loss
