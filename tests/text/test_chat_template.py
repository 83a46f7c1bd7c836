"""The template sandbox: what templates may not do, and that they are stopped in time."""

from __future__ import annotations

import pytest

from serve_app.text.chat_template import ChatTemplate, TemplateFailed


def render(source: str, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "x"}], **variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ 'a' * 100000000 }}",
        "{{ 100000000 * 'a' }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ undefined_function() }}",
        "{{ messages.a.b.c }}",
        "{{ raise_exception('no') }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do(source):
    with pytest.raises(TemplateFailed):
        render(source)


def test_a_template_that_writes_without_end_is_stopped():
    with pytest.raises(TemplateFailed):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}")


def test_syntax_errors_name_the_line():
    with pytest.raises(TemplateFailed, match="line 2"):
        ChatTemplate("a\n{% if %}")


def test_what_templates_use():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% generation %}{{ bos_token }}{% endgeneration %}") == "<s>"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("  {% if enable_thinking %}yes{% endif %}\n", enable_thinking=True) == "yes"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in [1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "1"
    )
