"""Options for the length of requests and for KV memory."""

from __future__ import annotations

from pagewood.server.cli.options.page import Group, Page


def add_memory_options(page: Page) -> None:
    """Add the groups."""
    memory = page.group("length and memory")
    memory.setting(
        "--max-length",
        metavar="TOKENS",
        help="longest prompt plus answer (default: what fits)",
        more="2 or more. The default is what the model and the KV memory allow.",
    )
    memory.setting(
        "--max-total-tokens",
        metavar="TOKENS",
        help="KV memory of requests and cached prefixes (default: automatic)",
        more="The default on a CPU is 2,048 for each request that may run, at most a quarter of the free memory; on "
        "CUDA it is what --mem-fraction leaves.",
    )
    memory.setting(
        "--state-places",
        metavar="N",
        help="states of recurrent layers, as in Qwen3-Next (default: automatic)",
        more="One for each request that may run; the others are what the prefix cache keeps at the ends of prompts and "
        "answers. The default is five for each request, in at most an eighth of the free memory.",
    )
    memory.setting(
        "--mem-fraction",
        metavar="SHARE",
        help="share of the GPU's free memory to use (default: %(default)s)",
        more="Above 0, at most 1: weights, activations, graphs and KV together. Lower it if other programs use the "
        "GPU.",
    )
    memory.setting(
        "--page-size",
        metavar="TOKENS",
        help="tokens per page, the unit of KV memory (default: %(default)s)",
        more="1 or more. Prefixes are reused in whole pages: a smaller page reuses a few tokens more, and costs more "
        "bookkeeping.",
    )
    _add_cache(page)


def _add_cache(page: Page) -> None:
    cache = page.group("prefix cache, and memory for KV that it evicts (GB are 1e9 bytes)")
    cache.add(
        "--disable-radix-cache",
        action="store_false",
        dest="prefix_cache",
        help="do not reuse the KV of common prefixes",
    )
    cache.setting(
        "--radix-eviction-policy",
        dest="eviction_policy",
        metavar="NAME",
        help="what is evicted first: lru or queue-lru (default: %(default)s)",
        more="lru: what was used least recently. queue-lru: the same, but what a waiting request can use comes last, "
        "which raises hits where many requests wait.",
    )
    cache.setting(
        "--retained-share",
        metavar="SHARE",
        help="most KV memory for texts marked as likely to return (default: %(default)s)",
        more="From 0 to 1. Clients mark them by `retain` of /generate, `cache_control` of Messages or "
        "`prompt_cache_retention` of Responses.",
    )
    cache.setting(
        "--max-retain-seconds",
        dest="max_retain_s",
        metavar="S",
        help="longest time for which such a text is kept (default: %(default)s)",
    )
    cache.setting(
        "--cache-history-tokens",
        metavar="TOKENS",
        help="evicted tokens to remember for explanations (default: %(default)s)",
        more="0 or more. With them, `explain` of /generate can say that a prompt had been cached and what evicted it. "
        "Each takes 4 bytes of main memory, and each run of them a little more. Set 1048576 (some MB) to find out why "
        "prompts are computed again; --decision-log does so by itself.",
    )
    _add_tiers(cache)


def _add_tiers(tiers: Group) -> None:
    tiers.setting(
        "--host-cache-gb",
        metavar="GB",
        help="main memory for evicted KV (default: none)",
        more="A conversation that resumes is then copied back, and not computed again.",
    )
    tiers.add(
        "--disk-cache-path",
        metavar="FOLDER",
        help="folder for it that outlives the server; needs --host-cache-gb",
        more="Each engine needs a folder of its own (default: none).",
    )
    tiers.setting("--disk-cache-gb", metavar="GB", help="space to use in that folder")
    tiers.add(
        "--remote-cache",
        metavar="PLACE",
        help="where servers share KV; needs --host-cache-gb (default: none)",
        more="A folder that all can write, shm:NAME (memory that the servers of one user on this machine share), "
        "redis://HOST:PORT of a Redis or Valkey server, mooncake://HOST:PORT of a mooncake_master, "
        "nixl+redis://HOST:PORT (pages in each server's memory, which the others read over NIXL), or lmcache+URL, "
        "such as lmcache+lm://HOST:PORT. A Redis server with a password gets ?user=NAME&password_file=FILE.",
    )
    tiers.setting(
        "--remote-cache-gb",
        metavar="GB",
        help="size of that folder or memory, or memory given to other servers",
        more="Not for redis:// and lmcache+URL, whose service decides it.",
    )
    tiers.setting(
        "--role",
        metavar="NAME",
        help="both, prefill or decode; needs --remote-cache (default: %(default)s)",
        more="prefill: compute prompts only, end each answer with its first token, and send it when the prompt is in "
        "the shared cache. decode: go on with such prompts; what is missing is computed.",
    )
    tiers.setting(
        "--cache-write-policy",
        metavar="WHEN",
        help="when KV is copied to main memory (default: %(default)s)",
        more="write_through: when it is computed; write_through_selective: when it is used a second time; write_back: "
        "when it is evicted.",
    )
