"""What the person who started the server sees."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from pagewood.server.status import EngineState, EngineStatus


@dataclass(slots=True, kw_only=True)
class Console:
    """Prints what the engine does until it serves, and then how to talk to it. Invariant: says each thing once."""

    url: str
    model_name: str
    started_s: float = field(default_factory=time.monotonic)
    last_detail: str = ""  # written by: show
    welcomed: bool = False  # written by: show

    def show(self, status: EngineStatus) -> None:
        """Print what is new in `status`."""
        state = status.state
        if state is EngineState.READY and not self.welcomed:
            self.welcomed = True
            self.last_detail = status.detail
            print(self._welcome(), flush=True)
        elif status.detail != self.last_detail:
            self.last_detail = status.detail
            print(f"pagewood: {status.detail}", file=sys.stderr, flush=True)

    def _welcome(self) -> str:
        return f"""
Pagewood serves {self.model_name} at {self.url} (ready after {time.monotonic() - self.started_s:.1f} s)

  curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{self.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{self.url}/v1", api_key="none")
  stream = client.chat.completions.create(
      model="{self.model_name}", messages=[{{"role": "user", "content": "Hello!"}}], stream=True)
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="")

  pagewood chat --url {self.url}

Ctrl-C stops the server.
"""
