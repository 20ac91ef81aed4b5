"""Live requests: every client gets one end, whichever process dies, and nothing is cancelled twice."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine.api import Abort, FinishReason, RequestOptions, SamplingParams, SetPriority
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.keys.caller import Caller, set_caller
from pagewood.server.messages import wire
from pagewood.server.requests.answer_queue import Take
from pagewood.server.requests.live import LiveRequests, new_request_id
from pagewood.server.requests.live_group import LiveGroup

LOST = unavailable("The engine process died.", code="engine_lost")


class Recorder:
    """A sender that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[wire.ToTokenizer] = []

    def send(self, frame: bytes) -> None:
        self.messages.append(wire.to_tokenizer.decode(frame))

    def take(self) -> list[str]:
        """Return the messages since the last call: `+id` for a request, `-id` a cancellation, `^id` a priority.

        Marks, which ask a new tokenizer for a sign of life, are left out.
        """
        signs: dict[type[wire.ToTokenizer], str] = {wire.Generate: "+", Abort: "-", SetPriority: "^"}
        words = [
            signs[type(m)] + m.request_id
            for m in self.messages
            if not isinstance(m, wire.Watch | wire.Encode | wire.Route)
        ]
        self.messages.clear()
        return words


def generate(request_id: str) -> wire.Generate:
    return wire.Generate(
        request_id=request_id,
        prompt=wire.TextPrompt(text="x"),
        options=RequestOptions(sampling=SamplingParams(max_tokens=9)),
    )


def answer(request_id: str, *, finish: FinishReason | None = None, ended: bool = False) -> wire.Answers:
    return wire.Answers((wire.Answer(request_id, "t", finish, ended, None, 1, 0, 1),))


def heard(group: LiveGroup) -> list[str]:
    """Return the answers and errors that the client of a group has got."""
    words: list[str] = []
    while not group.queue.empty():
        item = group.queue.get_nowait()
        words.append(f"{item[1].text} {item[1].finish}" if isinstance(item, tuple) else str(item))
    return words


def test_a_stop_string_cancels_in_the_engine_and_waits_for_its_confirmation() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt")
    live.take(answer("a", finish=FinishReason.STOP))
    assert sender.take() == ["+a", "-a"]
    assert (live.num_live, live.num_ending) == (0, 1)
    live.close(group)  # the response is complete
    assert sender.take() == []
    live.take(answer("a", finish=FinishReason.ABORT, ended=True))
    assert (live.num_live, live.num_ending) == (0, 0)
    assert heard(group) == ["t FinishReason.STOP"]


def test_a_request_that_ended_is_not_cancelled() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt")
    live.take(answer("a", finish=FinishReason.LENGTH, ended=True))
    live.close(group)
    assert sender.take() == ["+a"]


def test_a_cancellation_follows_its_request() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=9)
    groups = [live.submit([generate(name)], prompt_param="prompt") for name in "abc"]
    for group in groups:
        live.close(group)
    assert [sender.take() for sender in senders] == [["+a", "+c", "-a", "-c"], ["+b", "-b"]]


def test_a_priority_follows_all_prompts_of_its_request() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=9)
    live.submit([generate("a"), generate("b")], prompt_param="prompt", names=frozenset({"ab", "mine"}))
    live.submit([generate("c")], prompt_param="prompt", names=frozenset({"c", "mine"}))
    assert live.prioritize("ab", 3)
    assert not live.prioritize("a", 3)  # no client knows this name
    live.take(answer("a", finish=FinishReason.LENGTH, ended=True))
    assert live.prioritize("mine", 4)
    assert [sender.take() for sender in senders] == [["+a", "+c", "^a", "^c"], ["+b", "^b", "^b"]]


def test_all_answers_to_a_prompt_are_live() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=5)
    prompts = [msgspec.structs.replace(generate(name), sibling_ids=(name + "1", name + "2")) for name in "ab"]
    with pytest.raises(ApiError, match="at most 5 answers"):
        live.submit(prompts, prompt_param="prompt")
    live = LiveRequests(senders, limit=8)
    group = live.submit(prompts, prompt_param="prompt", names=frozenset({"mine"}))
    assert live.num_live == 6
    with pytest.raises(ApiError, match="already holds 8"):
        live.submit(prompts[:1], prompt_param="prompt")
    assert [sender.take() for sender in senders] == [["+a"], ["+b"]]
    live.take(answer("b1"))
    assert group.queue.get_nowait()[0] == 4  # pyright: ignore[reportIndexIssue]
    live.take(answer("a2", finish=FinishReason.LENGTH, ended=True))
    assert live.prioritize("mine", 3)
    assert [sender.take() for sender in senders] == [["^a", "^a1"], ["^b", "^b1", "^b2"]]
    live.close(group)
    assert [sorted(sender.take()) for sender in senders] == [["-a", "-a1"], ["-b", "-b1", "-b2"]]
    assert live.num_ending == 5


def submit_for(live: LiveRequests, tenant: str, num_requests: int, *, room: int = 0) -> LiveGroup:
    """Submit requests of a tenant."""
    prompts = [generate(new_request_id(tenant)) for _ in range(num_requests)]

    def submit() -> LiveGroup:
        set_caller(Caller(tenant=tenant))
        return live.submit(prompts, prompt_param="prompt", room=room)

    return copy_context().run(submit)


@pytest.mark.parametrize("held", ["live", "ending", "reserved"])
def test_no_tenant_takes_all_places(held: str) -> None:
    live = LiveRequests([Recorder()], limit=160)
    with pytest.raises(ApiError, match="at most 150 prompts"):
        submit_for(live, "a", 151)
    group = submit_for(live, "a", 1 if held == "reserved" else 150, room=150 if held == "reserved" else 0)
    if held == "ending":  # its client has left
        live.close(group)
    with pytest.raises(ApiError, match="already holds 150"):
        submit_for(live, "a", 1)
    for tenant, num_places in (("b", 5), ("c", 2), ("d", 1), ("e", 1)):
        for _ in range(num_places):
            submit_for(live, tenant, 1)
        with pytest.raises(ApiError, match="already holds 150"):
            submit_for(live, tenant, 1)
    assert live.incidents.refused["full"] == 5


def test_without_tenants_all_places_may_be_taken() -> None:
    live = LiveRequests([Recorder()], limit=160)
    submit_for(live, "", 160)
    with pytest.raises(ApiError, match="already holds 160"):
        submit_for(live, "", 1)


def test_the_prompts_of_an_http_request_are_a_group_for_the_tokenizer() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    group = live.submit([generate("a"), generate("b")], prompt_param="prompt")
    live.submit([generate("c")], prompt_param="prompt")
    found = {one.request_id: one.group_id for one in sender.messages if isinstance(one, wire.Generate)}
    assert found == {"a": "a", "b": "a", "c": ""}
    sender.messages.clear()
    live.lost(LOST)
    live.resume()
    again = [one.group_id for one in sender.messages if isinstance(one, wire.Generate)]
    assert again == ["a", "a", ""]
    live.close(group)


def test_a_dead_tokenizer_fails_what_was_in_it_and_nothing_else() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=9)
    groups = {name: live.submit([generate(name)], prompt_param="prompt") for name in "abcde"}
    live.take(answer("c"))  # has left its tokenizer
    live.close(groups["e"])  # its cancellation may be lost with the tokenizer
    for sender in senders:
        sender.take()
    live.tokenizer_lost(0)
    assert sorted(senders[0].take()) == ["-a", "-e"]
    assert senders[1].take() == []
    assert heard(groups["a"]) == ["The tokenizer of this request died."]
    assert heard(groups["b"]) == []
    assert heard(groups["c"]) == ["t None"]
    live.take(answer("c", finish=FinishReason.STOP, ended=True))
    assert heard(groups["c"]) == ["t FinishReason.STOP"]


def mark_of(sender: Recorder) -> str:
    """Return the id of the message that asks a new tokenizer for a sign of life, and forget all messages."""
    (mark,) = [message for message in sender.messages if isinstance(message, wire.Encode)]
    sender.messages.clear()
    return mark.request_id


def test_cancelled_requests_that_died_with_a_tokenizer_give_their_places_back() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=2)
    groups = [live.submit([generate(name)], prompt_param="prompt") for name in "ab"]
    canary = live.submit([generate("canary")], prompt_param="prompt", is_probe=True)
    for group in (*groups, canary):
        live.close(group)
    live.tokenizer_lost(0)
    assert sender.take() == ["+a", "+b", "+canary", "-a", "-b", "-canary", "-a", "-b", "-canary"]
    live.tokenizer_lost(0)  # the next one dies before it has passed on the cancellations
    assert live.num_ending == 3
    words = [type(message).__name__ for message in sender.messages]
    assert words == ["Abort", "Abort", "Abort", "Encode"]
    mark = mark_of(sender)
    live.take(answer("b", finish=FinishReason.ABORT, ended=True))  # the engine had this one
    assert live.num_ending == 2
    live.take(answer(mark, finish=FinishReason.STOP, ended=True))
    assert (live.num_ending, live.is_interrupted) == (0, False)
    live.submit([generate("c"), generate("d")], prompt_param="prompt")


def test_a_sign_of_life_that_was_lost_is_asked_for_again() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=9)
    live.tokenizer_lost(0)
    first = mark_of(senders[0])
    live.lost(LOST)  # the answer may be lost
    assert live.is_interrupted
    live.take(answer(first, finish=FinishReason.STOP, ended=True))  # of the dead engine
    live.resume()
    assert not live.is_interrupted
    live.submit([generate("a")], prompt_param="prompt")
    assert (senders[1].take(), live.num_ending) == (["+a"], 0)
    live.take(answer(mark_of(senders[0]), finish=FinishReason.STOP, ended=True))
    live.submit([generate("b")], prompt_param="prompt")
    assert senders[0].take() == ["+b"]


def test_nothing_goes_to_a_dead_tokenizer_while_another_one_works() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=20)
    live.tokenizer_lost(0)
    mark = mark_of(senders[0])
    for name in "abc":
        live.submit([generate(name)], prompt_param="prompt")
    live.watch(wire.Watch(for_s=1.0))
    assert any(isinstance(message, wire.Watch) for message in senders[1].messages)
    assert [sender.take() for sender in senders] == [[], ["+a", "+b", "+c"]]
    live.tokenizer_lost(1)  # none is left: they wait in both
    live.submit([generate("d"), generate("e")], prompt_param="prompt")
    assert [sender.take()[-1:] for sender in senders] == [["+d"], ["+e"]]
    live.take(answer(mark, finish=FinishReason.STOP, ended=True))
    live.submit([generate("f")], prompt_param="prompt")
    assert senders[0].take() == ["+f"]


def test_a_dead_engine_fails_all_requests_at_once() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=2)
    group, gone = [live.submit([generate(name)], prompt_param="prompt") for name in "ab"]
    live.close(gone)
    with pytest.raises(ApiError, match="already holds 2"):
        live.submit([generate("c")], prompt_param="prompt")
    sender.take()
    live.fail_all(LOST)
    assert sender.take() == ["-a"]  # it may still be on its way to the next engine
    assert heard(group) == ["The engine process died."]
    assert (live.num_live, live.num_ending) == (0, 0)
    live.take(answer("a"))  # a late message of the dead engine
    assert heard(group) == []


EVENTS = st.sampled_from(["submit", "submit2", "text", "stop", "end", "close", "tokenizer", "engine"])


@given(events=st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=40))
def test_every_client_gets_one_end(events: list[tuple[str, int]]) -> None:
    live = LiveRequests([Recorder(), Recorder()], limit=100)
    groups: list[LiveGroup] = []
    closed: set[int] = set()
    names: list[str] = []
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for event, choice in events:
        if event in ("submit", "submit2"):
            new = [f"{len(names) + i}" for i in range(1 + (event == "submit2"))]
            sizes[len(groups)] = len(new)
            groups.append(live.submit([generate(name) for name in new], prompt_param="prompt"))
            names += new
        elif event == "tokenizer":
            live.tokenizer_lost(choice % 2)
        elif event == "engine":
            live.fail_all(LOST)
        elif event == "close" and groups:
            live.close(groups[choice % len(groups)])
            closed.add(choice % len(groups))
        elif names:
            finish = {"text": None, "stop": FinishReason.STOP, "end": FinishReason.LENGTH}.get(event)
            live.take(answer(names[choice % len(names)], finish=finish, ended=event == "end"))
    live.fail_all(LOST)
    assert (live.num_live, live.num_ending) == (0, 0)
    for index, group in enumerate(groups):
        ends[index] = sum(word != "t None" for word in heard(group))
        assert ends[index] == sizes[index] or (index in closed and ends[index] < sizes[index])
        assert not group.open_ids


def test_errors_come_out_of_next() -> None:
    async def scenario() -> None:
        live = LiveRequests([Recorder()], limit=9)
        group = live.submit([generate("a")], prompt_param="messages")
        live.take(answer("a", finish=FinishReason.REFUSED, ended=True))
        with pytest.raises(ApiError, match="refused") as error:
            await group.next()
        assert error.value.status == 400

    asyncio.run(scenario())


def done(request_id: str) -> wire.Answers:
    return answer(request_id, finish=FinishReason.LENGTH, ended=True)


def test_a_group_with_room_keeps_it_until_it_is_closed() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=5)
    group = live.submit([generate("a")], prompt_param="prompt", room=3)
    other = live.submit([generate("b"), generate("c")], prompt_param="prompt")
    with pytest.raises(ApiError, match="already holds"):
        live.submit([generate("d")], prompt_param="prompt")
    live.take(done("a"))
    with pytest.raises(ApiError, match="already holds"):
        live.submit([generate("d")], prompt_param="prompt")
    live.extend(group, [generate("e"), generate("f"), generate("g")])
    assert live.num_live == 5
    live.take(done("e"))
    live.close(group)
    assert sender.take()[:5] == ["+a", "+b", "+c", "+e", "+f"]
    live.take(done("f"))
    live.take(done("g"))
    third = live.submit([generate("d"), generate("h"), generate("i")], prompt_param="prompt")
    assert other.open_ids | third.open_ids == {"b", "c", "d", "h", "i"}
    with pytest.raises(ApiError, match="expected at most 5 answers"):
        live.submit([generate("j")], prompt_param="prompt", room=6)


def test_a_group_between_two_steps_fails_with_the_engine_and_can_be_prioritized() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt", names=frozenset({"x"}), room=2)
    live.take(done("a"))
    assert live.prioritize("x", 7)
    live.extend(group, [generate("b")])
    (last,) = [message for message in sender.messages if getattr(message, "request_id", None) == "b"]
    assert isinstance(last, wire.Generate)
    assert last.options.priority == 7
    live.take(done("b"))
    heard(group)
    live.fail_all(LOST)
    assert heard(group) == [str(LOST)]
    live.close(group)
    assert not live.prioritize("x", 7)
    live.fail_all(LOST)
    assert heard(group) == []


async def next_of(group: LiveGroup, take: Take) -> wire.Answer:
    return (await group.next(take))[1]


@pytest.mark.anyio
async def test_answers_are_taken_at_once_while_a_reader_waits_and_in_order() -> None:
    live = LiveRequests([Recorder()], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt")
    taken: list[str] = []
    keeps_up = True

    def take(index: int, answer: wire.Answer) -> bool:
        if keeps_up and answer.finish is None:
            taken.append(answer.text)
        return keeps_up and answer.finish is None

    live.take(answer("a"))  # before there is a reader
    assert (await next_of(group, take)).text == "t"
    live.take(answer("a"))  # the reader is busy
    assert not taken
    assert (await next_of(group, take)).text == "t"
    reader = asyncio.create_task(next_of(group, take))
    await asyncio.sleep(0)
    live.take(answer("a"))
    live.take(answer("a"))
    assert taken == ["t", "t"]
    assert not reader.done()
    keeps_up = False
    live.take(answer("a"))
    keeps_up = True
    live.take(answer("a"))  # behind one that was not taken
    assert taken == ["t", "t"]
    await reader
    assert len(heard(group)) == 1
    live.close(group)


@pytest.mark.anyio
async def test_a_failure_to_take_an_answer_ends_its_reader_only() -> None:
    live = LiveRequests([Recorder()], limit=9)
    groups = [live.submit([generate(name)], prompt_param="prompt") for name in "ab"]

    def take(index: int, answer: wire.Answer) -> bool:
        if answer.request_id == "a":
            raise RuntimeError("cannot be shown")
        return False

    readers = [asyncio.create_task(next_of(group, take)) for group in groups]
    await asyncio.sleep(0)
    live.take(wire.Answers(tuple(one.answers[0] for one in (answer("a"), answer("b")))))
    with pytest.raises(RuntimeError, match="cannot be shown"):
        await readers[0]
    assert (await readers[1]).request_id == "b"
