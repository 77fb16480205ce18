"""Tokenizers small enough to read, built the way published ones are. Shared by the text and llm tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fuel_core.checkpoint.tokenizer_source import GgufVocabulary, TokenizerSource

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPLIT = r"""'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of the bytes, in the library's own order (an oracle for ours)."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_vocabulary(extra: Sequence[str] = ()) -> list[str]:
    """All bytes, a few words to merge, then `extra`."""
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld", "Ġf", "ox", "Ġfox", "ow", "own"]
    return [*byte_alphabet(), *words, *extra]


MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "Ġ f",
    "o x",
    "Ġf ox",
    "o w",
    "ow n",
]


def byte_level_json(
    specials: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *,
    bos: str | None = None,
    added: Sequence[AddedToken] = (),
) -> bytes:
    """A byte-level `tokenizer.json`; with `bos`, its post-processor puts that token in front."""
    vocab = {token: i for i, token in enumerate(byte_level_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m.split()) for m in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer.add_tokens(list(added))
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer.to_str().encode()


SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
SPM_WORDS = [
    "▁",
    "a",
    "b",
    "c",
    "d",
    "h",
    "i",
    "o",
    "w",
    "▁h",
    "hi",
    "▁hi",
    "▁w",
    "wo",
    "▁wo",
    "ab",
    "▁a",
    "▁ab",
    "日",
    "▁▁",
]


def spm_json(*, metaspace: bool = False, scheme: str = "first") -> bytes:
    """A `tokenizer.json` in the manner of scored pieces: byte fallback, a marked space in front, stripped on decode."""
    pieces = [*SPM_PIECES, *SPM_WORDS]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (word[:cut], word[cut:])
        for word in SPM_WORDS
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str().encode()


def folder_source(
    tokenizer_json: bytes | None,
    *,
    config: Mapping[str, Any] | None = None,
    template: str | None = None,
    stop_ids: Mapping[str, tuple[int, ...]] | None = None,
    special_ids: Mapping[str, int] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> TokenizerSource:
    """What a Hugging Face folder with these files says."""
    return TokenizerSource(
        "huggingface",
        "folder",
        tokenizer_json=tokenizer_json,
        tokenizer_config=config or {},
        chat_templates={} if template is None else {"default": template},
        stop_ids=stop_ids or {},
        special_ids=special_ids or {},
        special_tokens=special_tokens or {},
    )


def gguf_source(
    vocabulary: GgufVocabulary,
    *,
    template: str | None = None,
    special_ids: Mapping[str, int] | None = None,
    stop_ids: Mapping[str, tuple[int, ...]] | None = None,
) -> TokenizerSource:
    """What a GGUF file with this vocabulary says."""
    return TokenizerSource(
        "gguf",
        "file.gguf",
        chat_templates={} if template is None else {"default": template},
        special_ids=special_ids or {},
        stop_ids=stop_ids or {},
        gguf=vocabulary,
    )


def byte_level_gguf(
    specials: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **changes: Any
) -> GgufVocabulary:
    """The same vocabulary as `byte_level_json`, as GGUF metadata."""
    tokens = byte_level_vocabulary(specials)
    types = [1] * (len(tokens) - len(specials)) + [3] * len(specials)
    fields: dict[str, Any] = {
        "model_kind": "gpt2",
        "kind": "bpe",
        "pre_tokenizer": "gpt-2",
        "tokens": tuple(tokens),
        "token_types": tuple(types),
        "merges": tuple(MERGES),
    }
    return GgufVocabulary(**(fields | changes))
