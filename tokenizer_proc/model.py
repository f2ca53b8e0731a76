"""The text side of one model: its tokenizer, its chat template, and what their files say about both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from tokenizer_proc.chat_template import ChatTemplate


@dataclass(frozen=True)
class TextModel:
    tokenizer: Tokenizer
    vocab_size: int  # ids below it are accepted; the model's embedding may have more rows than there are tokens
    eos_token_ids: tuple[int, ...] = ()  # sorted
    bos_token_id: int | None = None
    context_length: int | None = None  # tokens the model was made for
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None  # used instead when a request brings tools
    template_problem: str = ""  # why there is no template, as a whole sentence, with what to do
    # Put BOS in front of a rendered chat that has none. GGUF files keep this in a flag; Hugging Face templates do it
    # themselves.
    chat_adds_bos: bool = False

    def for_another_thread(self) -> TextModel:
        """The same, with chat templates of its own: an engine renders one prompt at a time."""
        return dataclasses.replace(
            self,
            template=self.template and self.template.copy(),
            tool_template=self.tool_template and self.tool_template.copy(),
        )

    def warm_up(self) -> TextModel:
        """Work out now what would hold up a request later."""
        _ = self.max_chars, self.special_ids
        self.tokenizer.encode("Hello, world!")  # the first encode compiles what it needs
        return self

    @cached_property
    def max_chars(self) -> int | None:
        """No longer text can fit into the context: each token stands for so many characters at most."""
        if self.context_length is None:
            return None
        return self.context_length * max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special)
