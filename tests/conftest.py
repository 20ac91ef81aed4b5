"""What several files of tests share."""

import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of `pagewood serve` with the embedded model and a store of batches, on a free port."""
    store = str(tmp_path_factory.mktemp("batches"))
    command = [sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--batch-store", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        welcome = next((line for line in server.stdout if line.startswith("Pagewood serves")), None)
        assert welcome is not None, server.communicate()[1]
        yield welcome.split(" at ")[1].split()[0]
        server.terminate()
        server.communicate(timeout=120)
    assert server.returncode == 0
