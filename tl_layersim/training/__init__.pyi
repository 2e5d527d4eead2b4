"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .adapters import AlignedAdapters as AlignedAdapters
from .aligned_loss import aligned_loss as aligned_loss
from .finetune_results import AlignedResult as AlignedResult
from .hugging_face_trainer import AlignedTrainer as AlignedTrainer
from .layer_evaluation import Continuations as Continuations
from .layer_evaluation import GenerationQuality as GenerationQuality
from .layer_evaluation import LayerChange as LayerChange
from .layer_evaluation import MetricChange as MetricChange
from .train_adapters import train_adapters as train_adapters
