"""Chat templates that loop or grow without end are ended; honest ones render what plain jinja2 renders."""

# ruff: noqa: E501 (templates)
from __future__ import annotations

import resource
import time
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewood.engine.text import ChatTemplate, ChatTemplateError
from pagewood.engine.text.bounded_template import MAX_LENGTH, BoundedEnvironment

MESSAGES = [{"role": "user", "content": "Hi"}]
LIMIT_S = 0.1
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"

TOO_LONG = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
    "a caller": "{% macro f() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
    "pairs of pairs": "{% for a in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
}
TOO_MUCH = {
    "+ of texts": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "+ of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "~": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "~ in a filter": DOUBLE + "{% set ns.x = (ns.x ~ ns.x) | trim %}{% endfor %}",
    "~ in an argument": DOUBLE + "{% set ns.x = [ns.x ~ ns.x][0] %}{% endfor %}",
    "%": DOUBLE + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{{ ns.x }}{% endfor %}",
    "a block": DOUBLE + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "a filtered block": DOUBLE
    + "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% endfor %}",
    "join": DOUBLE + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "the method join": DOUBLE + "{% set ns.x = ns.x.join(['a', 'b', 'c']) %}{% endfor %}",
    "replace": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "the method replace": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('', 'aaaaaaaa') %}{% endfor %}",
    "output": "{% set x = 'a' * 9999 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "a count that is set back": "{% set x = 'a' * 9999 %}{% for a in range(99999) %}{{ [-10000] | map('pagewood tick') | list }}{{ x }}{% endfor %}",
    "* of a text": "{{ 'a' * 10 ** 11 }}",
    "* of a list": "{{ ([1] * 10 ** 11) | length }}",
    "* of numbers": "{% set ns = namespace(x=10 ** 2000) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "**": "{{ 10 ** (10 ** 10) > 1 }}",
    "** of a variable": "{% set x = 10 ** 12 %}{{ 2 ** x > 1 }}",
    "center": "{{ 'a' | center(10 ** 11) }}",
    "ljust": "{{ 'a'.ljust(10 ** 11) }}",
    "zfill": "{{ '1'.zfill(10 ** 11) }}",
    "expandtabs": "{{ '\t'.expandtabs(2 ** 30) }}",
    "indent": "{{ ('a\n' * 9999) | indent(10 ** 8) }}",
    "indent by name": "{{ ('a\n' * 9999) | indent(width=10 ** 8) }}",
    "batch": "{{ ['a'] | batch(10 ** 8, 0) | list | length }}",
    "batch by name": "{{ ['a'] | batch(linecount=10 ** 8, fill_with=0) | list | length }}",
    "slice": "{{ ['a'] | slice(10 ** 9) | list | length }}",
    "slice in a map": "{{ [['a']] | map('slice', 10 ** 9) | map('list') | list | length }}",
    "wordwrap": "{{ ('a' * 9999) | wordwrap(1, true, 'b' * 99999) | length }}",
    "round": "{{ 5 | round(-(10 ** 10)) }}",
    "round up": "{{ 5.5 | round(10 ** 10, 'ceil') }}",
    "join of attributes": "{{ range(9999) | map('string') | join('a' * 99999, attribute='x') | length }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) | length }}",
    "tojson of many lines": "{{ ([[[[1] * 9]]] * 9999) | tojson(indent=20000) | length }}",
    "tojson with a text": "{{ ([[[[1] * 9]]] * 9999) | tojson(indent='a' * 20000) | length }}",
    "% with a width": "{{ '%100000000000d' % 5 }}",
    "% with a computed width": "{{ '%*d' % (100000000000, 5) }}",
    "format": "{{ '%100000000000d' | format(5) }}",
    "the method format": "{{ '{:100000000000}'.format(5) }}",
}


def rendered(source: str, **variables: Any) -> str:
    template = ChatTemplate(source, special_tokens={}, max_seconds=LIMIT_S)
    return template.render(MESSAGES, template_kwargs=variables)


@pytest.mark.parametrize("source", TOO_LONG.values(), ids=TOO_LONG)
def test_a_template_that_takes_too_long_is_ended(source: str) -> None:
    start_s = time.thread_time()
    with pytest.raises(ChatTemplateError, match="was ended: it takes too long"):
        rendered(source)
    assert time.thread_time() - start_s < LIMIT_S + 0.5


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_that_makes_too_much_is_ended(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match="was ended: it makes too much text"):
        ChatTemplate(source, special_tokens={}).render(MESSAGES)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 12 * MAX_LENGTH / 1024, "a list of the longest length has 8 bytes for each item"


@pytest.mark.parametrize("source", ["{{ lipsum(10 ** 9) }}", "{{ cycler.__init__.__globals__ }}"])
def test_what_the_sandbox_lacks(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        rendered(source)


@pytest.mark.parametrize("source", ["{{ " + "(" * 100_000, "{% if a %}" * 5000])
def test_a_source_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        rendered(source)


def test_each_rendering_has_its_own_time() -> None:
    template = ChatTemplate(
        "{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}", special_tokens={}, max_seconds=5
    )
    for _ in range(5):
        assert template.render(MESSAGES) == "Hi" * 9999


def test_long_conversations_are_rendered() -> None:
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' ~ m.content ~ '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}] * 5000
    assert ChatTemplate(source, special_tokens={}).render(messages) == ("<|user|>" + "x" * 1000 + "\n") * 5000


HONEST = [
    "{{ a ~ b ~ 1 ~ none ~ missing }}", "{{ a + b }}{{ [a] + [b] }}{{ 2 * 3 }}{{ a * 3 }}{{ 3 * [a] }}", "{{ 7 % 3 }}{{ '%s-%5d' % (a, 7) }}",
    "{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 / 2 }}", "{{ [a, b] | join(', ') }}{{ [a, b] | join }}{{ ', '.join([a, b]) }}",
    "{{ [a, b, 1] | batch(2, 0) | list }}{{ [a, b] | slice(3) | list }}{{ a | wordwrap(2, true, b) }}",
    "{{ 2.345 | round(2) }}{{ 25 | round(-1) }}{{ 2.1 | round(method='ceil') }}{{ [1, {'a': b}] | tojson(indent=2) }}",
    "{{ [{'x': a}, {'x': b}] | join('-', attribute='x') }}", "{{ (a ~ '\n' ~ b) | indent }}{{ (a ~ '\n' ~ b) | indent('>>', true) }}",
    "{{ (a ~ '\n' ~ b) | indent(width=2, first=true, blank=true) }}", "{{ a | center(9) }}{{ a.center(9) }}{{ a.rjust(9, '-') }}",
    "{{ a | replace('x', 'yy') }}{{ a | replace(old='', new='-') }}{{ a.replace('x', 'yy', 1) }}", "{{ '%s|%s' | format(a, b) }}",
    "{{ '{} {x}'.format(a, x=b) }}", "{% for c in a if c != 'x' %}{{ loop.index }}{{ c }}{% else %}none{% endfor %}",
    "{% macro m(x, y=1) %}{{ x ~ y }}{{ caller() if caller else '' }}{% endmacro %}{{ m(a) }}{% call m(b) %}{{ a }}{% endcall %}",
    "{% set x %}{{ a }}{% if b %}{{ b }}{% endif %}{% endset %}{{ x | upper }}", "{% filter upper %}{{ a ~ b }}{% endfilter %}",
    "{% for x in [[a, [b]]] recursive %}{% if x is string %}{{ x }}{% else %}{{ loop(x) }}{% endif %}{% endfor %}",
    "{{ a.split('x') | map('length') | sum }}{{ a[::-1] }}{{ a.encode() }}", "{% with x = a ~ b %}{{ x }}{% endwith %}{{ (a ~ b) if a else b }}",
]  # fmt: skip


@given(st.sampled_from(HONEST), st.text(alphabet="xyz\n\t ", max_size=9), st.text(alphabet="xy{}%", max_size=9))
def test_honest_templates_render_as_in_plain_jinja2(source: str, a: str, b: str) -> None:
    bounded = BoundedEnvironment()
    plain = ImmutableSandboxedEnvironment().from_string(source)
    template = bounded.bounded(source, variables={})
    bounded.bounds.begin(5.0, MAX_LENGTH)
    assert _outcome(template, a, b) == _outcome(plain, a, b)


def _outcome(template: jinja2.Template, a: str, b: str) -> str:
    try:
        return template.render(a=a, b=b)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return type(error).__name__
