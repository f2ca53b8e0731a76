"""Messages to text with the model's own chat template, as transformers' `apply_chat_template` renders them.

Special tokens written out in a message's text ("<|im_end|>") become those tokens, as in transformers and in the other
engines: who must keep users from speaking as another role has to strip them before. They can steer only the request
they are part of.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

from ipc.messages import ChatPrompt
from tokenizer_proc.errors import PromptError
from tokenizer_proc.template_engines import Jinja, MiniJinja, TemplateEngine
from tokenizer_proc.template_limits import LimitError, RaisedByTemplate, TemplateError

log = logging.getLogger(__name__)

# What the server itself passes; a request's template arguments may not replace it.
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now")
)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read one of the first two
_MARK = "GAPLESS_END_OF_FINAL_MESSAGE "  # the space shows whether the template trims
_TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": 'Find <it> & tell "why"',
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": {"q": "größer 你好"}}}
_USER = {"role": "user", "content": ' What\'s <2> & "3"?\n'}
_ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5 "}
_SYSTEM = {"role": "system", "content": "Be brief. 🙂"}
_PROBES: tuple[dict[str, Any], ...] = (
    {"messages": [_USER], "add_generation_prompt": True},
    {"messages": [_SYSTEM, _USER], "add_generation_prompt": True},
    {"messages": [_USER, _ASSISTANT, _USER], "add_generation_prompt": True},
    {"messages": [_SYSTEM, _USER, _ASSISTANT], "add_generation_prompt": False},
    {"messages": [_USER], "add_generation_prompt": True, "enable_thinking": False},
    {"messages": [_SYSTEM, _USER], "tools": [_TOOL], "add_generation_prompt": True},
    {
        "messages": [
            _USER,
            {"role": "assistant", "content": "", "reasoning_content": "let me look", "tool_calls": [_CALL]},
            {"role": "tool", "content": "found", "tool_call_id": "call_1", "name": "lookup"},
        ],
        "tools": [_TOOL],
        "add_generation_prompt": True,
    },
)


class ChatTemplate:
    """One Jinja template. Raises `TemplateError` if it cannot be compiled."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: special tokens by name (bos_token, ...), visible to the template."""
        self.source = source
        self.variables = dict(variables)
        self._jinja = Jinja(source)
        self._fast = self._agreeing_minijinja()

    def copy(self) -> ChatTemplate:
        return ChatTemplate(self.source, self.variables)

    @property
    def engine(self) -> str:
        return "minijinja" if self._fast else "jinja2"

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text. Raises `PromptError` if the template does not take these messages or arguments."""
        if reserved := RESERVED.intersection(prompt.template_kwargs):
            raise PromptError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
        if not prompt.messages:
            raise PromptError("messages must not be empty, got []", "messages")
        messages = [_plain_message(message) for message in prompt.messages]
        if prompt.continue_final_message:
            messages[-1] = _marked(messages[-1])
        try:
            text = self._render(
                {
                    "messages": messages,
                    "tools": prompt.tools or None,
                    "documents": None,
                    "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
                    **prompt.template_kwargs,
                }
            )
        except RaisedByTemplate as error:
            raise PromptError(f"the model's chat template refuses these messages: {error}", "messages") from error
        except TemplateError as error:
            raise PromptError(f"the model's chat template failed: {error}", "messages") from error
        return _cut_at_mark(text) if prompt.continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        variables = self.variables | variables
        if self._fast is not None:
            try:
                return self._fast.render(variables)
            except RaisedByTemplate:
                raise
            except TemplateError as error:
                log.debug("minijinja cannot render this (%s), trying jinja2", error)
        return self._jinja.render(variables)

    def _agreeing_minijinja(self) -> TemplateEngine | None:
        """MiniJinja if it renders a set of typical conversations exactly as jinja2 does."""
        try:
            expected = [_outcome(self._jinja, self.variables | probe) for probe in _PROBES]
        except LimitError as error:
            log.warning("the chat template looks hostile: %s", error)
            return None
        if self._jinja.needs_strict or all(text is None for text in expected):
            return None
        try:
            fast = MiniJinja(self.source)
        except Exception as error:
            log.info("minijinja cannot compile the chat template (%s), using jinja2", error)
            return None
        if [_outcome(fast, self.variables | probe) for probe in _PROBES] != expected:
            log.info("minijinja and jinja2 differ on the chat template, using jinja2")
            return None
        return fast


def _outcome(engine: TemplateEngine, variables: dict[str, Any]) -> str | None:
    """The text, or None if the engine refuses. A `LimitError` is passed on."""
    try:
        return engine.render(copy.deepcopy(variables))
    except LimitError:
        raise
    except TemplateError:
        return None


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: no nulls, content as one text, tool arguments as an object."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = _joined_parts(plain["content"])
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    try:  # minijinja would put U+FFFD in the place of a lone surrogate
        "".join(value for value in plain.values() if isinstance(value, str)).encode()
    except UnicodeEncodeError as error:
        raise PromptError("messages is not valid Unicode text", "messages") from error
    return plain


def _joined_parts(parts: list[Any]) -> str:
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise PromptError(f"content part {i} is not text: this model reads text only", "messages")
        texts.append(text)
    return "\n".join(texts)


def _plain_call(call: Any) -> Any:
    """Clients send a call's arguments as JSON text; templates write them out again as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise PromptError("continue_final_message needs a final message with content", "continue_final_message")
    return message | {"content": content + _MARK}


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise PromptError(
            "the chat template leaves out the end of the final message, so it cannot be continued",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
