"""`python -m pagewood.server` is the command `pagewood`."""

from pagewood.server.cli import main

raise SystemExit(main())
