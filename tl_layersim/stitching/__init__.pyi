"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .adapters import Adapter as Adapter
from .fitting import StitchTraining as StitchTraining
from .stitch_results import Interval as Interval
from .stitch_results import StitchGrid as StitchGrid
from .stitch_results import StitchResult as StitchResult
from .stitched_model import StitchedModel as StitchedModel
