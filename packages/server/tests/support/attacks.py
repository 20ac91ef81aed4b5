"""Requests that are made to exhaust a server, as data, and the process that sends them.

`python attacks.py NAME ADDRESS KEY` prints a line when it begins to send, goes on until its standard input ends, and
then prints how its requests ended, as JSON.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from sending import INDEX, NO_END, Attack, Sending

MODEL = "pagewood-demo"


def chat(text: str = "Once", **fields: Any) -> Callable[[], dict[str, Any]]:
    """Return what makes a body with one message."""
    return lambda: {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 64, **fields}


def completion(prompt: Any = "Once", **fields: Any) -> Callable[[], dict[str, Any]]:
    """Return what makes the body of a completion."""
    return lambda: {"model": MODEL, "prompt": prompt, "max_tokens": 64, **fields}


def schema(value: dict[str, Any], **fields: Any) -> Callable[[], dict[str, Any]]:
    """Return what makes a body with a JSON schema, which differs in each request."""
    described = {"description": INDEX, **value}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": described}}
    return chat(response_format=form, **fields)


def listed(kind: str, *, number: int) -> Callable[[], bytes]:
    """Return what makes a body with an array of small values in a field."""

    def make() -> bytes:
        values = ",".join(["1"] * number)
        return b'{"model": "%s", "%s": [%s]}' % (MODEL.encode(), kind.encode(), values.encode())

    return make


def messages_of(number: int, text: str = "a") -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(number)]


def functions_of(number: int, num_properties: int) -> list[dict[str, Any]]:
    properties = {f"property_{i}": {"type": "string", "maxLength": 40} for i in range(num_properties)}
    return [
        {"type": "function", "function": {"name": f"f{INDEX}_{i}", "parameters": {"properties": properties}}}
        for i in range(number)
    ]


OK = frozenset({"200"})
WRONG = frozenset({"400 invalid_value"})
TOO_MANY = frozenset({"400 too_many_values"})
TOO_LONG = frozenset({"400 context_length_exceeded", "400 text_too_long"})
UNENDED = frozenset({NO_END, "200", "429", "503"})
SLOW_GRAMMAR = frozenset(
    {"200", "400 invalid_grammar", "400 grammar_failed", "422 grammar_failed", "400 grammar_timeout", NO_END}
)
LARGE = 15_500_000
"""Bytes, a little less than `--max-body-bytes`."""
FITS = 4 << 20
"""Characters of the longest text that is encoded."""

_AMBIGUOUS = f'start: start start | "a{INDEX}"' + "".join(f' | "b{i}"' for i in range(1_000))
_NESTED_TEXT = 'start: (a | b)*\na: /[a-z ]{1,400}/\nb: /[ -~]{1,400}/ | "x" a\n// ' + INDEX
_EBNF = f"root ::= (a | b)+\na ::= [a-z]{{1,200}} a? | b{INDEX}\nb{INDEX} ::= [ -~]{{1,200}}\nb ::= a | a a"
_TAGS = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": f"<f{i}{INDEX}>",
            "schema": {"type": "object", "properties": {"a": {"type": "string"}}},
            "end": "</f>",
        }
        for i in range(200)
    ],
    "triggers": ["<f"],
}

ATTACKS: tuple[Attack, ...] = (
    # Fields without a natural end.
    Attack(name="stop strings of 1 MB", body=chat(stop=["a" * 65_536] * 16, n=8), ends=WRONG),
    Attack(
        name="stop strings as long as they may be",
        body=chat(stop=[f"{i:04}" + "a" * 1_020 for i in range(16)], n=8, max_tokens=1_000),
        ends=OK,
    ),
    Attack(name="bad words of 1 MB", body=chat(bad_words=["a" * 8_192] * 128), ends=WRONG),
    Attack(
        name="as many bad words as there may be", body=chat(bad_words=[f"{i} a" for i in range(128)], n=16), ends=OK
    ),
    Attack(
        name="stop expressions of many states",
        body=chat(stop_regex=[f"([a-z]{{1,10}} ){{1,20}}{i}$" for i in range(4)], n=8, max_tokens=500),
        ends=OK | WRONG,
    ),
    Attack(name="300,000 biases", body=chat(logit_bias={str(i): 1 for i in range(300_000)}), ends=TOO_MANY),
    Attack(
        name="as many biases as there may be",
        body=chat(logit_bias={str(i % 512): 1 for i in range(1_024)}, n=16),
        ends=OK,
    ),
    Attack(
        name="model name of 15 MB",
        body=lambda: {"model": "m" * LARGE, "prompt": ""},
        path="/v1/completions",
        ends=frozenset({"404 model_not_found"}),
    ),
    Attack(name="user of 15 MB", body=chat(user="u" * LARGE, max_tokens=1), ends=OK),
    Attack(
        name="metadata of 60,000 entries",
        body=chat(metadata={f"k{i}": "v" for i in range(60_000)}, max_tokens=1),
        ends=OK,
    ),
    Attack(
        name="100,000 unknown fields",
        body=lambda: {"model": MODEL, **{f"k{i}": 1 for i in range(100_000)}},
        ends=frozenset({"400 invalid_value", "400 unknown_parameter"}),
    ),
    Attack(
        name="variables of the template",
        body=chat(chat_template_kwargs={f"k{i}": "v" * 100 for i in range(60_000)}),
        ends=OK | frozenset({"400 invalid_messages"}),
    ),
    Attack(
        name="a template of one's own",
        body=chat(chat_template="{{ 'a' * 100000000 }}"),
        ends=frozenset({"400 unsupported_parameter"}),
    ),
    # Shapes of JSON.
    Attack(name="JSON of 5 million levels", body=lambda: b"[" * 5_000_000, ends=TOO_MANY),
    Attack(
        name="JSON of 16,000 levels",
        body=lambda: b'{"messages":' + b"[" * 16_000 + b"]" * 16_000 + b"}",
        ends=frozenset({"400 invalid_json", "400 invalid_request_error"}),
    ),
    Attack(name="15 MB of numbers", body=listed("stop_token_ids", number=7_000_000), ends=TOO_MANY),
    Attack(name="15 MB of messages", body=lambda: {"model": MODEL, "messages": messages_of(380_000)}, ends=TOO_MANY),
    Attack(
        name="as many messages as there may be",
        body=lambda: {"model": MODEL, "messages": messages_of(16_000)},
        ends=TOO_LONG,
    ),
    Attack(
        name="as many parts as there may be",
        body=lambda: {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16_000}],
        },
        ends=TOO_LONG,
    ),
    Attack(
        name="documents for the template",
        body=chat(documents=[{"title": "t", "text": "a" * 400} for _ in range(16_000)]),
        ends=OK | TOO_LONG,
    ),
    Attack(
        name="a schema of 15 MB in a tool",
        body=chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"description": "a" * LARGE}}}]),
        ends=OK | WRONG | TOO_LONG | frozenset({"400 invalid_grammar"}),
    ),
    Attack(
        name="as many tools as there may be",
        body=chat(tools=functions_of(1_024, 10)),
        ends=OK | TOO_LONG | frozenset({"400 invalid_grammar", "400 invalid_value"}),
    ),
    Attack(
        name="tools that must be called",
        body=chat(tools=functions_of(40, 100), tool_choice="required"),
        ends=SLOW_GRAMMAR | TOO_LONG | WRONG,
    ),
    # Long texts.
    Attack(name="chat of 15 MB", body=chat("word " * (LARGE // 5)), ends=TOO_LONG),
    Attack(name="chat of spaces", body=chat(" " * FITS), ends=TOO_LONG | OK),
    Attack(name="completion of 15 MB", path="/v1/completions", body=completion("x" * LARGE), ends=TOO_LONG),
    Attack(
        name="1.2 million token ids", path="/v1/completions", body=listed("prompt", number=1_199_990), ends=TOO_LONG
    ),
    Attack(
        name="128 prompts of all tokens that fit",
        path="/v1/completions",
        body=completion([[5 + i % 90, *([9] * 1_900)] for i in range(128)], max_tokens=2),
        ends=UNENDED,
    ),
    Attack(
        name="prompts with all their log probabilities",
        path="/v1/completions",
        body=completion([7] * 2_000, max_tokens=1, prompt_logprobs=64),
        num_parallel=1,
        ends=UNENDED,
    ),
    Attack(
        name="echo with log probabilities",
        path="/v1/completions",
        body=completion("a " * 900, max_tokens=1, echo=True, logprobs=5, n=8),
        ends=OK,
    ),
    # Long answers.
    Attack(
        name="128 answers with all log probabilities",
        path="/v1/completions",
        body=completion(n=128, logprobs=64, max_tokens=200, ignore_eos=True),
        num_parallel=1,
        ends=UNENDED,
    ),
    Attack(
        name="128 streams in one with log probabilities",
        body=chat(n=128, logprobs=True, top_logprobs=20, max_tokens=200, stream=True),
        num_parallel=1,
        ends=UNENDED,
    ),
    Attack(
        name="32 beams",
        path="/v1/completions",
        body=completion(use_beam_search=True, n=32, max_tokens=200),
        ends=UNENDED,
    ),
    Attack(
        name="answers that nobody reads",
        body=chat(stream=True, logprobs=True, top_logprobs=20, max_tokens=1_500, ignore_eos=True),
        send=Sending.unread,
        ends=UNENDED,
    ),
    Attack(
        name="clients that leave at once",
        body=chat(max_tokens=1_500, ignore_eos=True, n=8),
        send=Sending.leave,
        num_parallel=1,
        ends=UNENDED,
    ),
    # Grammars; each request has another one.
    Attack(
        name="Lark: ambiguous", body=chat(guided_grammar=_AMBIGUOUS, max_tokens=500), num_parallel=8, ends=SLOW_GRAMMAR
    ),
    Attack(
        name="Lark: long expressions",
        body=chat(guided_grammar=_NESTED_TEXT, max_tokens=500),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="Lark: of 64 kB",
        body=chat(guided_grammar='start: a*\na: "a" | "' + '" | "'.join(f"{INDEX}{i}" for i in range(3_500)) + '"'),
        ends=SLOW_GRAMMAR,
    ),
    Attack(name="EBNF: ambiguous", body=chat(guided_grammar=_EBNF, max_tokens=500), num_parallel=8, ends=SLOW_GRAMMAR),
    Attack(
        name="expression: nested repetition",
        body=chat(guided_regex=f"((([a-z]{{1,30}} ){{1,30}}){{1,30}}x){{1,30}}{INDEX}", max_tokens=500),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="expression: many states",
        body=chat(guided_regex=rf"(.{{0,400}}a[a-z ]{{200}}|.{{0,300}}e.{{150}})*{INDEX}", max_tokens=500),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="expression: alternatives",
        body=chat(
            guided_regex="(" + "|".join(f"[a-z]{{{i},{i + 40}}}" for i in range(1, 120)) + f")*{INDEX}", max_tokens=500
        ),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: 10,000 enums", body=schema({"enum": [f"value {i}" for i in range(10_000)]}), ends=SLOW_GRAMMAR
    ),
    Attack(
        name="schema: big bounds",
        body=schema(
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": "integer", "minimum": -(10**15), "maximum": 10**15, "multipleOf": 9_973}},
            }
        ),
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: 1,000 optional properties",
        body=schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1_000)}}),
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: a ladder of allOf",
        body=schema(
            {
                "$ref": "#/$defs/a0",
                "$defs": {
                    **{
                        f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
                        for i in range(24)
                    },
                    "a24": {"type": "object", "properties": {"x": {"type": "integer"}}},
                },
            }
        ),
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: patterns",
        body=schema(
            {
                "type": "object",
                "required": ["a", "b"],
                "additionalProperties": False,
                "properties": {
                    "a": {"type": "string", "pattern": "^([a-z]{1,50} ?){1,50}$", "maxLength": 1_000},
                    "b": {"type": "string", "pattern": "^(.*a.{30}){1,20}$"},
                },
            },
            max_tokens=500,
        ),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: long strings",
        body=schema(
            {"type": "array", "minItems": 3, "items": {"type": "string", "minLength": 100, "maxLength": 3_000}},
            max_tokens=500,
        ),
        num_parallel=16,
        ends=SLOW_GRAMMAR,
    ),
    Attack(
        name="schema: anything of anything",
        body=schema(
            {
                "$defs": {
                    "v": {
                        "anyOf": [
                            {"type": "array", "items": {"$ref": "#/$defs/v"}},
                            {"type": "object", "additionalProperties": {"$ref": "#/$defs/v"}},
                            {},
                        ]
                    }
                },
                "$ref": "#/$defs/v",
            },
            max_tokens=500,
        ),
        num_parallel=8,
        ends=SLOW_GRAMMAR,
    ),
    Attack(name="choices: 10,000", body=chat(guided_choice=[f"{INDEX} {i}" for i in range(9_000)]), ends=SLOW_GRAMMAR),
    Attack(name="structural tags: 200", body=chat(structural_tag=_TAGS, max_tokens=500), ends=SLOW_GRAMMAR),
    # HTTP.
    Attack(
        name="gzip bomb",
        body=lambda: gzip.compress(b" " * 4_000_000_000, 9)[:LARGE],
        headers=("Content-Encoding: gzip",),
        ends=frozenset({"413 request_too_large"}),
    ),
    Attack(name="slow heads", send=Sending.slow_heads, ends=UNENDED),
    Attack(name="slow bodies", send=Sending.slow_bodies, ends=UNENDED),
    Attack(name="idle connections", send=Sending.idle, num_parallel=8, ends=UNENDED),
    Attack(
        name="a thousand requests for health in a row",
        method="GET",
        path="/health",
        send=Sending.pipelined,
        ends=UNENDED,
    ),
    Attack(name="a thousand chats in a row", body=chat(max_tokens=4), send=Sending.pipelined, ends=UNENDED),
    Attack(
        name="chunks of one byte",
        body=lambda: b'{"a": "' + b"a" * 200_000,
        send=Sending.tiny_chunks,
        ends=frozenset({"400 invalid_json"}),
    ),
    Attack(name="heads of 60 kB", method="GET", path="/v1/models", headers=("X: " + "a" * 60_000,), ends=OK),
    Attack(
        name="heads of 200 kB",
        method="GET",
        path="/v1/models",
        headers=("X: " + "a" * 200_000,),
        ends=frozenset({"431 headers_too_large"}),
    ),
    Attack(
        name="upgrades",
        headers=("Upgrade: websocket", "Connection: Upgrade"),
        body=chat(max_tokens=1),
        ends=OK | frozenset({NO_END}),
    ),
    Attack(
        name="wrong keys",
        path="/v1/models",
        method="GET",
        key="w" * 40,
        num_parallel=8,
        ends=frozenset({"401 invalid_api_key"}),
    ),
    Attack(
        name="a name of 60 kB for 128 prompts",
        path="/v1/completions",
        headers=("X-Client-Request-Id: " + "n" * 60_000,),
        body=lambda: {"model": MODEL, "prompt": ["a"] * 128, "max_tokens": 1},
        ends=WRONG,
    ),
    Attack(name="the documentation", method="GET", path="/openapi.json", num_parallel=8, ends=OK),
    # The other protocols.
    Attack(
        name="embeddings: 1,000 inputs",
        path="/v1/embeddings",
        body=lambda: {"model": MODEL, "input": [f"{i} " + "word " * 30 for i in range(1_000)]},
        ends=OK | frozenset({"429 overloaded"}),
    ),
    Attack(
        name="embeddings: 100,000 inputs",
        path="/v1/embeddings",
        body=lambda: {"model": MODEL, "input": ["a"] * 100_000},
        ends=WRONG,
    ),
    Attack(
        name="rerank: 1,000 documents",
        path="/v1/rerank",
        body=lambda: {"model": MODEL, "query": "q", "documents": [f"{i} " + "word " * 30 for i in range(1_000)]},
        ends=OK | frozenset({"429 overloaded"}),
    ),
    Attack(
        name="score: 1,000 texts",
        path="/v1/score",
        body=lambda: {"model": MODEL, "text_1": "q", "text_2": [f"{i} " + "word " * 30 for i in range(1_000)]},
        ends=OK | frozenset({"429 overloaded"}),
    ),
    Attack(
        name="tokenize: 15 MB",
        path="/tokenize",
        body=lambda: {"text": "word " * (LARGE // 5)},
        ends=frozenset({"400 text_too_long"}),
    ),
    Attack(name="tokenize: the longest text", path="/tokenize", body=lambda: {"text": "word " * (FITS // 5)}, ends=OK),
    Attack(
        name="tokenize: one word",
        path="/tokenize",
        body=lambda: {"text": "x" * FITS},
        ends=frozenset({"400 text_too_long"}),
    ),
    Attack(name="tokenize: most tokens", path="/tokenize", body=lambda: {"text": "1" * (1 << 20)}, ends=OK),
    Attack(
        name="tokenize: with pieces",
        path="/tokenize",
        body=lambda: {"text": "a" * 8_000, "return_pieces": True},
        num_parallel=8,
        ends=OK,
    ),
    Attack(name="detokenize: 1.2 million ids", path="/detokenize", body=listed("tokens", number=1_199_990), ends=OK),
    Attack(
        name="apply_template: 4 MB",
        path="/apply_template",
        body=lambda: {"messages": messages_of(800, "word " * 1_000)},
        ends=OK,
    ),
    Attack(
        name="generate: 128 inputs of ids",
        path="/generate",
        body=lambda: {
            "input_ids": [[5 + i % 90, *([9] * 1_900)] for i in range(128)],
            "sampling_params": {"max_new_tokens": 2},
        },
        ends=UNENDED,
    ),
    Attack(
        name="retain: long text",
        path="/retain",
        body=lambda: {"text": "word " * (FITS // 5), "seconds": 10},
        ends=frozenset({"400 no_retention"}),
    ),
    Attack(
        name="abort: unknown",
        path="/abort",
        body=lambda: {"rid": INDEX},
        num_parallel=8,
        ends=OK | frozenset({"404 request_not_found"}),
    ),
    Attack(
        name="Ollama: messages",
        path="/api/chat",
        body=lambda: {"model": MODEL, "messages": messages_of(16_000), "stream": False},
        ends=frozenset({"400"}) | TOO_LONG,
    ),
    Attack(
        name="Ollama: unknown options",
        path="/api/chat",
        body=lambda: {
            "model": MODEL,
            "messages": messages_of(1),
            "stream": False,
            "options": {"num_predict": 1, **{f"k{i}": 1 for i in range(60_000)}},
        },
        ends=OK | WRONG | frozenset({"400"}),
    ),
    Attack(
        name="Ollama: long text",
        path="/api/generate",
        body=lambda: {"model": MODEL, "prompt": "word " * (LARGE // 5), "stream": False},
        ends=frozenset({"400"}) | TOO_LONG,
    ),
    Attack(
        name="Ollama: embed",
        path="/api/embed",
        body=lambda: {"model": MODEL, "input": ["word " * 800] * 1_000},
        ends=OK | frozenset({"429"}),
    ),
    Attack(
        name="Ollama: a text of 15 MB that is cut",
        path="/api/embed",
        body=lambda: {"model": MODEL, "input": "word " * (FITS // 5)},
        ends=OK | frozenset({"400"}),
    ),
    Attack(
        name="Messages: count tokens of 4 MB",
        path="/v1/messages/count_tokens",
        body=lambda: {"model": MODEL, "messages": [{"role": "user", "content": "word " * (FITS // 5 - 100)}]},
        ends=OK,
    ),
    Attack(
        name="Messages: as many blocks as there may be",
        path="/v1/messages",
        body=lambda: {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16_000}],
        },
        ends=frozenset({"400 invalid_request_error", "400 error"}),
    ),
    Attack(
        name="Messages: stop sequences of 1 MB",
        path="/v1/messages",
        body=lambda: {
            "model": MODEL,
            "max_tokens": 4,
            "messages": messages_of(1),
            "stop_sequences": ["a" * 65_536] * 16,
        },
        ends=frozenset({"400 invalid_request_error", "400 error"}),
    ),
    Attack(
        name="Responses: as many items as there may be",
        path="/v1/responses",
        body=lambda: {"model": MODEL, "input": messages_of(16_000), "max_output_tokens": 16},
        ends=TOO_LONG,
    ),
    Attack(
        name="Responses: an unknown response before",
        path="/v1/responses",
        body=lambda: {"model": MODEL, "input": "a", "previous_response_id": f"resp_{INDEX}"},
        ends=frozenset({"400 previous_response_not_found", "404 previous_response_not_found"}),
    ),
    Attack(
        name="Responses: kept",
        path="/v1/responses",
        body=lambda: {"model": MODEL, "input": "word " * 300, "max_output_tokens": 16, "metadata": {"a": "b" * 500}},
        num_parallel=8,
        ends=OK,
    ),
)
BY_NAME = {attack.name: attack for attack in ATTACKS}


def main() -> None:
    """Attack until standard input ends."""
    name, address, key = sys.argv[1:]
    host, _, port = address.rpartition(":")
    attack = BY_NAME[name]
    body = attack.body()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    counts: Counter[str] = Counter()
    is_over = threading.Event()
    sending = Sending(
        attack=attack, address=(host, int(port)), key=key, content=content, is_over=is_over, counts=counts
    )
    threads = [threading.Thread(target=attack.send, args=(sending,)) for _ in range(attack.num_parallel)]
    print("begins", flush=True)
    for thread in threads:
        thread.start()
    sys.stdin.read()
    is_over.set()
    for thread in threads:
        thread.join(10)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
