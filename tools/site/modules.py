"""The pages of the Python interface: which modules stand on which page. mkdocstrings fills them from the docstrings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

PAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "radixcache": ("", "events", "drawing", "trace", "testing"),
        "kvpool": ("", "storage", "latent_storage", "memory", "tiers", "tiers.testing", "testing"),
        "schedpolicy": ("", "simulation", "testing"),
        "engine": ("", "api", "assemble", "assembly.policies", "beam_search", "program", "grammar", "text", "quantise",
                   "decision_log.why", "decision_log.replay"),
        "engine-parts": ("core.loop", "core.messages.batch", "core.messages.result", "core.queue.waiting",
                         "core.steps.plan", "core.memory.kv", "testing", "links",
                         "runner.cpu.drafts.drafting"),
    }
)  # fmt: skip
"""Pages of the reference, with their modules below `pagewood.PACKAGE`; "" is the package itself."""


def module_pages() -> Iterator[tuple[str, str]]:
    """Yield the address of each page, and its Markdown, which names modules only."""
    for page, modules in PAGES.items():
        package = page.partition("-")[0]
        lines = [f"# pagewood.{package}" + (": interfaces of its parts" if "-" in page else ""), ""]
        for module in modules:
            lines += [f"::: pagewood.{package}{'.' * bool(module)}{module}", ""]
        yield f"reference/{page}.md", "\n".join(lines)
