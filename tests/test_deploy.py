"""The custom resources in deploy/ hold to extracts of their schemas, and Pagewood accepts what they say to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.page import Page
from pagewood.server.cli.serve import add_options, configs_of
from pagewood.server.ray.arguments import Arguments, config_of

DEPLOY = Path(__file__).parents[1] / "deploy"
Json = dict[str, Any]

TEXT: Json = {"type": "string", "minLength": 1}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}
PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Json = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def record(needed: str = "", /, **fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": needed.split(), "additionalProperties": False}


def some(schema: Json, *, most: int = 64) -> Json:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": most}


TEMPLATE = record("spec", metadata={"type": "object"}, spec={"type": "object", "required": ["containers"]})
WORKERS = record(
    "groupName maxReplicas minReplicas template",
    groupName=TEXT,
    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "numOfHosts"), COUNT),
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
SCHEMAS: dict[tuple[str, str], Json] = {
    ("ray.io/v1", "RayService"): record(
        "rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterConfig=record(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=FLAG,
            headGroupSpec=record("template", rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs=some(WORKERS),
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): record(
        "selector targetPorts",
        selector=record("matchLabels", matchLabels=TEXTS),
        targetPorts=some(record("number", number=PORT), most=8),
        endpointPickerRef=record(
            "name port",
            **dict.fromkeys(("name", "kind", "group"), TEXT),
            port=record("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}


def check(resource: Json) -> None:
    spec = SCHEMAS[resource["apiVersion"], resource["kind"]]
    metadata = record("name", name=NAME, labels=TEXTS)
    jsonschema.validate(resource, record("metadata spec", apiVersion=TEXT, kind=TEXT, metadata=metadata, spec=spec))


def resources(name: str) -> dict[str, Json]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text())}


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_manifests_hold_to_their_schemas(name: str) -> None:
    found = [one for one in resources(name).values() if one["kind"] != "Deployment"]
    assert found
    for resource in found:
        check(resource)


def test_a_wrong_manifest_is_found() -> None:
    pool = resources("inference-pool.yaml")["InferencePool"]
    pool["spec"]["targetPorts"] = []
    with pytest.raises(jsonschema.ValidationError):
        check(pool)


def test_the_application_of_the_ray_service_accepts_its_arguments() -> None:
    service = resources("ray-service.yaml")["RayService"]["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert application["import_path"] == "pagewood.server.ray:app"
    arguments = Arguments.model_validate(application["args"])
    config = config_of(arguments.model_copy(update={"model": None}))  # the folder is not here
    assert config.has_keys
    workers = service["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (arguments.min_replicas, arguments.max_replicas)
    pod = workers["template"]["spec"]
    assert arguments.num_cpus < int(pod["containers"][0]["resources"]["requests"]["cpu"])  # an ingress is there, too
    assert pod["terminationGracePeriodSeconds"] >= config.drain_s


def test_the_pods_of_the_pool_accept_their_options_and_are_in_it() -> None:
    found = resources("inference-pool.yaml")
    template, pool = found["Deployment"]["spec"]["template"], found["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert container["command"][:2] == ["pagewood", "serve"]
    parser = argparse.ArgumentParser()
    add_options(Page(parser=parser))
    options = parser.parse_args(container["args"])
    (config,) = configs_of(options, [engine_config(options, model=None)], options.served_model_name)
    assert config.kv_events_topic == f"kv@$(POD_NAME)@{config.served_model_name}"
    assert template["spec"]["terminationGracePeriodSeconds"] > config.drain_s
    assert {config.port, *(one["number"] for one in pool["targetPorts"])} == {8000}
