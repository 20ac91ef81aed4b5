from pathlib import Path

import pytest

from pagewood.schedpolicy.simulation.gallery import BEGIN, CASES, END, Case, main

PACKAGE = Path(__file__).parent.parent
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_readme_has_every_case_and_its_picture(case: Case):
    gallery = README.split(BEGIN)[1].split(END)[0]
    assert f"### {case.title}\n\n{case.finding}\n" in gallery
    assert f"gallery/{case.name}.png" in gallery
    assert (PACKAGE / "gallery" / f"{case.name}.png").is_file()


def test_the_pictures_are_small():
    assert sum(path.stat().st_size for path in (PACKAGE / "gallery").iterdir()) < 300_000


def test_the_gallery_needs_a_folder(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
