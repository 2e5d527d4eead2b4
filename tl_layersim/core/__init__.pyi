"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .arguments import typed as typed
from .errors import LayersimError as LayersimError
from .errors import LayersimWarning as LayersimWarning
from .errors import warn as warn
from .intervals import quantiles_from_histogram as quantiles_from_histogram
from .result_declarations import Provenance as Provenance
from .result_declarations import ValuesAlias as ValuesAlias
from .result_declarations import axes as axes
from .result_declarations import result_class as result_class
from .result_declarations import without_nan as without_nan
from .results import LayerCurve as LayerCurve
from .results import LayerMatrix as LayerMatrix
from .results import Report as Report
from .results import Result as Result
from .sums import Sums as Sums
