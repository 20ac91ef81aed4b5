"""The table of families is what the tests compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import table


def test_the_table_of_families_is_up_to_date() -> None:
    assert table.written() == table.markdown(), (
        "write it: PYTHONPATH=packages/engine/tests/support python -m families.table"
    )


def test_the_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"before\n{table.BEGIN}\n| stale |\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "README", file)
    assert table.written() != table.markdown()
    table.write()
    assert table.written() == table.markdown()
    assert file.read_text().startswith("before\n")
    assert file.read_text().endswith("\nafter\n")
