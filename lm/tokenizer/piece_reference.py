"""SentencePiece's encoding in plain Python, slow and obvious: the reference of :mod:`lm.kernels.pieces`."""

import numpy as np
import regex

from lm.tokenizer.sentencepiece_model import NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel

_UNKNOWN_PENALTY = 10
_USER_DEFINED_PENALTY = 0.1


def list_entries(model: SentencePieceModel) -> dict[str, int]:
    """Return the ids of the pieces that text can become."""
    return {piece.text: token_id for token_id, piece in enumerate(model.pieces) if piece.type in (NORMAL, USER_DEFINED)}


def list_scores(model: SentencePieceModel) -> tuple[list[np.float32], np.float32]:
    """Return the scores of the pieces in a unigram model, and that of an unknown character.

    A piece that a user defined has almost the best score for each of its bytes.
    """
    normal = [np.float32(piece.score) for piece in model.pieces if piece.type == NORMAL]
    best = max([np.finfo(np.float32).tiny, *normal])
    scores = [
        np.float32(float(len(piece.text.encode()) * best) - _USER_DEFINED_PENALTY)
        if piece.type == USER_DEFINED
        else np.float32(piece.score)
        for piece in model.pieces
    ]
    return scores, min([np.finfo(np.float32).max, *normal]) - np.float32(_UNKNOWN_PENALTY)


def encode_pieces(model: SentencePieceModel, normalized: str) -> list[int]:
    """Return the ids of a normalized text."""
    pieces = _merge(model, normalized) if model.is_bpe else _find_best(model, normalized)
    ids = dict.fromkeys((piece.text for piece in model.pieces if piece.type == UNKNOWN), -1) | list_entries(model)
    all_ids = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    [unknown] = [token_id for token_id, piece in enumerate(model.pieces) if piece.type == UNKNOWN]
    found = list[int]()
    was_unknown = False
    for piece in pieces:
        is_unknown = ids.get(piece, -1) < 0
        if is_unknown and model.byte_fallback:
            found += [all_ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        elif not (is_unknown and was_unknown):  # unknown characters side by side are one token
            found.append(unknown if is_unknown else ids[piece])
        was_unknown = is_unknown
    return found


def _merge(model: SentencePieceModel, text: str) -> list[str]:
    entries = list_entries(model)
    defined = sorted((p.text for p in model.pieces if p.type == USER_DEFINED), key=len, reverse=True)
    symbols = regex.findall("|".join([*map(regex.escape, defined), "."]), text, regex.DOTALL)
    is_frozen = [symbol in defined for symbol in symbols]
    while True:
        candidates = [
            (-model.pieces[entries[left + right]].score, place)
            for place, (left, right) in enumerate(zip(symbols, symbols[1:], strict=False))
            if left + right in entries and not (is_frozen[place] or is_frozen[place + 1])
        ]
        if not candidates:
            return symbols
        _, place = min(candidates)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        is_frozen[place : place + 2] = [False]


def _find_best(model: SentencePieceModel, text: str) -> list[str]:
    entries, (scores, unknown_score) = list_entries(model), list_scores(model)
    longest = max(map(len, entries), default=1)
    best: list[tuple[np.float32, int] | None] = [(np.float32(0), 0), *[None] * len(text)]
    for start in range(len(text)):
        before = best[start][0]  # type: ignore[index] # each place is reached by an unknown character at least
        ends = [end for end in range(start + 1, min(len(text), start + longest) + 1) if text[start:end] in entries]
        added = [(end, scores[entries[text[start:end]]]) for end in ends]
        if start + 1 not in ends:
            added.append((start + 1, unknown_score))
        for end, score in added:
            found = best[end]
            with np.errstate(over="ignore"):
                total = score + before
            if found is None or total > found[0]:
                best[end] = (total, start)
    pieces, end = list[str](), len(text)
    while end:
        start = best[end][1]  # type: ignore[index]
        pieces.insert(0, text[start:end])
        end = start
    return pieces
