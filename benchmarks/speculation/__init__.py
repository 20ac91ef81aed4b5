# pyright: basic
"""The parts of `benchmarks/speculative.py`."""

import re
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

if find_spec("re2") is None:  # it reads stop expressions and parts of answers, and no part of the benchmark has any
    stand_in: Any = ModuleType("re2")
    stand_in.escape, stand_in.error = re.escape, re.error
    stand_in.compile = lambda *_: re.compile("")
    stand_in.Options = type("Options", (), {})
    sys.modules["re2"] = stand_in
