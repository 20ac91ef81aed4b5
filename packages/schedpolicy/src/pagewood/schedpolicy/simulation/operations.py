"""What happens to a simulated fleet besides requests: failures, drains, roles, and a changing number of replicas."""

from dataclasses import dataclass
from math import inf

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.routing.autoscaler import Autoscaler


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Replicas die, each after a random time with this mean, and others start in their place.

    Attributes:
        mean_s: Mean time from the start of a replica to its death, > 0.
        restart_s: Time until a new replica takes its place, >= 0; infinite if none does.
    """

    mean_s: float
    restart_s: float

    def __post_init__(self) -> None:
        _require_at_least("mean_s", self.mean_s, 0.0, strictly=True)
        _require_at_least("restart_s", self.restart_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The number of replicas follows the load.

    Attributes:
        autoscaler: Decides the number; of one run only.
        every_s: Time between two decisions, > 0.
        startup_s: Time until a new replica takes requests, >= 0.
    """

    autoscaler: Autoscaler
    every_s: float = 5.0
    startup_s: float = 60.0

    def __post_init__(self) -> None:
        _require_at_least("every_s", self.every_s, 0.0, strictly=True)
        _require_at_least("startup_s", self.startup_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What happens to a fleet.

    Attributes:
        num_places: Requests that a replica may have at once, >= 1.
        num_prefill: Replicas that only compute prompts, for the others, which then only decode; they are the first.
        transfer_s: Time to copy the pages of a prompt to the replica that decodes, >= 0.
        transfer_token_s: The same for each token that is copied, >= 0.
        failures: None for no failures.
        restart_every_s: Time between two drains, > 0: each replica in turn gives its requests to others, and starts
            again. None for no restarts.
        restart_s: Time that such a restart takes, >= 0.
        scaling: None for a fixed number of replicas. Not together with `num_prefill`.
        seed: Seed of the times of failures, and of the router's choice between equal replicas.
    """

    num_places: int = 256
    num_prefill: int = 0
    transfer_s: float = 0.005
    transfer_token_s: float = 5e-6
    failures: Failures | None = None
    restart_every_s: float | None = None
    restart_s: float = 30.0
    scaling: Scaling | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("num_places", self.num_places, least=1)
        require_count("num_prefill", self.num_prefill, least=0)
        require_count("seed", self.seed)
        for name in ("transfer_s", "transfer_token_s", "restart_s"):
            _require_at_least(name, getattr(self, name), 0.0)
        if self.restart_every_s is not None:
            _require_at_least("restart_every_s", self.restart_every_s, 0.0, strictly=True)
        if self.scaling is not None and self.num_prefill:
            raise ValueError(f"num_prefill must be 0 with scaling, got {self.num_prefill}")
        if self.scaling is not None and self.restart_every_s is not None:
            raise ValueError(f"restart_every_s must be None with scaling, got {self.restart_every_s}")


def _require_at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    require_real(name, value)
    if not (value > least if strictly else value >= least) or (value == inf and name != "restart_s"):
        raise ValueError(f"{name} must be {'>' if strictly else '>='} {least:g} and finite, got {value}")
