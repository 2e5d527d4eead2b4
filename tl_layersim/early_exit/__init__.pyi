"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .arguments import frequent_tokens as frequent_tokens
from .exit_plan import ExitCosts as ExitCosts
from .exit_plan import ExitPlan as ExitPlan
from .exit_results import ExitLogits as ExitLogits
from .exit_results import Generated as Generated
