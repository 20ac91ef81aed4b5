"""The admin key of a run: its file, who may read it, and which programs find it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pagewood.server.keys.key import checked_digest, digest_of
from pagewood.server.keys.run_key import FOLDER_VARIABLE, find_run_key, make_run_key, run_key_path


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all keys."""
    found = tmp_path / "runtime"
    monkeypatch.setenv(FOLDER_VARIABLE, str(found))
    return found


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_only_the_user_can_read_it(umask: int) -> None:
    before = os.umask(umask)
    try:
        made = make_run_key("127.0.0.1", 8000)
    finally:
        os.umask(before)
    assert (rights(made.path.parent), rights(made.path)) == (0o700, 0o600)
    key = made.path.read_text().strip()
    assert made.digest == checked_digest(key) == digest_of(key)
    assert len(key) > 43  # 256 random bits in base64
    assert key not in repr(made)
    assert list(made.path.parent.iterdir()) == [made.path]


def test_a_folder_with_more_rights_loses_them() -> None:
    folder = run_key_path("127.0.0.1", 1).parent
    folder.mkdir(parents=True, mode=0o777)
    folder.chmod(0o777)
    make_run_key("127.0.0.1", 1)
    assert rights(folder) == 0o700


def test_a_folder_of_another_user_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_key_path("127.0.0.1", 1).parent
    root.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="must be a folder of the user"):
        make_run_key("127.0.0.1", 1)
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="must be a folder of the user"):
        make_run_key("127.0.0.1", 1)
    assert not [*folder.iterdir(), *elsewhere.iterdir()]


def test_a_folder_in_a_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_key_path("127.0.0.1", 1).parent
    folder.mkdir(parents=True, mode=0o700)
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="no other user may rename files"):
        make_run_key("127.0.0.1", 1)
    root.chmod(0o1777)
    make_run_key("127.0.0.1", 1).remove()
    root.chmod(0o700)
    own, found = os.geteuid(), os.stat_result
    stat_of = Path.stat

    def foreign(path: Path, **options: bool) -> os.stat_result:
        seen = list(stat_of(path, **options))
        seen[4] = own + 1 if path == root else seen[4]
        return found(seen)

    monkeypatch.setattr(Path, "stat", foreign)
    with pytest.raises(PermissionError, match="or of root"):
        make_run_key("127.0.0.1", 1)
    assert not list(folder.iterdir())


def test_a_file_that_is_there_is_replaced_and_not_written_to(tmp_path: Path) -> None:
    stale = make_run_key("127.0.0.1", 8000)
    precious = tmp_path / "precious"
    os.link(stale.path, precious)
    text = precious.read_text()
    made = make_run_key("127.0.0.1", 8000)
    assert (made.path, precious.read_text()) == (stale.path, text)
    assert made.digest != stale.digest
    made.path.unlink()
    made.path.symlink_to(precious)
    again = make_run_key("127.0.0.1", 8000)
    assert not again.path.is_symlink()
    assert precious.read_text() == text


def test_servers_remove_only_their_own() -> None:
    first, other = make_run_key("127.0.0.1", 8000), make_run_key("127.0.0.1", 8001)
    later = make_run_key("127.0.0.1", 8000)
    first.remove()
    assert later.path.exists()
    later.path.write_bytes(b"\xff")  # not a key
    later.remove()
    assert later.path.exists()
    later = make_run_key("127.0.0.1", 8000)
    later.remove()
    later.remove()
    assert not later.path.exists()
    assert other.path.exists()


def test_one_that_cannot_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run_key("127.0.0.1", 8000).path.parent
    (folder / "127.0.0.1-8001.key").mkdir()  # nothing can replace it
    with pytest.raises(OSError, match="directory"):
        make_run_key("127.0.0.1", 8001)
    assert {path.name for path in folder.iterdir()} == {"127.0.0.1-8000.key", "127.0.0.1-8001.key"}


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("127.0.0.1", ["http://127.0.0.1:8000", "http://localhost:8000/", "http://0.0.0.0:8000", "https://localhost:8000"]),
        ("0.0.0.0", ["http://127.0.0.1:8000", "http://LOCALHOST:8000/v1", "http://0.0.0.0:8000"]),
        ("::1", ["http://[::1]:8000"]),
        ("::", ["http://[::1]:8000", "http://[::]:8000"]),
    ],
)  # fmt: skip
def test_it_is_found_by_the_addresses_of_its_server(host: str, urls: list[str]) -> None:
    made = make_run_key(host, 8000)
    for url in urls:
        found = find_run_key(url)
        assert found is not None, url
        assert digest_of(found.key) == made.digest
    for url in (
        "http://127.0.0.1:8001", "http://127.0.0.1", "http://example.com:8000", "http://10.0.0.1:8000",
        "http://localhost.example.com:8000", "http://127.0.0.1@example.com:8000", "http://127.0.0.1:x", "nonsense", "",
    ):  # fmt: skip
        assert find_run_key(url) is None, url


def test_it_is_found_only_by_addresses_that_other_machines_cannot_have() -> None:
    for host in ("10.0.0.1", "fd00::1"):
        make_run_key(host, 8000)
    assert [find_run_key(url) for url in ("http://10.0.0.1:8000", "http://[fd00::1]:8000")] == [None, None]


def test_it_goes_to_no_other_user_who_listens_on_the_other_localhost() -> None:
    make_run_key("127.0.0.1", 8000)
    make_run_key("127.0.0.1", 80)
    for url, address in [
        ("http://localhost:8000/x?y", "http://127.0.0.1:8000/x?y"),
        ("http://localhost", "http://127.0.0.1:80"),
        ("https://localhost:8000", "https://localhost:8000"),  # the certificate says who answers
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ]:
        found = find_run_key(url)
        assert found is not None
        assert found.url == address
    assert find_run_key("http://[::1]:8000") is None


def test_where_it_is_without_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/c")
    monkeypatch.setattr("socket.gethostname", lambda: "oak")
    assert run_key_path("127.0.0.1", 8000) == Path("/home/c/.cache/pagewood/run/oak/127.0.0.1-8000.key")
    assert run_key_path("localhost", 8000) == run_key_path("127.0.0.1", 8000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    assert run_key_path("::", 1) == Path("/a/pagewood/run/oak/::1-1.key")
    with pytest.raises(ValueError, match="gpu-box"):
        run_key_path("gpu-box", 1)
