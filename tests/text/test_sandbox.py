"""A hostile template reaches nothing, and its work is bounded."""

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.text import budget as budgets
from quire.text.budget import Budget, OutOfBudget
from quire.text.chat import ChatTemplate
from tests.patience import WAIT_S


def render(source: str, content: Any = "Hi", **variables: Any) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": content}], variables=variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ ().__class__ | string }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__}'.format_map({'0': messages}) }}",
        "{{ 'a'.format.__self__ }}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ open('/etc/passwd') }}",
        "{{ environment.loader.load() }}",
        "{{ context.budget.spend(1) }}",
        "{{ lipsum(10) }}",
    ],
)
def test_nothing_beyond_the_data_is_within_reach(source: str) -> None:
    try:
        reached = render(source)
    except InvalidRequest:
        reached = ""
    assert reached == ""


def test_attributes_that_filters_would_look_up_are_undefined() -> None:
    assert render("{{ messages | attr('__class__') }}|{{ ['a'] | map(attribute='__class__') | list | length }}") == "|1"
    assert render("{{ ['a'] | map(attribute='__class__') | join }}") == ""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stops nothing: a busy machine is no fault of a template."""
    monkeypatch.setattr(budgets, "_SECONDS", WAIT_S)


DOUBLING = [
    "ns.x ~ ns.x",
    "ns.x + ns.x",
    "ns.x * 2",
    "[ns.x, ns.x]",
    "(ns.x, ns.x)",
    "{'a': ns.x, 'b': ns.x}",
    "dict(a=ns.x, b=ns.x)",
    "[ns.x] * 2",
    "[ns.x] + [ns.x]",
    "ns.x | replace('a', 'aa')",
    "ns.x.replace('a', 'aa')",
    "[ns.x, ns.x] | join",
    "''.join([ns.x, ns.x])",
    "'%s%s' % (ns.x, ns.x)",
    "'%s%s' | format(ns.x, ns.x)",
    "'{0}{0}'.format(ns.x)",
    "ns.x | list + ns.x | list",
    "[ns.x] | batch(2, ns.x) | list",
]


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("expression", DOUBLING)
def test_what_doubles_is_stopped(expression: str) -> None:
    source = (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = " + expression + " %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match=r"characters.* the limit"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
        "{% set environment = namespace() %}{% set context = 1 %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ '\\t'.expandtabs(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | center(width=1000000000) }}",
        "{{ 'a' | indent(1000000000, first=true) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ {'a': 1} | tojson(indent=1000000000) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000s' | format('x') }}",
        "{{ '%((a))1000000000d' % {'(a)': 1} }}",
        "{{ ('{0:>9999}' * 100000).format(1) }}",
        "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
        "{{ ('<!--a-->' * 100000) | striptags }}",
        "{{ (('<!--a-->' * 100000) | safe).striptags() }}",
        "{{ ('a ' * 100000) | wordwrap(1) }}",
        "{{ (')' * 100000 ~ 'x') | urlize }}",
        "{{ ['a' * 1000000] * 1000000 }}",
        "{{ (['a' * 1000000] * 4) | join | replace('a', 'b' * 1000000) }}",
        "{{ range(99999999) | list }}",
    ],
)
def test_what_would_not_end_or_not_fit_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the limit|MAX_RANGE"):
        render(source)


@pytest.mark.usefixtures("unhurried")
def test_ordinary_work_is_far_from_the_limits() -> None:
    source = (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + m.role + m.content | trim %}"
        "{{ m.content ~ '%5d' % 3 ~ '{:>8}'.format('x') ~ m.content | indent(4) }}{{ messages | list | length }}"
        "{{ m | tojson(indent=2) | length }}{% endfor %}{{ ns.out | length }}"
    )
    template = ChatTemplate(source)
    for num_messages, length in ((1000, 10), (10, 100_000), (1, 5_000_000)):
        messages = [{"role": "user", "content": "x" * length}] * num_messages
        assert template.render(messages).endswith(str(num_messages * (length + 4)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '{:*>10}'.format('x') }}", "*********x"),
        ("{{ '{{a:12345}} {0:3}'.format('x') }}", "{a:12345} x  "),
        ("{{ '%-3s%%%05.1f' % ('x', 1) }}", "x  %001.0"),
        ('{{ \'{"a": "%s", "b": {"c": %s}}\' | format(\'x\', 12345) }}', '{"a": "x", "b": {"c": 12345}}'),
        ("{{ '%(a)s%(b)s' | format(a=1, b='b') }}", "1b"),
        ("{{ '<b>a</b> b' | striptags }}{{ 'a b' | wordwrap(1) }}", "a ba\nb"),
    ],
)
def test_formats_are_written(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content.format() }}", "{" + ":" * 2_000_000),
        ("{{ messages[0].content.format() }}", "{" * 2_000_001),
        ("{{ messages[0].content % () }}", "%(" * 1_000_000),
        ("{{ messages[0].content % () }}", "%" + "0" * 2_000_000),
    ],
)
def test_formats_that_are_wrong_are_read_once(source: str, content: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, content)


def test_the_clock_stops_what_nothing_else_does() -> None:
    now = [0.0]
    budget = Budget(0, clock=lambda: now[0])
    budget.spend(1)
    now[0] = 11.0
    with pytest.raises(OutOfBudget, match="10 s, the limit"):
        budget.spend(1)


def test_loops_keep_their_variables() -> None:
    source = (
        "{% for a, b in {'x': 1, 'y': 2}.items() if b %}"
        "{{ loop.index }}{{ loop.length }}{{ loop.last }}{{ loop.revindex }}"
        "{{ loop.previtem is defined }}{{ loop.cycle('p', 'q') }}{{ a }}{{ b }};{% else %}none{% endfor %}"
        "{% for x in nothing %}{% else %}none{% endfor %}{% for x in 'ab' recursive %}{{ x }}{% endfor %}"
    )
    assert render(source) == "12False2Falsepx1;22True1Trueqy2;noneab"
