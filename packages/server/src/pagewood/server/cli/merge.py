"""`pagewood merge`: writes a folder of a model with an adapter in its weights."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

from pagewood.engine.cache_folder import cache_root, remove_abandoned
from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.cli.options.page import Commands

_PARTS = (".json", ".safetensors")


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "merge",
        help="write a model with a LoRA adapter in its weights",
        description="Write a folder of the model with the changes of a LoRA adapter added to its weights, which keep "
        "their format. Every engine loads it, and it is as fast as the model itself.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face model with plain weights")
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder of PEFT")
    parser.add_argument("out", metavar="OUT", type=Path, help="new or empty folder")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the folder."""
    from pagewood.engine.model_folder.merge import merge_adapter  # imports torch, which takes seconds

    num_changed = merge_adapter(model_folder(options.model), options.adapter, options.out, progress=_show)
    print(f"{options.out}: {num_changed} modules of the model were changed")
    return 0


def merged_model(model: str | None, adapter: Path) -> str:
    """Return the folder of a model with an adapter in its weights; it is written once, in a process of its own.

    Raises:
        ValueError: it cannot be written. The process has said why.
    """
    source, folder = model_folder(model), cache_root() / "merged"
    place = folder / _key(source, adapter)
    if not (place / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, "unfinished-*")
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder, ignore_cleanup_errors=True) as unfinished:
            out = Path(unfinished) / "model"
            command = [sys.executable, "-m", "pagewood.server", "merge", str(source), str(adapter), str(out)]
            if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                raise ValueError(f"the adapter in {adapter} cannot be merged into {source}")
            if not place.exists():
                out.rename(place)
    return str(place)


def _key(source: Path, adapter: Path) -> str:
    """Return what distinguishes a model and an adapter from others: contents of the adapter, states of the files."""
    digest = blake2b(str(source.resolve()).encode(), digest_size=16)
    for path in sorted(source.iterdir()):
        if path.suffix in _PARTS:
            state = path.stat()
            digest.update(f"\0{path.name} {state.st_size} {state.st_mtime_ns} {state.st_ino}".encode())
    if not adapter.is_dir():
        raise ValueError(f"--merge-adapter must be a folder, got {str(adapter)!r}")
    for path in sorted(adapter.iterdir()):
        if path.suffix in _PARTS:
            digest.update(f"\0{path.name}\0".encode() + blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _show(what: str, done: int, total: int) -> None:
    end = "\n" if done == total else "\r"
    print(f"{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)
