"""The dashboard and the alerts: valid queries, of series and labels that a server shows."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.jobs.worker import JobCounts
from pagewood.server.messages import wire
from pagewood.server.metrics.endpoint import text_of
from pagewood.server.metrics.models import model_families
from pagewood.server.protocols.common.models import Loads, ModelState

promql_parser = pytest.importorskip("promql_parser")
yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.anyio

FOLDER = Path(__file__).parents[1] / "monitoring"
GIVEN_BY_PROMETHEUS = {"instance", "job"}
SPECULATION = wire.Speculation(
    num_drafted=3, num_accepted=1, drafted_by_position=(2, 1), accepted_by_position=(1, 0), draft_s=0.5, verify_s=1.5,
    num_rebuilt=0, num_postponed=0, num_short=0, reason="",
)  # fmt: skip


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "dashboard.json").read_text())["panels"]


def queries() -> list[str]:
    """Return the queries of the alerts and of the dashboard, with values for Grafana's variables."""
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    for name, value in (("$__rate_interval", "1m"), ("$instance", ".*"), ("$model", ".*")):
        found = [query.replace(name, value) for query in found]
    return found


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each series of a query, and the labels by which it is selected or grouped."""
    kind = type(node).__name__
    if kind == "VectorSelector":
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
        return
    if kind == "MatrixSelector":
        yield from selectors(node.vector_selector)
        return
    grouped: set[str] = set()
    if kind == "AggregateExpr" and node.modifier is not None:
        grouped = set(node.modifier.labels)
    below = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param")] + list(getattr(node, "args", ()))
    for one in below:
        if one is not None and type(one).__module__ != "builtins":
            for name, labels in selectors(one):
                yield name, labels | grouped


@pytest.fixture
async def shown(server: MemoryServer, model_folder: Path, tokenizer: Tokenizer) -> dict[str, set[str]]:
    """Series of a server that has done everything -> their labels."""
    server.metrics.incidents.restarts["engine"] += 1
    await server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    await server.post("/v1/completions", {"prompt": "x" * 500})
    await server.until_idle()
    status = server.engine_status
    assert status.measurement is not None
    found = msgspec.structs.replace(
        status.measurement, preempted={"0": 1}, tiers={"num_demoted": 1}, queue=type(status.measurement.queue)(
            waiting={"0": 1}, running={"0": 1}
        ),
    )  # fmt: skip
    status.measurement, status.speculation = found, SPECULATION
    server.metrics.jobs = lambda: JobCounts(batches={"completed": 1}, num_answered=1, num_failed=1)
    [only] = server.frontend.models.listed()
    state = ModelState(
        value="loaded", detail="", waiting=0, running=0, pinned=False, draining=False, expires_at=None, memory_bytes=1,
        failed=False, reason=None,
    )  # fmt: skip
    several = [replace(only, state=state, loads=Loads(unloaded=Counter(idle=1)))]
    text = (await server.client.get("/metrics")).text + text_of(model_families(several).found).decode()
    async with MemoryServer(model_folder, tokenizer, limit=8, num_replicas=2) as fleet:
        text += (await fleet.client.get("/metrics")).text
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


async def test_every_query_is_of_series_and_labels_that_a_server_shows(shown: dict[str, set[str]]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    found = [one for query in queries() for one in selectors(promql_parser.parse(query))]
    assert len(found) > 60
    for name, labels in found:
        if name not in recorded:
            assert name in shown
            assert labels <= shown[name] | GIVEN_BY_PROMETHEUS, name


async def test_nearly_every_series_is_on_the_dashboard(shown: dict[str, set[str]]) -> None:
    """A series that no panel shows is either a fact or in an alert."""
    own = {name for name in shown if name.startswith("pagewood_")}
    families = {name.removesuffix("_bucket") for name in own if name.endswith("_bucket")}
    series = families | {
        name for name in own if not any(name.startswith(f"{family}_") for family in families)
    }  # counts and sums come with their histogram
    used = {name.removesuffix("_bucket") for query in queries() for name, _ in selectors(promql_parser.parse(query))}
    assert series - used <= {
        "pagewood_cache_config_info", "pagewood_engine_state", "pagewood_engine_seconds_since_pulse",
        "pagewood_engine_seconds_in_step", "pagewood_num_requests_draining", "pagewood_requests_ending",
        "pagewood_num_requests_running_by_priority", "pagewood_prefix_cache_requests_total",
        "pagewood_start_time_seconds", "pagewood_process_threads", "pagewood_process_open_files",
        "pagewood_request_inference_time_seconds", "pagewood_request_time_per_output_token_seconds",
        "pagewood_request_params_n", "pagewood_request_params_max_tokens", "pagewood_weights_info", "pagewood_asleep",
    }  # fmt: skip


def test_the_dashboard_is_whole() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in found)
    for panel in found:
        assert panel["type"] == "row" or panel["targets"]


def test_every_alert_says_what_it_means() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
@pytest.mark.parametrize("words", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
async def test_promtool_accepts_the_metrics(server: MemoryServer) -> None:
    await server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
    text = (await server.client.get("/metrics")).text
    ours = "\n".join(line for line in text.splitlines() if "pagewood_" in line) + "\n"
    done = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, check=False)
    assert "error" not in done.stderr.lower(), done.stderr
