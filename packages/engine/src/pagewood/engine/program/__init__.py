"""Programs that call a model many times: Python functions over a text that grows, forks and joins.

Importing this imports no torch; a `LocalBackend` gets an `LLM` or an `AsyncLLM`, which do.
"""

from pagewood.engine.program.backend import Answer, Backend, Prompt, Sampling, ToolCall, Usage
from pagewood.engine.program.local import LocalBackend
from pagewood.engine.program.programs import Call, Program, program, run_many, run_many_async
from pagewood.engine.program.remote import RemoteBackend, RemoteError
from pagewood.engine.program.result import Result
from pagewood.engine.program.state import State
from pagewood.engine.program.variable import DeadlineExceededError, ProgramCancelledError, VariableError

__all__ = [
    "Answer",
    "Backend",
    "Call",
    "DeadlineExceededError",
    "LocalBackend",
    "Program",
    "ProgramCancelledError",
    "Prompt",
    "RemoteBackend",
    "RemoteError",
    "Result",
    "Sampling",
    "State",
    "ToolCall",
    "Usage",
    "VariableError",
    "program",
    "run_many",
    "run_many_async",
]
