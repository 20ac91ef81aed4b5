"""Long runs of the conformance machine."""

import random
from collections.abc import Callable, Collection
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from pagewood.radixcache.namespaces import ANY
from pagewood.radixcache.testing.machine import NAMESPACES, SECONDS, prefix_of


def soak(
    machine: type[RuleBasedStateMachine],
    *,
    page_size: int,
    num_steps: int,
    seed: int,
    check_every: int,
    max_leases: int = 20,
    rules: Collection[str] | None = None,
) -> None:
    """Run a conformance machine for many random steps, without the record that hypothesis keeps of each step.

    Args:
        machine: from `conformance_machine`.
        page_size: page size of the machine.
        num_steps: number of rules to apply.
        seed: seed of the random choices.
        check_every: number of steps between two checks of the invariants.
        max_leases: further leases are released.
        rules: names of the rules to choose from; None: all but `clear`.
    """
    rng = random.Random(seed)
    state: Any = machine()
    draw: dict[str, Callable[[], object]] = {
        "namespace": lambda: rng.choice(NAMESPACES),
        "beneficiary": lambda: rng.choice((ANY, *NAMESPACES)),
        "prefix": lambda: prefix_of(rng.choices((0, 1), k=rng.randrange(7)), page_size),
        "more": lambda: prefix_of(rng.choices((0, 1), k=rng.randrange(7)), page_size),
        "tail": lambda: rng.randrange(page_size),
        "pick": lambda: rng.randrange(100),
        "is_brief": lambda: rng.random() < 0.5,
        "relock": lambda: rng.random() < 0.5,
        "keeps_longer": lambda: rng.random() < 0.5,
        "num_pages": lambda: rng.randrange(9),
        "num_snapshots": lambda: rng.randrange(4),
        "needs_snapshot": lambda: rng.random() < 0.5,
        "takes_snapshot": lambda: rng.random() < 0.5,
        "priority": lambda: rng.randrange(-1, 3),
        "seconds": lambda: rng.choice(SECONDS),
        "floor": lambda: rng.randrange(5),
        "room": lambda: rng.randrange(6),
    }
    chosen_from = [rule for rule in state.rules if _is_chosen(rule.function.__name__, rules)]
    for step in range(1, num_steps + 1):
        possible = [rule for rule in chosen_from if all(holds(state) for holds in rule.preconditions)]
        chosen = rng.choice(possible)
        chosen.function(state, **{name: draw[name]() for name in chosen.arguments})
        del state.stale[:-8], state.peeked[:-50]
        while len(state.handles) > max_leases:
            state.release_lease(rng.randrange(len(state.handles)))
        state.note_changes()
        if step % check_every == 0:
            for look in (state.counts_agree, state.watches_agree, state.invariants_hold):
                look()
    state.teardown()


def _is_chosen(name: str, rules: Collection[str] | None) -> bool:
    return name != "clear" if rules is None else name in rules
