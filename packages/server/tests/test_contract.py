"""Answers are what `/openapi.json` says, whatever a client sends; found by schemathesis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")

from contract import check_contract, serving


@pytest.mark.parametrize("num_cases", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_answers_are_as_documented(model_folder: Path, num_cases: int) -> None:
    with serving(model_folder) as send:
        statuses = check_contract(send, num_cases=num_cases)
    assert set(statuses) <= {200, 400, 404, 413}
    assert statuses[200] > num_cases / 8  # valid requests are among them
    assert statuses[400] > num_cases / 8


def test_an_answer_that_is_not_as_documented_is_found(model_folder: Path) -> None:
    with serving(model_folder) as send:

        def altered(**request: Any) -> Any:
            response = send(**request)
            if request["url"].endswith("/tokenize") and response.status_code == 200:
                response._content = response.content.replace(b'"count":', b'"number":')
            return response

        with pytest.raises(BaseException, match="count"):
            check_contract(altered, num_cases=150)
