"""GGUF files that are cut, damaged or made to mislead: a clear error, with little memory and time."""

# pyright: basic
# gguf and torch are typed in part only.

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import gguf_files
import quantised_folders
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.text import Tokenizer
from pagewood.engine.weights.gguf import folder
from pagewood.engine.weights.gguf.file import GGUFFile

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    made = tmp_path_factory.mktemp("model")
    quantised_folders.write_model(made)
    gguf_files.write_gguf(made, made / "m.gguf", architecture="llama", kinds=["Q8_0", "Q4_1"])
    return (made / "m.gguf").read_bytes()


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    keys: list[bytes], tensors: list[bytes], *, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join([*keys, *tensors])


def padded(head: bytes, size: int) -> bytes:
    return head + bytes(-len(head) % 32) + bytes(size)


HUGE = 2**63 - 1
FILES = {
    "too short": (b"GGUF", "at least 24 bytes, got 4"),
    "magic": (b"GGML" + bytes(40), "must begin with b'GGUF'"),
    "version 1": (header([], [], version=1), "version of GGUF must be 2 or 3, got 1"),
    "byte order": (header([], [], version=3 << 24), "another byte order"),
    "tensors": (header([], [], counts=(HUGE, 0)), "the number of tensors must be at most 0, got 9223372036854775807"),
    "keys": (header([], [], counts=(0, HUGE)), "the number of keys must be at most 0, got 9223372036854775807"),
    "cut in a key": (
        header([text("a")], [], counts=(0, 1)),
        "the number of keys must be at most 0|must not end inside",
    ),
    "long name": (header([struct.pack("<Q", 2**40) + bytes(40)], []), "a key must have at most 1024 bytes"),
    "long string": (header([key("a", STRING, struct.pack("<Q", 2**50))], []), r"a must have at most \d+ bytes"),
    "string beyond the end": (header([key("a", STRING, struct.pack("<Q", 30))], []), "must not end inside a"),
    "no UTF-8": (header([key("a", STRING, text(b"\xff\xfe"))], []), "a must be UTF-8"),
    "type": (header([key("a", 13, bytes(8))], []), "the type of a must be 0 to 12, got 13"),
    "array in an array": (
        header([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16))], []),
        "numbers or strings",
    ),
    "items": (
        header([key("a", ARRAY, struct.pack("<IQ", STRING, HUGE))], []),
        "the number of items of a must be at most",
    ),
    "bytes": (
        header([key("a", ARRAY, struct.pack("<IQ", UINT8, 2**40))], []),
        "the number of items of a must be at most 0",
    ),
    "a key twice": (header([key("a", UINT32, bytes(4))] * 2, []), "keys must differ, got 'a' twice"),
    "alignment": (
        header([key("general.alignment", UINT32, struct.pack("<I", 0))], []),
        "power of two up to 1048576, got 0",
    ),
    "odd alignment": (header([key("general.alignment", UINT32, struct.pack("<I", 48))], []), "got 48"),
    "dimensions": (header([], [text("t") + struct.pack("<I", 2**31) + bytes(60)]), "1 to 4 dimensions, got 2147483648"),
    "no dimensions": (header([], [text("t") + struct.pack("<I", 0) + bytes(60)]), "1 to 4 dimensions, got 0"),
    "empty": (
        padded(header([], [tensor("t", (0, 4), 0, 0)]), 64),
        r"dimensions of t must be >= 1 for F32, got \(4, 0\)",
    ),
    "product": (padded(header([], [tensor("t", (2**62, 2**62), 0, 0)]), 64), "t must lie in the file of 160 bytes"),
    "part of a block": (padded(header([], [tensor("t", (33,), 8, 0)]), 64), "the last a multiple of 32 for Q8_0"),
    "offset": (padded(header([], [tensor("t", (4,), 0, 2**62)]), 64), "t must lie in the file"),
    "offset of no alignment": (padded(header([], [tensor("t", (4,), 0, 4)]), 64), "multiple of 32, got 4"),
    "beyond the end": (padded(header([], [tensor("t", (17,), 0, 0)]), 64), "got 68 bytes from 64 on"),
    "type of a tensor": (
        padded(header([], [tensor("t", (256,), 16, 0)]), 64),
        "the type of t must be one of .*, got IQ2_XXS",
    ),
    "unknown type": (padded(header([], [tensor("t", (256,), 77, 0)]), 64), "the type of t must be one of .*, got 77"),
    "a tensor twice": (padded(header([], [tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)]), 64), "'t' twice"),
    "overlap": (
        padded(header([], [tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32)]), 96),
        "must not overlap, got t",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_headers_that_mislead(name: str, tmp_path: Path) -> None:
    file, (data, message) = tmp_path / "m.gguf", FILES[name]
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            GGUFFile(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def load(file: Path) -> None:
    """Read everything that an engine reads."""
    made = model_folder(file)
    Tokenizer.from_folder(made)
    config = ModelConfig.from_folder(made)
    check_weights(made, config)
    checkpoint = Checkpoint(made, dtype=torch.float32)
    checkpoint.stack([("model.embed_tokens.weight", config.vocab_size)], config.hidden_size)
    checkpoint.stack([("model.layers.0.mlp.down_proj.weight", config.hidden_size)], config.layers[0].feed_forward.size)


def test_every_file_that_is_cut_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    random = np.random.default_rng(0)
    for length in {*random.integers(4, len(content), 60).tolist(), len(content) - 1}:
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            load(file)
    file.write_bytes(content)
    load(file)


def measure(file: Path) -> tuple[int, bool]:
    """Return the peak of allocated bytes while a file is read, and whether it was refused."""
    tracemalloc.start()
    is_refused = False
    try:
        load(file)
    except ValueError:
        is_refused = True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, is_refused


def damage(content: bytes, tmp_path: Path, *, seeds: range) -> int:
    """Change bytes, most of them in the header; return how many files were refused. Others are read."""
    num_refused = 0
    header_size = 3000
    for seed in seeds:
        random = np.random.default_rng(seed)
        changed = bytearray(content)
        for _ in range(random.integers(1, 5)):
            high = header_size if random.random() < 0.9 else len(changed)
            at = int(random.integers(4, high))
            width = int(random.choice([1, 1, 4, 8]))
            number = int(random.choice([0, 1, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1, int(random.integers(2**16))]))
            changed[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        file = tmp_path / f"{seed}.gguf"
        file.write_bytes(changed)
        start = time.process_time()
        most = 32 * len(content) + (4 << 20)
        peak, is_refused = measure(file)
        if peak >= most:  # a table that the whole process shares may have grown, which it does once
            peak, is_refused = measure(file)
        num_refused += is_refused
        assert peak < most, (seed, peak)
        assert time.process_time() - start < 10, seed
        file.unlink()
    return num_refused


def test_damaged_bytes_are_read_or_refused(content: bytes, tmp_path: Path) -> None:
    assert damage(content, tmp_path, seeds=range(120)) > 40


@pytest.mark.slow
def test_many_damaged_files(content: bytes, tmp_path: Path) -> None:
    damage(content, tmp_path, seeds=range(1000, 6000))


def test_merges_that_lead_in_circles(content: bytes, tmp_path: Path) -> None:
    """Merges are tried on the pieces of a word, each of which makes it shorter, so they end."""
    made = tmp_path / "model"
    made.mkdir()
    quantised_folders.write_model(made)
    tokens = ["<|end|>", "a", "aa", "aaa", "aaaa", *(chr(0x100 + i) for i in range(55))]
    values = gguf_files.byte_tokens(60) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a aa", "aa a", "a a", "aa aa", "a aaa", "aaa a"],
    }
    gguf_files.write_gguf(made, tmp_path / "m.gguf", architecture="llama", tokenizer=values)
    own = Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))
    assert own.decode(own.encode("a" * 1000)) == "a" * 1000
