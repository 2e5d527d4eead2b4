"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .early_exit import ExitLogits as ExitLogits
from .early_exit import frequent_tokens as frequent_tokens
from .exit_costs import ExitCosts as ExitCosts
from .exit_costs import ExitPlan as ExitPlan
from .generation import Generated as Generated
