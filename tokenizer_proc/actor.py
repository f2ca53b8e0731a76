"""The tokenizer as an actor: Submit becomes Generate, Encode and Decode are answered. State is the model's text side.

Whatever is wrong with a message, its sender gets an answer that says so, and the next message is handled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import msgspec

from ipc.actor import Envelope
from ipc.channel import frontend_key
from ipc.codec import unpack_prompt
from ipc.messages import Decode, Decoded, Encode, Encoded, Generate, Rejected, Submit
from ipc.recorder.events import ENCODE
from ipc.recorder.ring import Recorder
from tokenizer_proc.encode import check_ids, encode_prompt, from_bytes, text_spec, to_bytes
from tokenizer_proc.errors import PromptError, explained
from tokenizer_proc.lane import Work
from tokenizer_proc.model import TextModel

# What would not fit into the message of an answer, or hold everyone up while it is written.
MAX_CHARS = 1 << 24
MAX_PROMPT_LOGPROBS = 1 << 19


EncodePrompt = Callable[[msgspec.Raw], list[int]]


class TokenizerActor:
    def __init__(self, model: TextModel, recorder: Recorder | None = None, encode: EncodePrompt | None = None) -> None:
        """`encode`: in the place of this process's own, which decodes, renders and encodes with `model`."""
        self._model = model
        self._recorder = recorder or Recorder()
        self._encode_prompt = encode or (lambda prompt: encode_prompt(model, unpack_prompt(prompt)))

    def handle(self, batch: list[Work]) -> list[Envelope]:
        return [envelope for message in batch for envelope in self._handle(message)]

    def _handle(self, message: Work) -> list[Envelope]:
        match message:
            case Submit():
                return self._submit(message)
            case Encode():
                return [(frontend_key(message.frontend), self._encode(message))]
            case Decode():
                return [(frontend_key(message.frontend), self._decode(message))]
            case _:
                assert_never(message)

    def _submit(self, submit: Submit) -> list[Envelope]:
        began, num_tokens = self._recorder.begin(ENCODE), 0
        try:
            generates = self._generates(submit)
            num_tokens = len(generates[0].prompt_ids) // 4
            return [("engine", generate) for generate in generates]
        except Exception as error:
            answer = Rejected(request_ids=submit.request_ids, error=explained(error))
            return [(frontend_key(submit.frontend), answer)]
        finally:
            self._recorder.end(ENCODE, began, submit.request_ids[0], num_tokens, len(submit.request_ids))

    def _generates(self, submit: Submit) -> list[Generate]:
        model, sampling = self._model, submit.sampling
        sampling.check_vocabulary(model.vocab_size)
        ids = self._encode_prompt(submit.prompt)
        _check_prompt_logprobs(len(ids), sampling.prompt_logprobs)
        echo = None
        if submit.echo:
            echo = model.tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        prompt_ids, text = to_bytes(ids), text_spec(model, ids, sampling, echo)
        return [
            Generate(
                request_id=request_id,
                frontend=submit.frontend,
                prompt_ids=prompt_ids,
                sampling=sampling.for_choice(index),
                arrival=submit.arrival,
                eos_token_ids=model.eos_token_ids,
                priority=submit.priority,
                cache_salt=submit.cache_salt,
                text=text,
            )
            for index, request_id in enumerate(submit.request_ids)
        ]

    def _encode(self, call: Encode) -> Encoded:
        try:
            ids = self._encode_prompt(call.prompt)
            tokens = [self._model.tokenizer.id_to_token(token) or "" for token in ids]
            return Encoded(call_id=call.call_id, ids=to_bytes(ids), tokens=tokens)
        except Exception as error:
            return Encoded(call_id=call.call_id, error=explained(error))

    def _decode(self, call: Decode) -> Decoded:
        try:
            ids = from_bytes(call.ids)
            check_ids(ids, self._model.vocab_size, "tokens")
            text = self._model.tokenizer.decode(ids, skip_special_tokens=call.skip_special_tokens)
            if len(text) > MAX_CHARS:
                raise PromptError(f"tokens make a text of {len(text)} characters, the limit is {MAX_CHARS}", "tokens")
            return Decoded(call_id=call.call_id, text=text)
        except Exception as error:
            return Decoded(call_id=call.call_id, error=explained(error))


def _check_prompt_logprobs(num_tokens: int, wanted: int | None) -> None:
    if wanted is None or num_tokens * (wanted + 1) <= MAX_PROMPT_LOGPROBS:
        return
    raise PromptError(
        f"prompt_logprobs must be less than {MAX_PROMPT_LOGPROBS // num_tokens} for a prompt of {num_tokens} tokens, "
        f"got {wanted}",
        "prompt_logprobs",
        code="invalid_value",
    )
