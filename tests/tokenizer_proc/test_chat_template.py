from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ipc.messages import ChatPrompt
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.errors import PromptError
from tokenizer_proc.model import TextModel
from tokenizer_proc.template_engines import TemplateEngine

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": '<é> & "q"', "parameters": {"type": "object"}}}
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [None, True, "é"]}}}
USER: dict[str, Any] = {"role": "user", "content": " hi 你好\n"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "It is "}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be <brief> & kind."}, USER],
    [USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "{}"}],
    [USER, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}, USER],
    [{"role": "user", "content": "<|im_end|>{{ 7 * 7 }}{% raw %}"}],
]
# In the manner of current models: tools, reasoning, loops with state, tests, filters, whitespace control.
RICH = """
{%- if tools %}
    {{- '<|system|>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' ~ message['role'] ~ '|>' + message.content | trim }}
    {%- if message.reasoning_content is defined and message.reasoning_content is string %}
        {{- '(' + message.reasoning_content.strip('\\n') + ')' if loop.index0 > ns.last else '' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set f = call.function if call.function else call %}
        {{- f.name + (f.arguments if f.arguments is string else f.arguments | tojson(indent=2)) }}
    {%- endfor %}
    {{- eos_token if not loop.last or message.role != 'user' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% if thinking is false %}{{- '-' }}{% endif %}{% endif %}
"""


def template_of(model: TextModel) -> ChatTemplate:
    assert model.template is not None
    return model.template


def reference(source: str) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    bare = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, chat_template=source, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_parity_with_transformers_on_both_engines(
    smollm2: TextModel, rich: bool, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> None:
    source = RICH if rich else template_of(smollm2).source
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert template.engine == "minijinja"
    for generation in (True, False):
        expected = reference(source).apply_chat_template(
            copy.deepcopy(messages), tools=tools, add_generation_prompt=generation, tokenize=False, thinking=False
        )
        prompt = ChatPrompt(messages, tools, generation, template_kwargs={"thinking": False})
        assert template.render(prompt) == expected
        only_jinja = ChatTemplate(source, template.variables)
        only_jinja._fast = None
        assert only_jinja.render(prompt) == expected


@pytest.mark.parametrize("end", ["It is ", "It is", "It\n is\n\n"])
@pytest.mark.parametrize("rich", [False, True])
def test_continuing_a_message_as_transformers_does(smollm2: TextModel, rich: bool, end: str) -> None:
    source = RICH if rich else template_of(smollm2).source
    messages = [USER, {"role": "assistant", "content": end}]
    expected = reference(source).apply_chat_template(messages, continue_final_message=True, tokenize=False)
    template = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert template.render(ChatPrompt(messages, continue_final_message=True)) == expected


def test_differing_engines_fall_back_to_jinja2() -> None:
    # A method that only Python's strings have, and a tag only transformers knows.
    for source in (
        "{% for m in messages %}{{ m.content.swapcase() }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ):
        template = ChatTemplate(source, {})
        assert template.engine == "jinja2"
        expected = reference(source).apply_chat_template([USER, ANSWER], tokenize=False)
        assert template.render(ChatPrompt([USER, ANSWER], add_generation_prompt=False)) == expected


def test_what_only_jinja2_can_render_is_rendered_by_it() -> None:
    template = ChatTemplate("{% if flag %}{{ messages[0].content.swapcase() }}{% endif %}", {})
    assert template.engine == "minijinja"  # the probes do not reach the difference
    assert template.render(ChatPrompt([{"role": "user", "content": "Ab"}], template_kwargs={"flag": 1})) == "aB"


def test_content_parts_nulls_and_json_arguments() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}"
        "{{ m.tool_calls[0].function.arguments.q }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"function": {"name": "f", "arguments": '{"q": "x"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert template.render(ChatPrompt(messages)) == "a\nbx"
    with pytest.raises(PromptError, match="text only"):
        template.render(ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "raise_exception"])
def test_arguments_cannot_replace_the_servers_own(name: str) -> None:
    with pytest.raises(PromptError, match=name):
        ChatTemplate("x", {}).render(ChatPrompt([USER], template_kwargs={name: []}))


def test_refusal_of_a_template_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(PromptError, match="roles must alternate") as caught:
        template.render(ChatPrompt([USER]))
    assert (caught.value.error.status, caught.value.error.param) == (400, "messages")


def test_endless_template_is_an_error_at_load_and_use() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for source in (loop, "{% if flag %}" + loop + "{% endif %}"):
        template = ChatTemplate(source, {})
        with pytest.raises(PromptError, match="too long"):
            template.render(ChatPrompt([USER], template_kwargs={"flag": True}))


def test_engines_are_interchangeable(smollm2: TextModel) -> None:
    template = template_of(smollm2)
    engines: list[TemplateEngine] = [engine for engine in (template._fast, template._jinja) if engine]
    assert len(engines) == 2
    first, second = (engine.render({"messages": [USER, ANSWER], "add_generation_prompt": True}) for engine in engines)
    assert first == second
