"""API keys alone: files, digests, namespaces, quotas against an oracle, and which configurations are refused."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError
from pagewood.server.keys.file import keys_of_environment, read_keys
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.keys.namespaces import namespace_of
from pagewood.server.keys.quota import Quota, TokenBucket
from pagewood.server.serve import reload_keys
from recorded import Clock

SECRET = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like that of a model."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    return tmp_path


def file_of(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def code_of(gate: KeyGate, headers: Headers) -> str | None:
    with pytest.raises(ApiError) as error:
        gate.caller(headers, is_open=False)
    assert error.value.status == 401
    assert error.value.headers["WWW-Authenticate"] == "Bearer"
    return error.value.code


def test_the_forms_of_a_file_mean_the_same(tmp_path: Path) -> None:
    digest = "sha256:" + hashlib.sha256(OTHER.encode()).hexdigest()
    limited = {"key": digest, "tenant": "acme", "requests_per_minute": 60, "max_priority": -1, "admin": True}
    lines = read_keys(file_of(tmp_path, f"# ours\n\n  {SECRET}  \n{json.dumps(limited)}\n"))
    array = read_keys(file_of(tmp_path, json.dumps([{"key": SECRET}, limited], indent=1)))
    assert lines == array
    plain, other = lines
    assert (plain.digest, other.digest) == (digest_of(SECRET), digest_of(OTHER))
    assert plain.tenant == f"key-{plain.name}" != other.tenant
    assert not plain.admin
    assert (other.tenant, other.requests_per_minute, other.max_priority, other.admin) == ("acme", 60, -1, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one key"),
        ("# nothing", "at least one key"),
        ("hush-short", "line 1: a key must have at least 16 characters"),
        (f"{SECRET}\n{SECRET} x", "line 2: a key must consist of visible"),
        (f"{SECRET}é", "line 1: a key must consist of visible"),
        ("sha256:beef-hush", "line 1: a digest must be"),
        (f'{{"key": "{SECRET}", "tenat": "a"}}', "line 1: Object contains unknown field `tenat`"),
        (f'{{"key": "{SECRET}", "tenant": "a b"}}', "line 1: tenant must be"),
        (f'{{"key": "{SECRET}", "max_concurrent": 0}}', "line 1: max_concurrent must be >= 1, got 0"),
        (f'[{{"key": "{SECRET}", "tokens_per_minute": "many"}}]', "Expected `int"),
        ('[{"key": 5}]', "Expected `str`"),
        ("[" * 100_000, "is wrong"),
        ('{"key": "hush', "line 1"),
    ],
)
def test_errors_of_a_file_name_the_line_and_quote_no_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_keys(file_of(tmp_path, text))
    assert "hush" not in str(error.value)
    assert SECRET not in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "absent")


def test_a_file_that_others_may_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(tmp_path, SECRET)
    read_keys(path)
    assert not caplog.records
    path.chmod(0o644)
    read_keys(path)
    assert "other users may read" in caplog.text
    assert SECRET not in caplog.text


def test_keys_of_the_environment() -> None:
    user, admin = keys_of_environment({"PAGEWOOD_API_KEY": SECRET, "PAGEWOOD_ADMIN_KEY": OTHER, "HOME": "/"})
    assert (user.admin, admin.admin) == (False, True)
    assert keys_of_environment({"PAGEWOOD_API_KEY": ""}) == []
    with pytest.raises(ValueError, match="PAGEWOOD_ADMIN_KEY: a key must have"):
        keys_of_environment({"PAGEWOOD_ADMIN_KEY": "short"})


def test_a_key_is_not_in_what_is_kept_of_it() -> None:
    gate = KeyGate([ApiKey(digest=digest_of(SECRET))])
    assert SECRET not in repr(gate.caller(bearer(SECRET), is_open=False))


def test_how_a_key_is_presented() -> None:
    gate = KeyGate([ApiKey(digest=digest_of(SECRET), tenant="a"), ApiKey(digest=digest_of(OTHER), tenant="b")])
    for headers in ({"authorization": f"bearer  {SECRET} "}, {"x-api-key": SECRET}):
        assert gate.caller(Headers(headers), is_open=False).tenant == "a"
    both = Headers({"authorization": f"Bearer {OTHER}", "x-api-key": SECRET})
    assert gate.caller(both, is_open=False).tenant == "b"
    for headers in ({}, {"authorization": SECRET}, {"authorization": f"Basic {SECRET}"}, {"x-api-key": " "}):
        assert code_of(gate, Headers(headers)) == "missing_api_key"
    twice = Headers(raw=[(b"x-api-key", SECRET.encode()), (b"x-api-key", SECRET.encode())])
    assert code_of(gate, twice) == "missing_api_key"
    for wrong in (SECRET[:-1], SECRET + "x", "é" * 20, "sha256:" + digest_of(SECRET).hex()):
        assert code_of(gate, bearer(wrong)) == "invalid_api_key"
    assert not gate.caller(Headers({}), is_open=True).is_admin


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has no early end: the first of many keys costs as many comparisons as a wrong key."""
    keys = [ApiKey(digest=digest_of(f"{SECRET}{i}")) for i in range(20)]
    gate = KeyGate(keys)
    compared: list[bytes] = []
    real = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr("pagewood.server.keys.gate.hmac.compare_digest", counted)
    assert gate.caller(bearer(f"{SECRET}0"), is_open=False).name == keys[0].name
    assert len(compared) == 20
    assert code_of(gate, bearer(SECRET)) == "invalid_api_key"
    assert len(compared) == 40


def test_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    caplog.set_level(logging.INFO)
    path = file_of(tmp_path, json.dumps([{"key": SECRET, "requests_per_minute": 5}]))
    gate = KeyGate(read_keys(path))
    quota = gate.caller(bearer(SECRET), is_open=False).quota
    config = ServeConfig(served_model_name="m", model_folder=folder, api_key_file=path)
    path.write_text(json.dumps([{"key": OTHER}, {"key": SECRET, "requests_per_minute": 5}]))
    reload_keys(gate, config)
    assert gate.caller(bearer(SECRET), is_open=False).quota is quota, "what was used must stay counted"
    gate.caller(bearer(OTHER), is_open=False)
    for wrong in ("", f"{OTHER}\n{OTHER}", "short"):
        path.write_text(wrong)
        reload_keys(gate, config)
        assert "stay as they were" in caplog.text
        gate.caller(bearer(OTHER), is_open=False)
        caplog.clear()
    path.write_text(OTHER)
    reload_keys(gate, config)
    assert code_of(gate, bearer(SECRET)) == "invalid_api_key"


_TEXTS = st.text(alphabet="@:0123a", max_size=6)


@given(st.lists(st.tuples(_TEXTS, _TEXTS), min_size=2, max_size=20))
@example([("a", "b"), ("", "@1:a:b"), ("1:a", "b"), ("a:b", ""), ("", "b"), ("", "")])
def test_no_two_tenants_and_salts_have_one_namespace(pairs: list[tuple[str, str]]) -> None:
    found = {namespace_of(tenant, salt) for tenant, salt in set(pairs)}
    assert len(found) == len(set(pairs))


def test_without_keys_a_salt_is_its_own_namespace() -> None:
    assert [namespace_of("", salt) for salt in (None, "", "mine")] == [None, None, "mine"]
    assert namespace_of("acme", None) == namespace_of("acme", "") == "@4:acme:"


@given(st.integers(1, 600), st.lists(st.tuples(st.floats(0, 90), st.integers(0, 900)), max_size=20))
def test_a_bucket_holds_what_the_oracle_says(size: int, uses: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket, level = TokenBucket(size, clock=clock), float(size)
    for wait_s, number in uses:
        clock.now_s += wait_s
        level = min(float(size), level + wait_s * size / 60)
        assert bucket.level == pytest.approx(level, abs=1e-6)
        bucket.take(number)
        level -= number
        wait_s = bucket.wait_s(1)
        clock.now_s += wait_s
        level = min(float(size), level + wait_s * size / 60)
        assert bucket.level >= 1 - 1e-6


def test_a_quota() -> None:
    clock = Clock()
    key = ApiKey(digest=digest_of(SECRET), requests_per_minute=2, tokens_per_minute=600, max_concurrent=2)
    quota = Quota(key=key, clock=clock)

    def refused() -> tuple[str | None, str]:
        with pytest.raises(ApiError) as error:
            quota.admit()
        assert error.value.status == 429
        return error.value.code, error.value.headers["Retry-After"]

    quota.admit()
    quota.admit()
    assert refused() == ("too_many_concurrent", "1")
    quota.end()
    assert refused() == ("rate_limit_exceeded", "30")
    assert quota.headers(is_anthropic=False) == {
        "x-ratelimit-limit-requests": "2", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "600", "x-ratelimit-remaining-tokens": "600", "x-ratelimit-reset-tokens": "0ms",
    }  # fmt: skip
    theirs = quota.headers(is_anthropic=True)
    assert theirs["anthropic-ratelimit-requests-remaining"] == "0"
    assert theirs["anthropic-ratelimit-tokens-reset"].endswith("Z")
    clock.now_s = 60
    quota.charge(1000)  # more than there is: a debt of 400 tokens, which is paid in 40 s
    assert refused() == ("rate_limit_exceeded", "41")
    assert quota.headers(is_anthropic=False)["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s = 101
    quota.admit()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "--api-key-file.*--insecure-no-keys"),
        ({"host": "::"}, "loopback"),
        ({"host": "gpu-box"}, "loopback"),
        ({"tls_cert": Path("c")}, "tls_cert and tls_key must be given together"),
        ({"api_key_file": Path("k"), "insecure_no_keys": True}, "insecure_no_keys must be false"),
    ],
)
def test_servers_that_do_not_start(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServeConfig(served_model_name="m", model_folder=folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"host": host} for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")),
        {"host": "0.0.0.0", "insecure_no_keys": True},
        {"host": "::", "api_key_file": Path("keys")},
        {"host": "gpu-box", "api_keys": (ApiKey(digest=digest_of(SECRET)),)},
    ],
)
def test_servers_that_start(folder: Path, options: dict[str, Any]) -> None:
    config = ServeConfig(served_model_name="m", model_folder=folder, **options)
    assert config.is_local == (options["host"] in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
