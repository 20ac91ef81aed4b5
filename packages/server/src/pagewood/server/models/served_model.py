"""One model of a server: what stays of it while it is unloaded, and the processes that serve it while it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from pagewood.engine.model_folder.folder import default_sampling
from pagewood.engine.model_folder.vector_recipe import read_vector_recipe
from pagewood.server.config import ServeConfig
from pagewood.server.messages import wire
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.models.engine_group import EngineGroup
from pagewood.server.replicas.roster import Roster
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.weights import ServedVersion

# The HTTP stack takes long to import. It is imported while the child processes start, which takes longer.
if TYPE_CHECKING:
    from pagewood.engine.text import ResponseTemplate
    from pagewood.server.protocols.common.service import Service


class ServedModel:
    """A model, its counts and adapters, and its processes if it is loaded.

    Invariant: `service` is None unless `group` is there, and belongs to it.

    Args:
        config: of the server, for this model.
        metrics: its counts.
        roster: as in `EngineGroup`.

    Raises:
        ValueError: a file of its folder is wrong.
    """

    __slots__ = (
        *("_defaults", "_is_template_read", "_recipe", "_template", "adapters", "config", "group", "metrics", "model"),
        *("_roster", "service", "started"),
    )

    def __init__(self, config: ServeConfig, *, metrics: Metrics, roster: Roster | None = None) -> None:
        self.config, self._roster = config, roster
        self.metrics = metrics
        self.started = int(time.time())
        self.adapters = ServedAdapters.of(config.engine.adapters, config.adapter_folders)
        self.group: EngineGroup | None = None  # written by: begin, end
        self.service: Service | None = None  # written by: serve, end
        self.model: wire.Model | None = None  # written by: note
        """What its engine has said of it; None: it has never been loaded."""
        self._template: ResponseTemplate | None = None  # written by: template
        self._is_template_read = False  # written by: template
        self._defaults = default_sampling(config.model_folder)
        self._recipe = read_vector_recipe(config.model_folder)

    @property
    def name(self) -> str:
        """Clients' name."""
        return self.config.served_model_name

    def begin(
        self,
        *,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        title: str,
        give_up: Callable[[str, int], None],
        on_news: Callable[[], None],
    ) -> EngineGroup:
        """Return the group of its processes, which are not started yet; arguments as in `EngineGroup`."""
        assert self.group is None
        adapters = self.adapters.loaded() if self.model is not None else self.config.engine.adapters
        self.group = EngineGroup(
            replace(self.config, engine=replace(self.config.engine, adapters=adapters)),
            folder=folder,
            context=context,
            title=title,
            incidents=self.metrics.incidents,
            adapters=self.adapters,
            watch=self.metrics.requests if self.config.metrics else None,
            give_up=give_up,
            on_news=on_news,
            roster=self._roster,
        )
        return self.group

    def template(self) -> ResponseTemplate | None:
        """Return how its answers are read; None: they are plain text.

        Raises:
            ValueError: the response template is wrong.
        """
        from pagewood.engine.text import ResponseTemplate

        if not self._is_template_read:
            self._template = ResponseTemplate.from_folder(self.config.model_folder)
            self._is_template_read = True
        return self._template

    def serve(self) -> Service:
        """Return what endpoints use of the group; it imports the HTTP stack.

        Raises:
            ValueError: the response template of the model is wrong.
        """
        from pagewood.server.dashboard.live_data import Watchers
        from pagewood.server.protocols.common.service import Service

        assert self.group is not None
        self.service = Service(
            live=self.group.live,
            status=self.group.status,
            defaults=self._defaults,
            model_name=self.name,
            adapters=self.adapters,
            weights=ServedVersion(folders=self.config.update_folders),
            template=self.template(),
            recipe=self._recipe,
            metrics=self.metrics if self.config.metrics else None,
            watchers=Watchers(shows_text=self.config.dashboard_text),
            started=self.started,
            dispatcher=self.group.dispatcher,
            folder=self.group.folder if self._roster is None else None,
            replace_engine=self.group.replace_engine if self._roster is None else None,
        )
        return self.service

    def note(self) -> None:
        """Keep what the engine has said of the model."""
        assert self.group is not None
        self.model = self.group.status.model

    def end(self) -> None:
        """Forget the group, whose processes have ended."""
        assert self.group is not None
        if self.service is not None:
            self.service.watchers.close()
        self.group.close()
        self.group = self.service = None
