from array import array

from pagewood.schedpolicy import DepthFirstWeight
from pagewood.schedpolicy.simulation import TraceRequest
from pagewood.schedpolicy.simulation.decoding import Decoding
from pagewood.schedpolicy.simulation.request import SimRequest

PAGE = 16


def waiting(arrival: int, keys: tuple[int, ...], *, num_prompt: int, num_matched: int) -> SimRequest:
    spec = TraceRequest(arrived_s=0.0, num_prompt=num_prompt, num_output=64, max_new_tokens=64)
    request = SimRequest(arrival, spec, keys, PAGE)
    request.num_matched = num_matched
    return request


def test_the_prefix_has_the_cached_output_too():
    request = waiting(0, (1, 2, 3, 4), num_prompt=2 * PAGE + 3, num_matched=0)
    assert request.prefix(4 * PAGE) == array("i", (1, 2, 3, 4)).tobytes()
    assert request.prefix(3 * PAGE - 1) == array("i", (1, 2)).tobytes()
    assert request.window(PAGE, 3 * PAGE) == array("i", (2, 3)).tobytes()


def test_a_preempted_request_whose_output_is_cached_comes_before_those_that_share_only_its_prompt():
    # As in pagewood-engine: its cached prefix is longer, so it rests below the others in the tree.
    order = DepthFirstWeight[SimRequest]()
    other = waiting(0, (1, 2, 7, 8), num_prompt=2 * PAGE, num_matched=2 * PAGE)
    preempted = waiting(1, (1, 2, 3, 4), num_prompt=2 * PAGE, num_matched=3 * PAGE)
    order.add(other)
    order.add(preempted)
    assert list(order.ordered(0.0)) == [preempted, other]


def test_a_request_that_comes_back_to_decode_is_found_beside_its_stale_entry():
    decoding = Decoding(page_size=PAGE)
    first, second = (waiting(7, (), num_prompt=20, num_matched=0) for _ in range(2))
    decoding.add(first)
    decoding.remove(first)
    decoding.add(second)  # it would end in the same step
    decoding.advance(decoding.steps_to_end)
    assert decoding.pop_ended() is second
    assert decoding.pop_ended() is None
