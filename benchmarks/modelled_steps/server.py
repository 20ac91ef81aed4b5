"""The command `pagewood` with such engines: `python -m modelled_steps.server serve ...`."""

from __future__ import annotations

from dataclasses import replace

from pagewood.server.cli.main import main
from pagewood.server.models import engine_group

if __name__ == "__main__":
    engine_group.ENGINE = replace(engine_group.ENGINE, module="modelled_steps.engine_process")
    main()
