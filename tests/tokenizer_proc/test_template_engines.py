from __future__ import annotations

from typing import Any

import pytest

from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.template_engines import MAX_TEMPLATE_CHARS, Jinja, MiniJinja
from tokenizer_proc.template_limits import LimitError, RaisedByTemplate, TemplateError

ENGINES = [Jinja, MiniJinja]
GROW = "{%% set ns = namespace(x='xxxxxxxxxx') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x|length }}"
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999)|list|sort %}{% endfor %}{% endfor %}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(3) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ ('x' * 10000000000)|length }}",
    "{{ 7 ** 99999999 }}",
    GROW % "{% set ns.x = ns.x ~ ns.x %}",
    GROW % "{% set ns.x = ns.x + ns.x %}",
    GROW % "{% set ns.x = [ns.x, ns.x]|join %}",
    GROW % "{% set ns.x = ns.x.replace('x', 'xx') %}",
    GROW % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "{{ '%9999999999d' % 1 }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '{:>10000000000}'.format('x') }}",
    "{{ '{:>{w}}'.format('x', w='9999999999') }}",
    "{% set a = 'x' * 1000000 %}{{ a.replace('x', a)|length }}",
    "{% set a = 'x' * 1000000 %}{{ a|replace('x', a)|length }}",
    "{% set a = 'x' * 1000000 %}{{ ([a] * 1000000)|join|length }}",
    "{% set a = 'x' * 1000000 %}{{ ''.join([a] * 1000000)|length }}",
    "{% set a = 'x' * 1000000 %}{{ [a] * 1000000 }}",
    "{% set a = 'x' * 1000000 %}{{ ([a] * 1000000)|string|length }}",
    "{% set a = 'x' * 1000000 %}{{ ([a] * 1000000)|tojson|length }}",
    "{% set a = 'x' * 1000000 %}{{ ([a] * 1000000) ~ '' }}",
    "{% set a = '{0}' * 1000000 %}{{ a.format(a)|length }}",
    "{% set a = '\t' * 1000000 %}{{ a.expandtabs(1000000)|length }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{{ x.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ self.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_with_an_error(source: str) -> None:
    with pytest.raises(TemplateError):
        Jinja(source).render({"x": [1]})


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_stay_in_the_strict_engine(source: str) -> None:
    assert ChatTemplate(source, {}).engine == "jinja2"
    hidden = "{% if x %}" + source + "{% endif %}"
    template = ChatTemplate(hidden, {})
    if template.engine == "minijinja":  # then MiniJinja's own count must stop it
        with pytest.raises(TemplateError):
            MiniJinja(source).render({"x": [1]})


@pytest.mark.parametrize("source", HOSTILE[:8])
def test_fuel_stops_minijinja(source: str) -> None:
    with pytest.raises(TemplateError):
        MiniJinja(source).render({"x": [1]})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", ["{{ x|attr('__class__') }}", "{{ raise_exception.__globals__ }}"])
def test_python_objects_are_out_of_reach(engine: type[Any], source: str) -> None:
    assert engine(source).render({"x": [1]}) == ""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': [none, true], 'a': 'é<>'}|tojson }}", '{"b": [null, true], "a": "é<>"}'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ 'a' ~ 1 ~ none ~ absent }}", "a1None"),
        ("{% for i in x %}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %}", "1/2False;2/2True;"),
        ("{% for i in x if i > 1 %}{{ i }}{% else %}none{% endfor %}", "2"),
        ("{% for i in x %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ 'a%sb' | format(3) }}", "a3b"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_both_render_alike(engine: type[Any], source: str, text: str) -> None:
    assert engine(source).render({"x": [1, 2]}) == text


@pytest.mark.parametrize("engine", ENGINES)
def test_raise_exception(engine: type[Any]) -> None:
    with pytest.raises(RaisedByTemplate, match="roles must alternate"):
        engine("{{ raise_exception('roles must alternate') }}").render({})


@pytest.mark.parametrize("engine", ENGINES)
def test_template_size_is_limited(engine: type[Any]) -> None:
    with pytest.raises(TemplateError, match="limit"):
        engine("x" * (MAX_TEMPLATE_CHARS + 1))


def test_nested_lists_are_weighed_before_they_are_written() -> None:
    nest = GROW % "{% set ns.x = [ns.x, ns.x] %}"
    for write in ("{{ ns.x }}", "{{ ns.x|string }}", "{{ ns.x ~ 'a' }}", "{{ ns.x|tojson }}", "{{ [ns.x]|join }}"):
        with pytest.raises(LimitError):
            Jinja(nest + write).render({})


def test_a_failed_rendering_leaves_the_engine_usable() -> None:
    engine = Jinja("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok")
    with pytest.raises(TemplateError):
        engine.render({"n": 99999})
    assert engine.render({"n": 3}) == "ok"
