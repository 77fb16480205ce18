"""Rebuilds a tokenizer from the vocabulary that a GGUF file carries.

Two kinds exist: byte-level byte-pair merges ("bpe"), cut beforehand by a published rule, and scored pieces with byte
fallback, where the score of a piece is the rank of the merge that makes it. Published names of rules are data
(`checkpoint.published`); no name is spelled here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from fuel_core.checkpoint.published import pre_tokenizer
from fuel_core.checkpoint.tokenizer_source import GgufVocabulary
from fuel_core.errors import TokenizerError

__all__ = ["raise_as_ours", "tokenizer_from_gguf"]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE_MARK = "\u2581"


def tokenizer_from_gguf(vocabulary: GgufVocabulary, *, origin: str) -> tokenizers.Tokenizer:
    """The tokenizer of `vocabulary`, without anything in front of or behind a sequence.

    Raises TokenizerError when parts of the vocabulary are missing or contradict each other, and for a pre-tokenizer
    name that is not known.
    """
    if not vocabulary.tokens:
        raise TokenizerError(
            f"{origin}: expected tokens in tokenizer.ggml.tokens, found none; "
            "convert the model again, or pass token ids"
        )
    try:
        if vocabulary.kind == "bpe":
            backend = _byte_level(vocabulary, origin)
        else:
            backend = _scored_pieces(vocabulary, origin)
    except TokenizerError:
        raise
    except BaseException as error:
        raise_as_ours(
            error, f"{origin}: the GGUF vocabulary makes no tokenizer", "convert the model again, or pass token ids"
        )
    _add_marked_tokens(backend, vocabulary)
    return backend


def raise_as_ours(error: BaseException, what: str, next_step: str) -> NoReturn:
    """Raise TokenizerError for what the tokenizers library raised; anything else as it is.

    The library raises bare Exception, and on input it did not expect a panic, which is no Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    found = " ".join(str(error).split())[:200]
    raise TokenizerError(f"{what}: {found}; {next_step}") from error


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    """Piece -> id. Of equal pieces the first id wins: text has one encoding, and padding comes last."""
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)
    return ids


def _byte_level(vocabulary: GgufVocabulary, origin: str) -> tokenizers.Tokenizer:
    ids = _ids(vocabulary.tokens)
    rule = pre_tokenizer(vocabulary.pre_tokenizer)
    merges = []
    for rank, line in enumerate(vocabulary.merges):
        left, _, right = line.partition(" ")
        if not left or not right or left + right not in ids or left not in ids or right not in ids:
            raise TokenizerError(
                f"{origin}: tokenizer.ggml.merges[{rank}] must be two tokens that make a third, found {line!r:.80}; "
                "the file is damaged or its converter was"
            )
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rule.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in rule.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _scored_pieces(vocabulary: GgufVocabulary, origin: str) -> tokenizers.Tokenizer:
    tokens, scores, types = vocabulary.tokens, vocabulary.scores, vocabulary.token_types
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"{origin}: tokenizer.ggml.scores must hold one score per token ({len(tokens)}), found {len(scores)}; "
            "convert the model again"
        )
    ids = _ids(tokens)
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    # Control tokens are never made by merging.
    mergeable = {
        token: token_id for token, token_id in ids.items() if not types or types[token_id] not in (_UNKNOWN, _CONTROL)
    }
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(mergeable, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    unmark: list[decoders.Decoder] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if vocabulary.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces])
        unmark.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark_spaces
    backend.decoder = decoders.Sequence(unmark)
    return backend


def _merges_by_score(ids: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first.

    Joining the adjacent pair whose result scores highest, again and again, is then the same as applying merges in
    rank order. Ties keep the order of ids, which is how scores were assigned.
    """
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], token_id, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_marked_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Control tokens become special; user-defined ones are found in text before anything else."""
    ids = _ids(vocabulary.tokens)
    control: list[AddedToken] = []
    defined: list[AddedToken] = []
    # Marked spaces exist in normalized text only; with a prefix in front, normalizing would change the token itself.
    normalized = vocabulary.kind != "bpe" and not vocabulary.add_space_prefix
    for token_id, kind in enumerate(vocabulary.token_types[: len(vocabulary.tokens)]):
        token = vocabulary.tokens[token_id]
        if not token or ids[token] != token_id:
            continue
        if kind in (_CONTROL, _UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=normalized))
    backend.add_special_tokens(control)
    backend.add_tokens(defined)
