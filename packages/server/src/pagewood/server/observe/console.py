"""Messages in the terminal in which the server was started."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagewood.server.keys.file import KEY_VARIABLE
from pagewood.server.observe.logs import announce
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.status import EngineState

LINE_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class Console:
    """Prints the progress of loading, then how to use the server. Invariant: no message is printed twice in a row."""

    url: str
    model_names: Sequence[str]
    admin_key_path: Path | None = None
    """File with the admin key that the server made for its run; None: it has made none."""
    has_keys: bool = False
    """Whether callers need a key."""
    certificate: Path | None = None
    """Certificate of the server; None: it speaks HTTP without TLS."""
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)
    last_detail: str = ""  # written by: show
    last_line_s: float = float("-inf")  # written by: show
    is_welcome_shown: bool = False  # written by: welcome

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def show(self, status: ServerStatus) -> None:
        """Print news of `status`, at most one line of progress per second."""
        if status.state is EngineState.READY:
            self.welcome()
            return
        now_s = self.clock()
        if status.detail != self.last_detail and now_s - self.last_line_s >= LINE_EVERY_S:
            self.last_detail = status.detail
            self.last_line_s = now_s
            announce(status.detail)

    def welcome(self) -> None:
        """Print how to use the server, once."""
        if not self.is_welcome_shown:
            self.is_welcome_shown = True
            print(self._welcome(), flush=True)

    def _welcome(self) -> str:
        admin = ""
        if self.admin_key_path is not None:
            admin = f"\n{self.url}/dashboard and all admin routes need the key of this run, which is in\n"
            admin += f"  {self.admin_key_path}\n"
        header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if self.has_keys else ""
        key = f'os.environ["{KEY_VARIABLE}"]' if self.has_keys else '"none"'
        curl = "curl" if self.certificate is None else f"curl --cacert {shlex.quote(str(self.certificate))}"
        trust = "" if self.certificate is None else f" --ca-file {shlex.quote(str(self.certificate))}"
        return f"""
Pagewood serves {", ".join(self.model_names)} at {self.url} (ready after {self.clock() - self.started_s:.1f} s)

  {curl} {self.url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{{"model": "{self.model_names[0]}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

{self._imports()}  client = OpenAI(base_url="{self.url}/v1", api_key={key}{self._http_client()})
  stream = client.chat.completions.create(
      model="{self.model_names[0]}", messages=[{{"role": "user", "content": "Hello!"}}], stream=True)
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="")

  pagewood chat --url {self.url}{trust}
{admin}
Ctrl-C stops the server.
"""

    def _imports(self) -> str:
        found = "  import os\n" if self.has_keys else ""
        if self.certificate is not None:
            found += "  import ssl\n  import httpx\n"
        return f"{found}  from openai import OpenAI\n"

    def _http_client(self) -> str:
        if self.certificate is None:
            return ""
        return f", http_client=httpx.Client(verify=ssl.create_default_context(cafile={str(self.certificate)!r}))"
