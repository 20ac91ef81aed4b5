from pathlib import Path

import pytest

from pagewood.schedpolicy.simulation.gallery import CASES, TITLE, Case, main

GALLERY = Path(__file__).parent.parent / "gallery"
README = (GALLERY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_readme_has_every_case_and_its_picture(case: Case):
    assert README.startswith(TITLE)
    assert f"## {case.title}\n\n{case.finding}\n" in README
    assert f"]({case.name}.png)" in README
    assert (GALLERY / f"{case.name}.png").is_file()


def test_the_pictures_are_small():
    assert sum(path.stat().st_size for path in GALLERY.glob("*.png")) < 300_000


def test_the_gallery_needs_a_folder(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
