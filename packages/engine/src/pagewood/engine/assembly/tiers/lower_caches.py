"""Builds the host, disk and shared caches that the configuration asks for; part of the composition root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.assemble import radix_cache
from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.assembly.tiers.framed_pages import FramedPages, image_bytes
from pagewood.engine.assembly.tiers.late_store import LateStore
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.runner.ranks.messages import FromRank, StoreName
from pagewood.engine.runner.ranks.ranked_pages import (
    FollowedPages,
    HostPart,
    MovingGroup,
    PagesElsewhere,
    RankedPages,
    RankedStore,
    StoreElsewhere,
    places_of_images,
)
from pagewood.kvpool import LayerGroups
from pagewood.kvpool.integrations.lmcache import LMCacheStore
from pagewood.kvpool.integrations.mooncake import MooncakePlace, MooncakeStore
from pagewood.kvpool.integrations.nixl import NixlStore
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.tiers import (
    DiskTier,
    HostTier,
    PageStore,
    RedisPlace,
    RedisStore,
    SharedFolder,
    StatePages,
    TieredIndex,
    WritePolicy,
    shared_memory,
)
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import ChainedPages, DevicePages
from pagewood.kvpool.tiers.torch_pages import device_pages, pinned_memory, with_states

_log = logging.getLogger(__name__)

_GB = 1_000_000_000

Fingerprint = Callable[[], bytes | None]
"""Waits for at most 32 bytes that identify a model; None: its files have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """What pages consist of where layers have windows, beside the memory of their frames."""

    pages: PageGroups
    layers: LayerGroups
    beside: PageMemory | None = None
    """Memory by the ids of pages, such as a drafter's."""

    def image_bytes(self, frame_bytes: int) -> int:
        """Return the size of an image of a page, in bytes."""
        beside_bytes = 0 if self.beside is None else self.beside.layout.bytes_per_page
        return image_bytes(frame_bytes, self.pages.num_groups, beside_bytes)

    @property
    def layout(self) -> str:
        """All that the meaning of an image depends on beside the layout of a frame."""
        return f"{self.layers} {None if self.beside is None else self.beside.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePages:
    """The pages of all ranks of a host on devices, or of rank 0, if each has those of its own requests."""

    pages: DevicePages
    images: Bytes
    """`[num_images, image]`, memory of the host for them."""
    layout: str
    """All that the meaning of an image depends on."""
    states: StatePages | None = None
    """Pages and states of rank 0, which name the parts of states on all ranks; None: no layer is recurrent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lower:
    """What is below the KV memory of a rank, or of all."""

    host: HostTier
    stores: Mapping[StoreName, PageStore]


class TieredCaches:
    """Makes prefix caches over a host cache and, if configured, a disk cache and a cache that engines share.

    Invariant: only the latest cache is in use, and only it uses these tiers; where pages are divided among ranks by
    request, the latest one of each rank.

    Args:
        config: with a host cache.
        memory: the KV memory of the runner.
        page_size: tokens per page.
        fingerprint: identifies the model, to which KV on disk and in the shared cache belongs. If it is not known yet,
            these caches are opened later, and are empty until then.
        states: memory of the states of recurrent layers, by place; None: there are none.
        frames: of pages, if `memory` is that of frames; None: it is that of whole pages.
        whole: see `WholePages`; None: `memory` is that of all ranks of this host.
        part: what `memory` is of the pages of several hosts; None: there is one host.
        by_request: the pages of the other ranks of this host, with their states, if `memory` has those of the requests
            of rank 0 only. These ranks share tiers; each rank of another host has its own.
        num_spare: pages at the end of `memory`, and places at that of `states`, that are the runner's own.

    Raises:
        ValueError: a budget is less than a page, and a state if there are states, or more than the memory that can be
            pinned for a GPU, or the disk cannot be used.
    """

    __slots__ = ("_config", "_device", "_frames", "_last", "_lower", "_page_size", "_states")

    def __init__(
        self,
        config: EngineConfig,
        *,
        memory: PageMemory,
        page_size: int,
        fingerprint: bytes | Fingerprint,
        states: PageMemory | None = None,
        frames: Frames | None = None,
        whole: WholePages | None = None,
        part: HostPart | None = None,
        by_request: Sequence[DevicePages] = (),
        num_spare: int = 0,
    ) -> None:
        assert config.host_cache_gb is not None
        self._device = device_pages(memory) if whole is None else whole.pages
        num_parts = 0 if part is None else part.num_state_parts
        self._states: StatePages | None = None if whole is None else whole.states
        if whole is None and (states is not None or num_parts):
            self._device = self._states = with_states(self._device, states, num_parts=num_parts or None)
        page_bytes, layout = self._device.page_bytes, repr(memory.layout) if whole is None else whole.layout
        if frames is not None:
            page_bytes, layout = frames.image_bytes(page_bytes), f"{layout} {frames.layout}"
        self._frames = frames
        rank, host_page_bytes = 0, page_bytes
        if part is not None:
            rank = part.rank
            if part.group is None or not part.has_whole_pages:
                host_page_bytes = part.host_page_bytes
            if not part.has_whole_pages:
                layout = f"{layout} from rank {rank} on, of {config.num_ranks}"
        if num_parts:  # a state has as many parts on each host, whatever layers it has
            layout = f"{layout} {num_parts} parts of a state"
        if states is not None:
            layout = f"{layout} {states.layout}"
        num_parts = 0 if self._states is None else self._states.num_parts
        num_host_pages = num_images(config, host_page_bytes, num_parts=num_parts)
        if whole is not None:
            host_memory = whole.images
            assert len(host_memory) == num_host_pages
        else:
            check_available(num_host_pages * page_bytes)
            host_memory = None if memory.device.type == "cpu" else _pinned(num_host_pages, page_bytes)
        self._config = config
        self._page_size = page_size
        host = HostTier(page_bytes=page_bytes, num_pages=num_host_pages, memory=host_memory)
        stores: dict[StoreName, PageStore] = {}
        self._last: list[TieredIndex] = []  # written by: make
        _log.info("host cache: %d pages", num_host_pages)
        if config.disk_cache_path is not None and config.disk_cache_gb is not None:
            path = Path(config.disk_cache_path) / f"shard-{rank}.pages"
            num_pages = _num_pages("disk_cache_gb", config.disk_cache_gb, host_page_bytes, num_parts)
            stores["disk"] = _opened(
                lambda identity: _disk_store(path, page_bytes=page_bytes, num_pages=num_pages, fingerprint=identity),
                fingerprint, layout=layout, name=f"the disk cache {path}",
            )  # fmt: skip
        if config.remote_cache is not None:
            place, budget_gb = config.remote_cache, config.remote_cache_gb
            num_shared = 0
            if budget_gb is not None:
                num_shared = _num_pages("remote_cache_gb", budget_gb, host_page_bytes, num_parts)
            make = shared_store(place, num_bytes=num_shared * page_bytes, page_bytes=page_bytes)
            stores["remote"] = _opened(make, fingerprint, layout=layout, name=f"the shared cache {place}")
            _log.info("shared cache: %s", place)
        others: list[tuple[RankedPages, _Lower]] = []
        if part is not None and part.group is not None:
            if part.has_whole_pages:
                num_images_there = num_images(config, part.host_page_bytes, num_parts=num_parts)
                others = _elsewhere(part.group, num_images_there, page_bytes, stores)
            else:
                self._device = ranked = RankedPages(self._device, host.memory, part.group)
                stores = {name: RankedStore(store, name, ranked) for name, store in stores.items()}
        if by_request or others:
            pages = [self._device, *by_request, *(pages for pages, _ in others)]
            self._device = ChainedPages(
                pages,
                num_pages=memory.num_pages - num_spare,
                num_parts=0 if states is None else (states.num_pages - num_spare) * num_parts,
            )
        own = _Lower(host=host, stores=stores)
        self._lower = [own] * (1 + len(by_request)) + [lower for _, lower in others]
        """What each cache is made with; one that has the tiers of the cache before it is made beside that."""

    def make(self) -> TieredIndex:
        """Return a cache with an empty device; the previous one, if any, is closed.

        Where pages are divided among ranks by request, each has a cache: a call makes that of rank 0, and closes all
        previous ones, and the following calls make those of the others.
        """
        cache = radix_cache(self._config, self._page_size)
        if len(self._last) == len(self._lower):
            while self._last:
                self._last.pop().close(keep_stores=True)
        rank = len(self._last)
        lower = self._lower[rank]
        if rank and lower is self._lower[rank - 1]:
            self._last.append(self._last[-1].beside(cache))
            return self._last[-1]
        device, holder, frames = self._device, None, self._frames
        if frames is not None:
            beside = None if frames.beside is None else device_pages(frames.beside)
            device = holder = FramedPages(device, frames.pages, beside=beside)
        index = TieredIndex(
            cache,
            device=device,
            host=lower.host,
            disk=lower.stores.get("disk"),
            remote=lower.stores.get("remote"),
            page_size=self._page_size,
            write_policy=WritePolicy(self._config.cache_write_policy),
            holder=holder,
            states=self._states,
        )
        self._last.append(index)
        return index

    def followed(self, talk: Callable[[FromRank], None]) -> FollowedPages:
        """Return the pages of a rank on another host than rank 0's, which says what is copied; see `FollowedPages`."""
        (lower,) = self._lower
        return FollowedPages(self._device, lower.host.memory, lower.stores, talk)


def _elsewhere(
    group: MovingGroup, num_images: int, page_bytes: int, stores: Iterable[StoreName]
) -> list[tuple[RankedPages, _Lower]]:
    """Return the pages of each rank on another host, which has those of its own requests, and what is below them.

    Args:
        group: all ranks.
        num_images: of the host cache of each.
        page_bytes: of a page.
        stores: those that each has.
    """
    found: list[tuple[RankedPages, _Lower]] = []
    for rank in range(group.num_here, group.count):
        images = places_of_images(num_images, page_bytes)
        pages = RankedPages(PagesElsewhere(page_bytes), images, group, ranks=range(rank, rank + 1))
        host = HostTier(page_bytes=page_bytes, num_pages=num_images, memory=images)
        found.append((pages, _Lower(host=host, stores={name: StoreElsewhere(name, pages) for name in stores})))
    return found


def shared_store(place: str, *, num_bytes: int, page_bytes: int) -> Callable[[bytes], PageStore]:
    """Return a function that opens the store that `EngineConfig.remote_cache` names, for a fingerprint.

    A server of the Redis protocol or a master of mooncake need not answer then: as long as it does not, it has no
    pages. The function raises ValueError if another place cannot be used, or needs a package that is not installed.

    Args:
        place: a folder, `shm:NAME`, `redis://HOST:PORT/DATABASE?option=value`, `mooncake://HOST:PORT?option=value`,
            `nixl+redis://HOST:PORT/DATABASE?option=value`, or `lmcache+URL`.
        num_bytes: size of the files, or of the memory that this process gives; Redis and LMCache set their own size.
        page_bytes: size of a page image, in bytes.

    Raises:
        ValueError: the place is wrong.
    """
    if place.startswith("shm:"):
        name = place.removeprefix("shm:")
        return lambda identity: shared_memory(name, page_bytes=page_bytes, num_bytes=num_bytes, fingerprint=identity)
    scheme, found, _ = place.partition("://")
    if not found:
        return lambda identity: SharedFolder(place, page_bytes=page_bytes, num_bytes=num_bytes, fingerprint=identity)
    if scheme == "redis":
        where = RedisPlace.parse(place)
        return lambda identity: RedisStore(where, page_bytes=page_bytes, fingerprint=identity)
    if scheme == "mooncake":
        cluster = MooncakePlace.parse(place)
        return _client(place, "'pagewood-kvpool[mooncake]'", lambda identity: MooncakeStore(
            cluster, page_bytes=page_bytes, num_bytes=num_bytes, fingerprint=identity
        ))  # fmt: skip
    if scheme == "nixl+redis":
        directory = RedisPlace.parse(place.removeprefix("nixl+"))
        return _client(place, "'pagewood-kvpool[nixl]'", lambda identity: NixlStore(
            directory, page_bytes=page_bytes, num_bytes=num_bytes, fingerprint=identity
        ))  # fmt: skip
    if scheme.startswith("lmcache+"):
        url = place.removeprefix("lmcache+")
        return _client(place, "lmcache", lambda identity: LMCacheStore(
            url, page_bytes=page_bytes, fingerprint=identity
        ))  # fmt: skip
    raise ValueError(
        "remote_cache must be a folder, shm:NAME, redis://HOST:PORT, mooncake://HOST:PORT, nixl+redis://HOST:PORT or "
        f"lmcache+URL, got {place!r}"
    )


def _client(place: str, package: str, make: Callable[[bytes], PageStore]) -> Callable[[bytes], PageStore]:
    """Return `make` with errors that say what is missing."""

    def made(identity: bytes) -> PageStore:
        try:
            return make(identity)
        except ImportError as error:
            raise ValueError(f"remote_cache {place!r} needs a package: pip install {package} ({error})") from error
        except OSError as error:
            raise ValueError(f"remote_cache {place!r} cannot be used: {error}") from error

    return made


def tiered_cache(
    config: EngineConfig,
    digest: ModelDigest,
    memory: PageMemory,
    *,
    mark: str = "",
    states: PageMemory | None = None,
    frames: Frames | None = None,
    whole: WholePages | None = None,
    part: HostPart | None = None,
    by_request: Sequence[DevicePages] = (),
    num_spare: int = 0,
) -> Callable[[], TieredIndex] | None:
    """Return a function that makes prefix caches over host and disk, or None if the configuration has no host cache.

    Keys and values in files are reused if the model, what pages consist of, and `mark` are the same; `mark` names their
    other dependencies. For the other arguments see `TieredCaches`.
    """
    if config.host_cache_gb is None:
        return None
    identity = _identity(config, digest, mark)
    return TieredCaches(
        config, memory=memory, page_size=config.page_size, fingerprint=identity, states=states, frames=frames,
        whole=whole, part=part, by_request=by_request, num_spare=num_spare,
    ).make  # fmt: skip


def followed_pages(
    config: EngineConfig,
    digest: ModelDigest,
    memory: PageMemory,
    *,
    mark: str,
    part: HostPart,
    states: PageMemory | None = None,
    talk: Callable[[FromRank], None],
) -> FollowedPages:
    """Return the pages of a rank on another host than rank 0's, with a host cache and stores of its own.

    For `mark` and `states` see `tiered_cache`, and for `talk` `FollowedPages`.
    """
    identity = _identity(config, digest, mark)
    caches = TieredCaches(
        config, memory=memory, page_size=config.page_size, fingerprint=identity, part=part, states=states
    )
    return caches.followed(talk)


def _identity(config: EngineConfig, digest: ModelDigest, mark: str) -> bytes | Fingerprint:
    """Return what identifies the model, now or when it is known."""
    if config.disk_cache_path is None and config.remote_cache is None:  # no page outlives the process then
        return b""
    digest.begin()

    def marked(identity: bytes | None) -> bytes | None:
        return identity if identity is None or not mark else sha256(identity + mark.encode()).digest()

    return marked(digest.known()) or (lambda: marked(digest.wait()))


def _opened(
    make: Callable[[bytes], PageStore], fingerprint: bytes | Fingerprint, *, layout: str, name: str
) -> PageStore:
    """Return the store that `make` opens for a fingerprint of model and layout, now or when the model's is known."""

    def whole(identity: bytes) -> bytes:
        return sha256(identity + layout.encode()).digest()

    if isinstance(fingerprint, bytes):
        return make(whole(fingerprint))

    def late() -> PageStore | None:
        identity = fingerprint()
        return None if identity is None else make(whole(identity))

    _log.info("%s is opened when the model has been read for its digest", name)
    return LateStore(late, name=name)


def _disk_store(path: Path, *, page_bytes: int, num_pages: int, fingerprint: bytes) -> DiskTier:
    disk = DiskTier(
        path, page_bytes=page_bytes, num_bytes=num_pages * page_bytes, fingerprint=fingerprint, sets_aside=True
    )
    _log.info("disk cache: %d pages, %d of them in use", num_pages, disk.num_held)
    return disk


def _num_pages(name: str, budget_gb: float, page_bytes: int, num_parts: int = 0) -> int:
    num_pages = int(budget_gb * _GB) // page_bytes
    if num_pages < 1 + num_parts:
        what = f"one page of {page_bytes / _GB:.6f}e9 bytes"
        if num_parts:
            what += f" and a state of {num_parts * page_bytes / _GB:.6f}e9"
        raise ValueError(f"{name} must hold at least {what}, got {budget_gb}")
    return num_pages


def num_images(config: EngineConfig, page_bytes: int, *, num_parts: int = 0) -> int:
    """Return how many pages the host cache has room for.

    Args:
        config: with a host cache.
        page_bytes: of a page.
        num_parts: pages that a state fills; 0: there are no states.

    Raises:
        ValueError: there is no room for a page, or for a page and a state.
    """
    assert config.host_cache_gb is not None
    return _num_pages("host_cache_gb", config.host_cache_gb, page_bytes, num_parts)


def check_available(num_bytes: int) -> None:
    """Raise ValueError if the host has no room for a host cache."""
    available = available_memory_bytes()
    if num_bytes > available:
        raise ValueError(
            f"host_cache_gb must fit into the {available / _GB:.1f} GB of memory that are available, got "
            f"{num_bytes / _GB:.1f}"
        )


def _pinned(num_pages: int, page_bytes: int) -> Bytes:
    """Return pinned memory for the host's pages, which a GPU reads and writes. It is allocated at once."""
    try:
        return pinned_memory(num_pages, page_bytes)
    except RuntimeError as error:
        raise ValueError(f"host_cache_gb must be memory that can be pinned for a GPU: {error}") from error
