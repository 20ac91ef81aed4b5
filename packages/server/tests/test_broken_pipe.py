"""Commands end quietly when the reader of their output leaves, as `head` does."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from pagewood.server.cli import main
from pagewood.server.cli.main import COMMANDS

ENDED_BY_SIGPIPE = 141


@pytest.mark.parametrize("command", ["", *(one.__name__.rpartition(".")[2] for one in COMMANDS)])
def test_a_reader_that_has_left(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb")) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        try:
            code: object = main([*([command] if command else []), "--help"])
        except SystemExit as end:  # argparse ignores that a long help cannot be written
            code = end.code
        assert code in (0, ENDED_BY_SIGPIPE)


@pytest.mark.parametrize("arguments", [("doctor",), pytest.param(("inspect",), marks=pytest.mark.slow)])
def test_a_pipe_to_head(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pagewood.server", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == ENDED_BY_SIGPIPE
