"""Layers that read the KV of others, where layers with a window keep that of all positions."""

from pathlib import Path
from typing import Any

from asked_twice import outputs
from families.case import build
from families.registry import DIVIDED
from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox


def test_they_do_so_with_a_host_cache_and_a_decision_log(tmp_path: Path) -> None:
    build(DIVIDED["gemma4-small"], tmp_path)
    found: list[list[list[int]]] = []
    options: dict[str, Any] = {}
    for _ in range(2):
        config = EngineConfig(
            model=str(tmp_path), num_threads=1, max_running=4, chunked_prefill_size=16, page_size=4,
            max_total_tokens=1024, **options,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        found.append(outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox))
        options = {"host_cache_gb": 0.01, "decision_log": str(tmp_path / "log")}
    assert found[1] == found[0]
