"""Scheduling policies for LLM engines: which request runs next, how many tokens it computes, which one is preempted."""

from pagewood.schedpolicy.admission.deadlines import Feasibility, Load, TooLate
from pagewood.schedpolicy.admission.deferral import InBatchDeferral
from pagewood.schedpolicy.admission.quotas import Quota, Quotas, Usage
from pagewood.schedpolicy.admission.skip_ahead import SkipAhead
from pagewood.schedpolicy.admission.slots import SlotShares
from pagewood.schedpolicy.drafting.acceptance import Decoding
from pagewood.schedpolicy.drafting.control import DraftControl, StepsReport
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost
from pagewood.schedpolicy.memory.reserve import NewTokenRatio, StepReserve
from pagewood.schedpolicy.orders.adaptive import AdaptiveOrder, AdaptiveRule, Switch
from pagewood.schedpolicy.orders.ageing import Ageing
from pagewood.schedpolicy.orders.depth_first import DepthFirstWeight
from pagewood.schedpolicy.orders.fallback import FallbackAbove
from pagewood.schedpolicy.orders.multilevel import MultilevelOrder
from pagewood.schedpolicy.orders.names import MATCH_ORDERS, ORDERS, PLAIN_ORDERS, order_named
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.orders.ranked import (
    ByLongestMatch,
    ByRemaining,
    ByShortest,
    RankedOrder,
    by_arrival,
    by_deadline,
    by_longest_output,
    by_priority,
    by_priority_low_first,
)
from pagewood.schedpolicy.orders.shares import ShareOrder, fair_share, weighted_round_robin
from pagewood.schedpolicy.orders.shuffled import Draws, ShuffledOrder
from pagewood.schedpolicy.orders.tagged import TagAffinity
from pagewood.schedpolicy.preemption.hysteresis import PreemptionGuard
from pagewood.schedpolicy.preemption.lending import HasOwnPriority, Lending
from pagewood.schedpolicy.preemption.victim import (
    by_least_output,
    by_lowest_priority,
    choose_victim,
    choose_victims,
    deserving,
    worth_preempting,
)
from pagewood.schedpolicy.requests import (
    FullWaiting,
    HasClass,
    HasDeadline,
    HasPrefix,
    HasPrompt,
    HasTag,
    HasTenant,
    LiveMatch,
    Running,
    Waiting,
)
from pagewood.schedpolicy.routing.autoscaler import Autoscaler, FleetLoad
from pagewood.schedpolicy.routing.load import Report
from pagewood.schedpolicy.routing.placement import Departure, Placement, RoutedRequest, Ticket
from pagewood.schedpolicy.routing.prefix_index import BlockHash, PrefixIndex
from pagewood.schedpolicy.routing.replicas import ReplicaName, Role
from pagewood.schedpolicy.routing.router import Router, default_order
from pagewood.schedpolicy.steps.budget import (
    MIXINGS,
    Budget,
    StepBudget,
    budget_named,
    decode_first,
    prefill_first,
    stall_free,
)
from pagewood.schedpolicy.steps.chunking import DynamicChunk
from pagewood.schedpolicy.steps.latency import StepModel, StepSample
from pagewood.schedpolicy.steps.urgency import Urgent, WeightByUrgency, weight_by_priority
from pagewood.schedpolicy.verdict import Outcome, Verdict

__version__ = "0.1.0"

__all__ = [
    "MATCH_ORDERS", "MIXINGS", "ORDERS", "PLAIN_ORDERS", "AdaptiveOrder", "AdaptiveRule", "Ageing", "Autoscaler",
    "BlockHash", "Budget", "ByLongestMatch", "ByRemaining", "ByShortest", "Decoding", "Departure", "DepthFirstWeight",
    "DraftControl", "DraftCost", "Draws", "DynamicChunk", "FallbackAbove", "Feasibility", "FleetLoad", "FullWaiting",
    "HasClass", "HasDeadline", "HasOwnPriority", "HasPrefix", "HasPrompt", "HasTag", "HasTenant", "InBatchDeferral",
    "Lending", "LiveMatch", "Load", "MultilevelOrder", "NewTokenRatio", "Order", "Outcome", "Placement",
    "PreemptionGuard", "PrefixIndex", "Quota", "Quotas", "RankedOrder", "ReplicaName", "Report", "Role",
    "RoutedRequest", "Router", "Running", "ShareOrder", "ShuffledOrder", "SkipAhead", "SlotShares", "StepBudget",
    "StepCost", "StepModel", "StepReserve", "StepSample", "StepsReport", "Switch", "TagAffinity", "Ticket", "TooLate",
    "Urgent", "Usage", "Verdict", "Waiting", "WeightByUrgency", "__version__", "budget_named", "by_arrival",
    "by_deadline", "by_least_output", "by_longest_output", "by_lowest_priority", "by_priority",
    "by_priority_low_first", "choose_victim", "choose_victims", "decode_first", "default_order", "deserving",
    "fair_share", "order_named", "prefill_first", "stall_free", "weight_by_priority", "weighted_round_robin",
    "worth_preempting",
]  # fmt: skip
