# pyright: basic, reportMissingImports=false
# (Ray is a dependency of the extra only)
"""The application of Ray Serve: one deployment holds the requests, the other one computes.

Annotations are evaluated here, because Ray Serve reads the type of the arguments from that of `app`.
"""

from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from pagewood.server.ray.arguments import Arguments, config_of
from pagewood.server.ray.ingress import Ingress
from pagewood.server.ray.router import ChosenReplicaRouter
from pagewood.server.ray.scaling import WorkPolicy
from pagewood.server.ray.served_engine import ServedEngine

MOST_CALLS = 1_000_000
"""Calls that a replica may have: the router of requests limits them, and the server refuses what is too much."""
HEALTH_PERIOD_S = 2.0


def app(arguments: Arguments) -> serve.Application:
    """Return the application, or raise ValueError if an argument or an option is wrong, or has no meaning here."""
    config = config_of(arguments)
    both: dict[str, Any] = {
        "max_ongoing_requests": MOST_CALLS,
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD_S,
    }
    engines = serve.deployment(
        ServedEngine,
        name="Engine",
        ray_actor_options={
            "num_cpus": arguments.num_cpus,
            "num_gpus": arguments.num_gpus,
            "resources": arguments.resources,
        },
        request_router_config=RequestRouterConfig(request_router_class=ChosenReplicaRouter),
        **_number(arguments),
        **both,
    ).bind(replace(config, api_keys=(), api_key_file=None, insecure_no_keys=False))
    return serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=arguments.num_ingress,
        ray_actor_options={"num_cpus": 0.1},
        **both,
    ).bind(config, engines, most=arguments.most_replicas, is_alone=arguments.num_ingress == 1)


def _number(arguments: Arguments) -> dict[str, Any]:
    """Return how many engines there are."""
    if arguments.min_replicas is None or arguments.max_replicas is None:
        return {"num_replicas": arguments.most_replicas}
    targets = {"target_load": arguments.target_load, "target_kv_use": arguments.target_kv_use}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            initial_replicas=max(1, arguments.min_replicas),
            max_replicas=arguments.max_replicas,
            upscale_delay_s=arguments.upscale_delay_s,
            downscale_delay_s=arguments.downscale_delay_s,
            look_back_period_s=arguments.look_back_s,
            policy=AutoscalingPolicy(policy_function=WorkPolicy, policy_kwargs=targets),
        )
    }
