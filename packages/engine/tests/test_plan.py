"""What the planner knows of the prompts in progress, against a look at all of them."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.core.plan import PromptsInProgress
from pagewood.engine.core.state import Request
from pagewood.engine.testing import make_request


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Draw a request whose first tokens are everybody's, and which then goes its own way."""
    num_prompt = draw(st.sampled_from([20, 32, 36, 37, 48, 80]))
    num_shared = min(num_prompt, draw(st.sampled_from([31, 32, 36, 80])))
    own = draw(st.integers(2, 3))
    request = make_request([1] * num_shared + [own] * (num_prompt - num_shared))
    request.namespace = draw(st.sampled_from([None, None, "tenant"]))
    request.num_known += draw(st.sampled_from([0, 0, 1]))
    request.num_published = draw(st.sampled_from([0, 0, 2, 8, 9]))
    request.num_matched = draw(st.sampled_from([0, 0, 4, 16]))
    request.num_computed = draw(st.sampled_from([request.num_matched, request.num_matched, num_prompt]))
    return request


def repeats(request: Request, running: Sequence[Request], page_size: int) -> bool:
    """Whether a prompt in progress will publish 32 tokens more of this request than are cached, in whole pages."""
    end = request.num_matched + -(-32 // page_size) * page_size
    return end < request.num_known and any(
        other.num_computed < other.num_prompt
        and other.num_published * page_size < end <= other.num_prompt
        and other.namespace == request.namespace
        and other.tokens[:end].tolist() == request.tokens[:end].tolist()
        for other in running
    )


@settings(max_examples=300)
@given(st.lists(requests(), max_size=4), st.lists(requests(), max_size=6), st.sampled_from([1, 4, 16]))
def test_a_repeated_prompt_is_found(running: list[Request], candidates: list[Request], page_size: int) -> None:
    in_progress = PromptsInProgress(running, page_size=page_size)
    for candidate in candidates:
        is_repeat = repeats(candidate, running, page_size)
        assert in_progress.are_repeated_by(candidate) == is_repeat
        if not is_repeat:
            in_progress.add(candidate)
            running = [*running, candidate]
