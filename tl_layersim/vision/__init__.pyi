"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .detection import detection_by_layer as detection_by_layer
from .tower_similarity import tower_similarity as tower_similarity
from .zero_shot import zero_shot as zero_shot
from .zero_shot import zero_shot_classifier as zero_shot_classifier
