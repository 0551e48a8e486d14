"""tiktoken's rank files: a Base64 token and its rank per line."""

import binascii
from collections.abc import Iterable
from pathlib import Path

from lm.common.errors import UserError
from lm.tokenizer.reference import apply_merges


def write_tiktoken(
    path: Path, vocab: dict[int, bytes], special_tokens: Iterable[str], merges: Iterable[tuple[bytes, bytes]]
) -> None:
    """Write tiktoken's rank file: the Base64 of each token and its id, in the order of the ids.

    Special tokens of more than one byte are left out, since tiktoken takes them as an argument. Raises UserError if
    the ids are not in the order of the merges, because tiktoken merges in the order of the ids.
    """
    specials = {token.encode() for token in special_tokens if len(token.encode()) > 1}
    ranks = [(token, token_id) for token_id, token in sorted(vocab.items()) if token not in specials]
    merged_tokens = [token for token, _ in ranks if len(token) > 1]
    if merged_tokens != [left + right for left, right in merges]:
        raise UserError(
            f"{path} was not written: tiktoken would encode differently, since the ids of the vocabulary do not "
            "follow the order of the merges. Use vocab.json and merges.txt, or tokenizer.json."
        )
    path.write_bytes(b"".join(b"%b %d\n" % (binascii.b2a_base64(token, newline=False), i) for token, i in ranks))


def read_tiktoken(path: Path) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Read (vocab, merges) from tiktoken's rank file. The ids are the ranks; the merges follow from them.

    Raises UserError for a malformed line, a repeated token or rank, a missing single byte, or a token that no two
    tokens of lower rank merge to.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    vocab: dict[int, bytes] = {}
    line_numbers: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            text, digits = line.split()
            token, rank = binascii.a2b_base64(text, strict_mode=True), int(digits)
        except ValueError:  # binascii.Error too
            token, rank = b"", -1
        if not token or rank < 0:
            raise UserError(f"{path}, line {number}: {line!r} is not the Base64 of a token, a space and its rank.")
        if token in line_numbers or rank in vocab:
            repeated = f"the token {token!r}" if token in line_numbers else f"the rank {rank}"
            raise UserError(f"{path}, line {number}: {repeated} is given twice; remove one of the two lines.")
        vocab[rank] = token
        line_numbers[token] = number
    check_all_bytes(path, vocab)
    merges: list[tuple[bytes, bytes]] = []
    ranks: dict[bytes, int] = {}

    def find_merge(pair: tuple[bytes, bytes]) -> tuple[int, bytes] | None:
        token = pair[0] + pair[1]
        return (ranks[token], token) if token in ranks else None

    for rank, token in sorted(vocab.items()):
        if len(token) > 1:
            parts = apply_merges([token[i : i + 1] for i in range(len(token))], find_merge)
            if len(parts) > 2:
                raise UserError(
                    f"{path}, line {line_numbers[token]}: no two tokens of lower rank merge to {token!r}, which stays "
                    f"in {len(parts)} parts; use a vocabulary whose ranks are the order of its merges."
                )
            merges.append((parts[0], parts[1]))
            ranks[token] = rank
    return vocab, merges


def check_all_bytes(path: Path, vocab: dict[int, bytes]) -> None:
    """Raise UserError if the vocabulary of the file ``path`` lacks a single byte."""
    tokens = set(vocab.values())
    if missing := [byte for i in range(256) if (byte := bytes([i])) not in tokens]:
        raise UserError(
            f"{path} has no tokens for {len(missing)} of the 256 single bytes, the first of them {missing[0]!r}; "
            "use a byte-level vocabulary."
        )
