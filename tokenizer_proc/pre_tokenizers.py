"""How byte-level vocabularies cut text before merging, by the names that GGUF files use (`tokenizer.ggml.pre`).

Each entry gives the tokenizer that the model was trained with, as its original tokenizer.json describes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenization:
    names: tuple[str, ...]
    regex: str | None = None  # None: GPT-2's own expression, built into the library
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a whole word of the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> PreTokenizer:
        steps: list[PreTokenizer] = [Digits(individual_digits=True)] if self.single_digits else []
        if self.regex is not None:
            steps.append(Split(Regex(self.regex), behavior="isolated"))
        steps.append(ByteLevel(add_prefix_space=False, use_regex=self.regex is None))
        return steps[0] if len(steps) == 1 else Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


KINDS = (
    PreTokenization(("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")),
    PreTokenization(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), single_digits=True
    ),
    PreTokenization(("qwen2", "deepseek-r1-qwen", "megrez"), regex=_QWEN2, nfc=True),
    PreTokenization(("stablelm2", "hunyuan"), regex=_QWEN2),
    PreTokenization(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
        regex=_LLAMA3,
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenization(("dbrx", "smaug-bpe", "chatglm-bpe"), regex=_LLAMA3),
    PreTokenization(("tekken",), regex=_TEKKEN, ignore_merges=True, adds_bos=True),
)
BY_NAME = {name: kind for kind in KINDS for name in kind.names}
