"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .hooks import eval_mode as eval_mode
from .model_description import ModelDescription as ModelDescription
from .open_local import sites as sites
from .open_local import untrained as untrained
from .source import CanCountPositions as CanCountPositions
from .source import CanReadSites as CanReadSites
from .source import CanReplay as CanReplay
from .source import CanUnembed as CanUnembed
from .source import HasModule as HasModule
from .source import OnServer as OnServer
from .source import PartialSums as PartialSums
from .source import Source as Source
from .vectors import VectorSource as VectorSource
