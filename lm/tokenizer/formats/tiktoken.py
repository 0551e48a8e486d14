"""tiktoken's rank files: a Base64 token and its rank per line."""

import binascii
from collections.abc import Iterable, Sequence
from pathlib import Path

from lm.common.errors import UserError
from lm.tokenizer.merges import derive_merges


def write_tiktoken(
    path: Path,
    vocab: dict[int, bytes],
    special_tokens: Iterable[str],
    merges: Sequence[tuple[bytes, bytes]],
    ignore_merges: bool = False,
) -> None:
    """Write tiktoken's rank file: the Base64 of each token and its id, in the order of the ids.

    Special tokens of more than one byte are left out, since tiktoken takes them as an argument. Raises UserError if
    tiktoken would encode differently: it merges in the order of the ids, and a pretoken that is a token stays whole.
    """
    specials = {token.encode() for token in special_tokens if len(token.encode()) > 1}
    ranks = {token_id: token for token_id, token in sorted(vocab.items()) if token not in specials}
    tokens = set(ranks.values())
    is_each_merged = len(merges) == sum(len(token) > 1 for token in tokens)
    has_each_rank = len(tokens) == len(ranks) and derive_merges(ranks) == list(merges)
    if not has_each_rank or not (is_each_merged or ignore_merges):
        raise UserError(
            f"{path} was not written: tiktoken would encode differently, since the ids of the vocabulary do not "
            "follow the order of the merges. Use vocab.json and merges.txt, or tokenizer.json."
        )
    path.write_bytes(
        b"".join(b"%b %d\n" % (binascii.b2a_base64(token, newline=False), i) for i, token in ranks.items())
    )


def read_tiktoken(path: Path) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], bool]:
    """Read the vocabulary, its merges and ``ignore_merges`` from tiktoken's rank file. The ids are the ranks.

    The merges follow from the ranks. Llama 3's file has tokens that no merge gives; they only stand for a whole
    pretoken, which is what ``ignore_merges`` says. Raises UserError for a malformed line, a repeated token or rank, or
    a missing single byte.
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
    merges = derive_merges(vocab)
    return vocab, merges, len(merges) < sum(len(token) > 1 for token in vocab.values())


def check_all_bytes(path: Path, vocab: dict[int, bytes]) -> None:
    """Raise UserError if the vocabulary of the file ``path`` lacks a single byte."""
    tokens = set(vocab.values())
    if missing := [byte for i in range(256) if (byte := bytes([i])) not in tokens]:
        raise UserError(
            f"{path} has no tokens for {len(missing)} of the 256 single bytes, the first of them {missing[0]!r}; "
            "use a byte-level vocabulary."
        )
