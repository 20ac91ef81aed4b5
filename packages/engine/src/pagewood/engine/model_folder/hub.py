"""Models by their names on the Hugging Face hub: from its cache on this machine, or downloaded into it.

Imports neither torch nor transformers, and `huggingface_hub` only for a name.
"""

# pyright: basic
# huggingface_hub's functions are typed in part only, and it need not be installed.

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_COPIES = ("original/*", "consolidated*", "onnx/*", "openvino/*")
"""The same weights in other forms."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(model: str | Path | None) -> bool:
    """Return whether a model that is no folder and no file is named as `org/name`."""
    return model is not None and _NAME.fullmatch(str(model)) is not None and not Path(model).exists()


def hub_folder(name: str) -> Path:
    """Return the folder of a snapshot of a repository.

    One that is whole in the cache is taken as it is, without a look at the network, so that all processes read the
    same; `hf download` brings a newer one. Otherwise its newest revision is downloaded, with its progress on standard
    error. HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are those of huggingface_hub.

    Raises:
        FileNotFoundError: it is not in the cache and cannot be downloaded, or holds no weights in safetensors.
    """
    by_hand = f"download it (`hf download {name}`) and try again, or give a folder"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise FileNotFoundError(
            f"model must be a folder, a GGUF file, or with huggingface_hub installed a name on the hub, got {name!r}; "
            f"`pip install huggingface_hub`, or {by_hand}"
        ) from error
    wanted: dict[str, Any] = {"allow_patterns": [*_FILES], "ignore_patterns": [*_COPIES]}
    try:
        try:
            found = snapshot_download(name, **wanted, local_files_only=True)
        except LocalEntryNotFoundError:
            _log.info("%s is not in the cache of Hugging Face models, or not whole: downloading it", name)
            found = snapshot_download(name, **wanted)
    except GatedRepoError as error:
        why = f"its owner must give you access: ask for it on its page, then `hf auth login` ({_brief(error)})"
    except RepositoryNotFoundError as error:
        why = f"the hub has no such repository, or it is private and needs `hf auth login` ({_brief(error)})"
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        why = f"it is neither a folder nor in the cache, and cannot be downloaded now ({_brief(error)}); {by_hand}"
    else:
        folder = Path(found)
        if not any(folder.rglob("*.safetensors")):
            raise FileNotFoundError(
                f"model must have weights in safetensors, got {name!r}, which has none; if it has GGUF files, download "
                f"one (`hf download {name} FILE.gguf`) and give its path"
            )
        return folder
    raise FileNotFoundError(f"model must be a folder, a GGUF file or a name on the hub, got {name!r}: {why}")


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
