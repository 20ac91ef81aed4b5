"""`pagewood serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.server.cli.merge import merged_model
from pagewood.server.cli.options.address import add_address_options
from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.images import add_image_options
from pagewood.server.cli.options.logs import add_failure_options, add_log_options
from pagewood.server.cli.options.memory import add_memory_options
from pagewood.server.cli.options.model import add_model_options, add_pool_options
from pagewood.server.cli.options.page import FORMATTER, Commands, Page, settings_of
from pagewood.server.cli.options.sampling import add_sampling_options
from pagewood.server.cli.options.work import add_work_options
from pagewood.server.config import JOB_DISTANCE, ServeConfig
from pagewood.server.keys.file import ADMIN_VARIABLE, KEY_VARIABLE, keys_of_environment
from pagewood.server.models.pool_config import DEFAULTS as NO_POOL
from pagewood.server.models.pool_config import PoolConfig, models_in
from pagewood.server.observe import logs

IN_SHORT_HELP = frozenset({
    "path", "--model", "--served-model-name", "--adapter", "--max-adapters",
    "--models-dir", "--models-max", "--device", "--threads",
    "--weights", "--dtype", "--kv-cache-dtype",
    "--host", "--port", "--api-key-file", "--insecure-no-keys", "--tls-cert", "--tls-key", "--allowed-host",
    "--allowed-origin", "--trusted-proxy", "--root-path",
    "--max-length", "--max-total-tokens", "--mem-fraction", "--disable-radix-cache", "--host-cache-gb",
    "--disk-cache-path", "--disk-cache-gb",
    "--max-running-requests", "--max-queued-requests", "--max-queue-seconds", "--max-ttft-seconds", "--quota",
    "--batch-store", "--tokenizer-workers", "--schedule-policy", "--preemption-threshold", "--chunked-prefill-size",
    "--target-step-ms",
    "--speculative", "--speculative-model", "--grammar-backend", "--logits-processor",
    "--log-level", "--log-format", "--no-metrics", "--metrics-compat", "--otlp-endpoint", "--decision-log",
    "--kv-events", "--drain-seconds", "--watchdog-seconds",
})  # fmt: skip
"""First names of the options that `--help` shows; `--help-all` shows all."""

_DESCRIPTION = "Serve a model over HTTP, with the APIs of OpenAI, Anthropic and Ollama."
_USAGE = "%(prog)s [MODEL] [OPTION ...]"


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        usage=_USAGE,
        epilog="SIGINT (Ctrl-C) and SIGTERM stop the server with all its processes, after running requests had time "
        "to end; SIGUSR1 writes the stacks of a process. Exit codes: 0 stopped by a signal, 1 the server could not "
        "start or go on, 2 wrong arguments, 3 a process kept dying, 130 and 143 ended at once by a second signal.",
        add_help=False,
        formatter_class=FORMATTER,
    )
    add_options(Page(parser=parser))
    pages = parser.add_argument_group("help")
    pages.add_argument(
        *("-h", "--help"),
        action="store_const",
        dest="run",
        const=partial(_print_short_help, parser.prog),
        help="show the options that most servers need",
    )
    pages.add_argument(
        "--help-all", action="store_const", dest="run", const=partial(_print_help, parser), help="show all options"
    )
    parser.set_defaults(run=run)


def add_options(page: Page) -> None:
    """Add all options of the server that the page takes."""
    add_model_options(page)
    add_pool_options(page)
    add_image_options(page)
    add_address_options(page)
    add_memory_options(page)
    add_work_options(page)
    add_sampling_options(page)
    add_log_options(page)
    add_failure_options(page)


def _print_help(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    del options
    parser.print_help()
    return 0


def _print_short_help(prog: str, options: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTION,
        usage=_USAGE,
        epilog="--help-all shows the other options, and more about these.",
        add_help=False,
        formatter_class=FORMATTER,
    )
    add_options(Page(parser=parser, only=IN_SHORT_HELP, is_brief=True))
    return _print_help(parser, options)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # not ours; huggingface_hub reads it, also in other processes
    paths = _paths(options)
    names = [*(options.served_model_name or ()), *map(model_name, paths[len(options.served_model_name or ()) :])]
    engines = [engine_config(options, model=path) for path in paths]
    if options.merge_adapter is not None:
        if len(engines) > 1:
            raise ValueError(f"merge_adapter must not be given with several models, got {str(options.merge_adapter)!r}")
        engines = [replace(engines[0], model=merged_model(paths[0], options.merge_adapter))]
    if engines[0].node_rank:
        logs.configure(options.log_level, f"node-{engines[0].node_rank}", form=options.log_format)
        from pagewood.server.node import run_node  # imported here because node 0 does not need it

        return run_node(engines[0])
    configs = configs_of(options, engines, names)
    pool = _pool(options, tuple(configs))
    logs.configure(configs[0].log_level, "http", form=configs[0].log_format)
    from pagewood.server.serve import run_server  # imported here because the other commands do not need it

    return run_server(configs[0], pool)


def configs_of(options: argparse.Namespace, engines: Sequence[EngineConfig], names: Sequence[str]) -> list[ServeConfig]:
    """Return the configuration of the server for each model. It takes the keys out of the environment.

    Raises:
        ValueError: an option is wrong, or contradicts another one.
    """
    api_keys = tuple(keys_of_environment(os.environ))
    for variable in (KEY_VARIABLE, ADMIN_VARIABLE):
        os.environ.pop(variable, None)  # not ours; other processes need no key
    settings = settings_of(options, ServeConfig)
    settings |= {
        "max_queued": options.max_queued_requests,
        "metrics_compat": tuple(dict.fromkeys(options.metrics_compat)),
        "api_keys": api_keys,
    }
    configs: list[ServeConfig] = []
    for engine, name in zip(engines, names, strict=True):
        if options.batch_store is not None and engine.preemption_threshold is None:
            engine = replace(engine, preemption_threshold=JOB_DISTANCE)
        settings |= {"engine": engine, "served_model_name": name, "model_folder": model_folder(engine.model)}
        configs.append(ServeConfig(**settings))
    return configs


def _paths(options: argparse.Namespace) -> list[str | None]:
    """Return the paths of all models; None: the embedded one.

    Raises:
        ValueError: options contradict each other, or the folder of models has none.
    """
    given: list[str] = options.model or []
    if options.path is not None and given:
        raise ValueError(f"MODEL and --model must not be given together, got {options.path!r} and {given[0]!r}")
    found: list[str | None] = [*given] if options.path is None else [options.path]
    if options.models_dir is not None:
        found += map(str, models_in(options.models_dir))
    found = found or [None]
    names: list[str] = options.served_model_name or []
    if (len(names) > 1 and len(names) != len(found)) or (len(found) > 1 and len(names) == 1):
        raise ValueError(f"served_model_name must be given for each of the {len(found)} models, got {len(names)}")
    return found


def _pool(options: argparse.Namespace, configs: tuple[ServeConfig, ...]) -> PoolConfig | None:
    """Return what is said of several models; None: there is one.

    Raises:
        ValueError: something is said of several models, and there is one; or as `PoolConfig`.
    """
    settings = settings_of(options, PoolConfig)
    if len(configs) > 1 or options.models_dir is not None:
        return PoolConfig(models=configs, **settings)
    given = [name for name, value in settings.items() if value != NO_POOL[name]]
    if given:
        raise ValueError(f"{given[0]} needs several models (--model A --model B, or --models-dir)")
    return None
