"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .block_call import BlockCall as BlockCall
from .exit_heads import ExitHeads as ExitHeads
from .hooks import eval_mode as eval_mode
from .model_info import Model as Model
from .model_info import ServerOffer as ServerOffer
from .open import sites as sites
from .site_buffer import SiteBuffer as SiteBuffer
from .source import CanCountPositions as CanCountPositions
from .source import CanReadSites as CanReadSites
from .source import CanReplay as CanReplay
from .source import CanUnembed as CanUnembed
from .source import HasModule as HasModule
from .source import OnServer as OnServer
from .source import PartialSums as PartialSums
from .source import Source as Source
from .untrained_twins import untrained as untrained
from .view import Kernel as Kernel
from .view import View as View
from .view import reduce as reduce
