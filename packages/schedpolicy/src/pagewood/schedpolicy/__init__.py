"""Who runs next, how much, and who yields: scheduling policies for LLM engines, as pure functions and small objects."""

from pagewood.schedpolicy.budget import Budget, StepBudget
from pagewood.schedpolicy.order import FirstComeFirstServed, LongestPrefixMatch, Order, order_named
from pagewood.schedpolicy.requests import Running, Waiting
from pagewood.schedpolicy.reserve import NewTokenRatio
from pagewood.schedpolicy.skip_ahead import SkipAhead
from pagewood.schedpolicy.victim import choose_victim, worth_preempting

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "FirstComeFirstServed",
    "LongestPrefixMatch",
    "NewTokenRatio",
    "Order",
    "Running",
    "SkipAhead",
    "StepBudget",
    "Waiting",
    "__version__",
    "choose_victim",
    "order_named",
    "worth_preempting",
]
