"""Layers that read the KV of others, where layers with a window keep that of all positions."""

from pathlib import Path

from asked_twice import answered, small
from families.case import build
from families.registry import DIVIDED


def test_they_do_so_with_a_host_cache_and_a_decision_log(tmp_path: Path) -> None:
    build(DIVIDED["gemma4-small"], tmp_path)
    expected = answered(small(tmp_path, num_threads=1))
    assert answered(small(tmp_path, num_threads=1, host_cache_gb=0.01, decision_log=str(tmp_path / "log"))) == expected
