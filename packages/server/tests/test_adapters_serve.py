"""A server process with adapters of the embedded model: from its start, by request, and after its engine has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewood.server.cli import main, merge
from serving import Server, until
from small_adapters import write_adapter

PROMPT = "What is 12 + 7?"


def text_of(server: Server, model: str) -> str:
    completion = server.openai.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    return completion.choices[0].text


def test_adapters_from_the_start_and_by_request_outlive_the_engine(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two")):
        write_adapter(tmp_path / "adapters" / name, number)
    options = ["--adapter", f"one={tmp_path / 'adapters' / 'one'}", "--max-adapters", "2"]
    server = Server(tmp_path, *options, "--adapter-folder", str(tmp_path / "adapters"))
    try:
        until(lambda: server.ready()["status"] == "ready")
        body = {"lora_name": "two", "lora_path": str(tmp_path / "adapters" / "two")}
        assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 403
        assert server.admin.post("/v1/load_lora_adapter", json=body).status_code == 200
        names = [one.id for one in server.openai.models.list().data]
        assert names == [names[0], "one", "two"]
        before = {name: text_of(server, name) for name in (*names, f"{names[0]}:two")}
        assert len({before[name] for name in names}) == 3
        assert before[f"{names[0]}:two"] == before["two"]
        server.lose("engine")
        until(lambda: server.ready()["status"] == "ready")
        assert {name: text_of(server, name) for name in before} == before
    finally:
        server.close()


@pytest.mark.slow
def test_a_merged_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    write_adapter(tmp_path / "adapter", 0)
    folder = Path(merge.merged_model(None, tmp_path / "adapter"))
    written = (folder / "config.json").stat().st_mtime_ns
    assert merge.merged_model(None, tmp_path / "adapter") == str(folder)
    assert (folder / "config.json").stat().st_mtime_ns == written
    write_adapter(tmp_path / "other", 1)
    assert merge.merged_model(None, tmp_path / "other") != str(folder)
    with pytest.raises(ValueError, match="--merge-adapter must be a folder"):
        merge.merged_model(None, tmp_path / "none")
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be merged"):
        merge.merged_model(None, tmp_path / "other")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapter(tmp_path / "adapter", 0)
    model = str(merge.model_folder(None))
    assert main(["merge", model, str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert "8 modules of the model were changed" in capsys.readouterr().out
    assert main(["merge", model, str(tmp_path / "adapter"), str(tmp_path / "out")]) == 2
    assert "OUT must be a new or empty folder" in capsys.readouterr().err
