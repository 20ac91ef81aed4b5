# For pyright: transformers without its types, which would be inferred through 2,500 files of models.
from typing import Any

def __getattr__(name: str) -> Any: ...
