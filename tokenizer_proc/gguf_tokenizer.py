"""A `tokenizers.Tokenizer` from the vocabulary inside a GGUF file.

Two families: byte-level BPE with its merges in the file ("gpt2"), and SentencePiece BPE with scores ("llama").
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ipc.errors import UserError
from tokenizer_proc.pre_tokenizers import BY_NAME, PreTokenization

log = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files often name only one of a model's end tokens. A control token of one of these names ends an answer in every
# model that has it.
_END_NAMES = frozenset(
    {
        *("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>"),
        *("<|end|>", "<end_of_turn>", "<EOT>"),
    }
)


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Raises `UserError` naming the kind of tokenizer if it is not supported, or what is missing in the file."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"the file has {len(tokens)} tokens but {len(types)} token types")
    # Unused entries only fill the embedding up; they are no text.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocab)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, vocab), True
    else:
        raise UserError(f"tokenizer kind {model!r} is not supported in GGUF files (gpt2 and llama are)")
    _add_tokens(tokenizer, tokens, types)
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        if bos is not None and bos < len(tokens):
            tokenizer.post_processor = TemplateProcessing(
                single=f"{tokens[bos]}:0 $A:0",
                pair=f"{tokens[bos]}:0 $A:0 $B:1",
                special_tokens=[(tokens[bos], bos)],
            )
    return tokenizer


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """The strings chat templates know by name: bos_token, eos_token, unk_token, pad_token."""
    tokens = _strings(metadata, "tokens")
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def eos_token_ids(metadata: dict[str, Any]) -> set[int]:
    tokens = _strings(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or []
    ids = {metadata[key] for name in _EOS_KEYS if (key := f"tokenizer.ggml.{name}") in metadata}
    ids |= {i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in _END_NAMES}
    return {i for i in ids if i < len(tokens)}


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    kind = _pre_tokenization(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(metadata, "merges")]
    # Merges of tokens that the vocabulary lacks would be refused by the library and can never apply.
    usable = [(left, right) for left, right in merges if left in vocab and right in vocab and left + right in vocab]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=usable, ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = kind.pre_tokenizer()
    if (normalizer := kind.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _pre_tokenization(metadata: dict[str, Any]) -> PreTokenization:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("the file does not say how its tokenizer splits text (tokenizer.ggml.pre); assuming gpt-2")
        name = "gpt-2"
    if name not in BY_NAME:
        raise UserError(f"tokenizer.ggml.pre {name!r} is not supported (supported: {', '.join(sorted(BY_NAME))})")
    return BY_NAME[name]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], vocab: dict[str, int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise UserError("the file has a llama tokenizer without one score per token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    mark_spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces]) if prefix else normalizers.Sequence([mark_spaces])
    )
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the piece of the best score: all splits of a piece into two
    others, pieces in the order of their scores."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=lambda piece: (-scores[vocab[piece]], vocab[piece])):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges.extend(sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))
    return merges


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    special = [tokens[i] for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)]
    plain = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise UserError(f"the file has no tokenizer.ggml.{name}")
    return values
