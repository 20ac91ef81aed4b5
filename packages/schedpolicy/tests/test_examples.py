# pyright: basic
# The examples are loaded by path, as a reader would run them.
import asyncio
import importlib.util
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from pagewood.schedpolicy import ORDERS, decode_first

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"schedpolicy_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("policy", [name for name in ORDERS if name not in ("dfs-weight", "edf", "wrr", "tag")])
def test_the_toy_engine_finishes_every_job_and_never_overcommits(policy: str):
    toy = load("toy_engine")
    rng = Random(1)
    engine = toy.ToyEngine(
        policy=policy, num_slots=300, budget=decode_first(max_running=12, max_prefill_tokens=64, max_prefills=4)
    )
    for arrival in range(60):
        engine.submit(
            toy.Job(
                arrival=arrival,
                arrived_s=engine.now_s,
                num_prompt=rng.choice((1, 20, 100)),
                max_new_tokens=rng.choice((1, 10, 60)),
                tenant=rng.choice("abc"),
                priority=rng.choice((0, 0, 1)),
            )
        )
        engine.step()
        assert engine.num_free >= 0
    for _ in range(3000):
        if len(engine.done) == 60:
            break
        engine.step()
        assert engine.num_free >= 0
    assert sorted(job.arrival for job in engine.done) == list(range(60))
    assert all(job.num_generated == job.max_new_tokens for job in engine.done)


def test_the_toy_engine_refuses_a_job_that_can_never_run():
    toy = load("toy_engine")
    engine = toy.ToyEngine(policy="fcfs", num_slots=10, budget=decode_first(max_running=1, max_prefill_tokens=8))
    with pytest.raises(ValueError, match="a job must fit into 10 slots, got 11"):
        engine.submit(toy.Job(arrival=0, arrived_s=0.0, num_prompt=1, max_new_tokens=10))


def run_jobs(queue: Any, tenants: str) -> list[str]:
    """Run one job for each letter, all submitted at once; return whose began when."""
    begun: list[str] = []

    async def main() -> None:
        async def work(tenant: str) -> str:
            begun.append(tenant)
            await asyncio.sleep(0)
            return tenant

        answers = await asyncio.gather(*(queue.run(t, lambda t=t: work(t)) for t in tenants))
        assert answers == list(tenants)

    asyncio.run(main())
    return begun


def test_the_job_queue_shares_its_places_between_tenants():
    begun = run_jobs(load("job_queue").JobQueue(num_places=1), "aaaaaaaabbbb")
    assert sorted(begun[1:9]) == list("aaaabbbb")


def test_the_job_queue_keeps_a_place_for_others():
    queue = load("job_queue").JobQueue(policy="fcfs", num_places=4, per_tenant=3)
    assert "b" in run_jobs(queue, "aaaaaaaaaab")[:4]


def test_the_job_queue_passes_on_errors_and_forgets_cancelled_jobs():
    queue = load("job_queue").JobQueue(num_places=1)

    async def fail() -> None:
        raise RuntimeError("broken")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="broken"):
            await queue.run("a", fail)
        gate = asyncio.Event()
        first = asyncio.create_task(queue.run("a", gate.wait))
        second = asyncio.create_task(queue.run("a", gate.wait))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        assert await first
        assert await queue.run("b", gate.wait)

    asyncio.run(main())


def test_the_job_queue_behind_fastapi():
    pytest.importorskip("fastapi", reason="FastAPI is not installed: the example's web application is not tried")
    testclient = pytest.importorskip("fastapi.testclient")
    job_queue = load("job_queue")
    with testclient.TestClient(job_queue.make_app(job_queue.JobQueue())) as client:
        answer = client.post("/jobs", params={"tenant": "a", "seconds": 0.0})
    assert answer.json() == {"tenant": "a", "state": "done"}
