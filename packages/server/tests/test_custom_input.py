"""The text of a custom tool is the same wherever its arguments are cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pagewood.server.protocols.responses.custom_input import CustomInput, as_arguments


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200)))
def test_cuts(text: str, is_ascii: bool, cuts: list[int]) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader, start, found = CustomInput(), 0, ""
    for cut in sorted(cuts):
        found += reader.take(whole[start:cut])
        start = max(start, cut)
    found += reader.take(whole[start:]) + reader.end()
    assert found == reader.text == text
    assert CustomInput.of(as_arguments(text)) == text


@given(st.text(), st.integers(0, 50))
def test_arguments_of_another_form_are_the_text(text: str, cut: int) -> None:
    whole = json.dumps({"other": text})
    reader = CustomInput()
    assert reader.take(whole[:cut]) + reader.take(whole[cut:]) == ""
    assert reader.end() == whole


@given(st.text(alphabet='ab\\u0d83e"{}:input '))
def test_no_arguments_raise(text: str) -> None:
    for begin in ("", '{"input": "'):
        CustomInput.of(begin + text).encode()


def test_cut_off() -> None:
    assert CustomInput.of('{"input": "one tw') == "one tw"
    assert CustomInput.of('{"input": "\\ud83d"}') == "\ufffd"
