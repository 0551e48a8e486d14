"""File formats of byte-level BPE tokenizers: GPT-2's vocab.json and merges.txt, tiktoken's rank files, Hugging Face's
tokenizer.json.

Sources: Radford et al. 2019 (GPT-2's encoder.json, vocab.bpe and byte-to-unicode spelling); the ``tiktoken`` and
``tokenizers`` libraries.
"""

import binascii
import codecs
import json
import logging
from collections.abc import Container, Iterable, Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.pretokens import GPT2_PATTERN, compile_pattern

log = logging.getLogger(__name__)


def _gpt2_alphabet() -> str:
    """GPT-2's printable character for each byte: itself where it is printable Latin-1, else the next from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256))


_CHARACTERS = _gpt2_alphabet()
_BYTES = {ord(character): byte for byte, character in enumerate(_CHARACTERS)}
_NO_RANK = 1 << 62  # greater than any


def spell(token: bytes) -> str:
    """Spell bytes in GPT-2's printable alphabet: ``b" a"`` → ``"Ġa"``."""
    return codecs.charmap_decode(token, "strict", _CHARACTERS)[0]  # as Python's own 8-bit encodings do it, in C


def unspell(text: str) -> bytes:
    """The bytes that :func:`spell` wrote as ``text``; raises UnicodeEncodeError at a character outside the alphabet."""
    return codecs.charmap_encode(text, "strict", _BYTES)[0]


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or malformed one raises UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # the second for brackets inside brackets without end
        raise UserError(f"{path} is not a JSON file: {error}.") from None


def read_vocab(path: Path, special_tokens: Iterable[str] = ()) -> dict[int, bytes]:
    """Read GPT-2's vocab.json ({spelling: id}); entries named in ``special_tokens`` stand for their own UTF-8 bytes.

    A spelling outside GPT-2's alphabet is taken for a special token too. Raises UserError for a malformed file or two
    tokens with one id.
    """
    spellings = read_json(path)
    if not isinstance(spellings, dict):
        raise UserError(f"{path} is not a vocabulary: expected one JSON object of spelling: id.")
    return _unspell_vocab(path, spellings, set(special_tokens))


def _unspell_vocab(path: Path, spellings: dict[str, Any], specials: Container[str]) -> dict[int, bytes]:
    """The tokens of ``{spelling: id}`` by their ids; see :func:`read_vocab`."""
    vocab: dict[int, bytes] = {}
    for text, token_id in spellings.items():
        if type(token_id) is not int or token_id < 0 or token_id in vocab:  # a bool is no id
            raise UserError(f"{path}: the id of {text!r}, {token_id!r}, is not a whole number used once.")
        try:
            vocab[token_id] = text.encode() if text in specials else unspell(text)
        except UnicodeEncodeError:  # not GPT-2's spelling: plainly a special token
            try:
                vocab[token_id] = text.encode()
            except UnicodeEncodeError:
                raise UserError(f"{path}: {text!r} has a lone surrogate, which no bytes stand for.") from None
    return vocab


def _spellings(vocab: dict[int, bytes], special_tokens: Iterable[str]) -> dict[str, int]:
    """{spelling: id} in the order of the ids, special tokens in plain text; UserError where two are spelled alike."""
    specials = {token.encode(): token for token in special_tokens}
    spellings: dict[str, int] = {}
    for token_id, token in sorted(vocab.items()):
        text = specials.get(token) or spell(token)
        if text in spellings:  # a special token such as "Ġ", or one of a single ASCII character
            raise UserError(
                f"Tokens {spellings[text]} and {token_id} are both {text!r} in GPT-2's spelling, so that no file can "
                "tell them apart; choose another special token."
            )
        spellings[text] = token_id
    return spellings


def write_vocab(path: Path, vocab: dict[int, bytes], special_tokens: Iterable[str]) -> None:
    """Write GPT-2's vocab.json in the order of the ids, special tokens in plain text.

    Raises UserError where a special token and another token would be spelled alike.
    """
    spellings = _spellings(vocab, special_tokens)
    path.write_text(json.dumps(spellings, ensure_ascii=False, indent=0), encoding="utf-8")


def read_merges(path: Path) -> list[tuple[bytes, bytes]]:
    """Read GPT-2's merges.txt: two spellings a line, in the order they were learned; a ``#version`` line may lead."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as merges: {error}.") from None
    if lines[0].startswith("#version"):
        lines[0] = ""
    return _unspell_merges(lines, f"{path}, line")


def _unspell_merges(lines: Iterable[str], unit: str) -> list[tuple[bytes, bytes]]:
    """The merges of ``lines``, empty ones left out; UserError, at ``unit`` and its number, for one that is none."""
    merges = []
    unspell_once = cache(unspell)  # the 100,000 parts of GPT-2's merges are 15,000 different ones
    for number, line in enumerate(lines, start=1):
        if line:
            left, _, right = line.partition(" ")
            try:
                merges.append((unspell_once(left), unspell_once(right)))
            except UnicodeEncodeError:
                right = ""
            if not left or not right:
                raise UserError(f"{unit} {number}: {line!r} is not two spellings with a space between.")
    return merges


def write_merges(path: Path, merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write GPT-2's merges.txt, without a header."""
    path.write_text("".join(f"{spell(left)} {spell(right)}\n" for left, right in merges), encoding="utf-8")


def write_tiktoken(
    path: Path, vocab: dict[int, bytes], special_tokens: Iterable[str], merges: Iterable[tuple[bytes, bytes]]
) -> None:
    """Write tiktoken's rank file: the Base64 of a token and its id on a line, in the order of the ids.

    Special tokens, which tiktoken is told apart from the file, are left out, but for single bytes. tiktoken takes the
    ids for the order of the merges: UserError is raised where that is not their order.
    """
    specials = {token.encode() for token in special_tokens if len(token.encode()) > 1}
    ranks = [(token, token_id) for token_id, token in sorted(vocab.items()) if token not in specials]
    merged = [token for token, _ in ranks if len(token) > 1]
    if merged != [left + right for left, right in merges]:
        raise UserError(
            f"{path} was not written: tiktoken would encode with it otherwise, since the ids of the vocabulary do not "
            "follow the order of the merges. Use vocab.json and merges.txt, or tokenizer.json."
        )
    path.write_bytes(b"".join(b"%b %d\n" % (binascii.b2a_base64(token, newline=False), i) for token, i in ranks))


def read_tiktoken(path: Path) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Read tiktoken's rank file: the vocabulary, whose ids are the ranks, and its merges, which follow from them.

    The file names no special tokens. Raises UserError for a malformed line, a token or a rank given twice, a vocabulary
    without all single bytes, or a token that tiktoken finds only as a whole pretoken, since no two tokens merge to it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    vocab: dict[int, bytes] = {}
    numbers: dict[bytes, int] = {}  # the line of each token
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            text, digits = line.split()
            token, rank = binascii.a2b_base64(text, strict_mode=True), int(digits)
        except ValueError:  # binascii.Error is one
            token, rank = b"", -1
        if not token or rank < 0:
            raise UserError(f"{path}, line {number}: {line!r} is not the Base64 of a token, a space and its rank.")
        if token in numbers or rank in vocab:
            twice = f"the token {token!r}" if token in numbers else f"the rank {rank}"
            raise UserError(f"{path}, line {number}: {twice} is given twice; remove one of the two lines.")
        vocab[rank] = token
        numbers[token] = number
    _check_bytes(path, vocab)
    merges: list[tuple[bytes, bytes]] = []
    ranks: dict[bytes, int] = {}  # of the tokens merged so far, which are those of lower ranks
    for rank, token in sorted(vocab.items()):
        if len(token) > 1:
            parts = _merge_parts(token, ranks)
            if len(parts) > 2:
                raise UserError(
                    f"{path}, line {numbers[token]}: no two tokens of lower rank merge to {token!r}, which stays in "
                    f"{len(parts)} parts; use a vocabulary whose ranks are the order of its merges."
                )
            merges.append((parts[0], parts[1]))
            ranks[token] = rank
    return vocab, merges


def _merge_parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two or more parts left of ``token`` when its bytes are merged to the tokens of ``ranks``, lowest first.

    :class:`lm.tokenizer.Tokenizer` cannot tell: it needs the merges that are looked for here.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    found = [ranks.get(left + right, _NO_RANK) for left, right in pairwise(parts)]
    while len(parts) > 2 and (least := min(found)) < _NO_RANK:
        i = found.index(least)  # the leftmost
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del found[i]
        if i > 0:
            found[i - 1] = ranks.get(parts[i - 1] + parts[i], _NO_RANK)
        if i < len(found):
            found[i] = ranks.get(parts[i] + parts[i + 1], _NO_RANK)
    return parts


def _check_bytes(path: Path, vocab: dict[int, bytes]) -> None:
    """Raise UserError where the vocabulary of the file ``path`` lacks a single byte."""
    tokens = set(vocab.values())
    if missing := [byte for i in range(256) if (byte := bytes([i])) not in tokens]:
        raise UserError(
            f"{path} has no tokens for {len(missing)} of the 256 single bytes, the first of them {missing[0]!r}; "
            "use a byte-level vocabulary that can spell any text."
        )


def write_vocab_text(path: Path, vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write the vocabulary for human eyes: id, the token as Python writes it, and the two parts it was merged from."""
    parts = {left + right: (left, right) for left, right in merges}
    with path.open("w", encoding="utf-8") as file:
        for token_id, token in sorted(vocab.items()):
            left, right = parts.get(token, (b"", b""))
            origin = f"  = {_show(left)} + {_show(right)}" if left else ""
            file.write(f"{token_id:>6}  {_show(token)}{origin}\n")


def _show(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))


def tokenizer_json(
    vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]], special_tokens: Iterable[str], pattern: str
) -> dict[str, Any]:
    """The content of a Hugging Face tokenizer.json that encodes to the same ids."""
    ids = {token: token_id for token_id, token in vocab.items()}
    specials = list(special_tokens)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre_tokenizer: dict[str, Any] = {**byte_level, "use_regex": True}
    if pattern != GPT2_PATTERN:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    # At one place Hugging Face takes the leftmost-longest added token, as we do.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token.encode()],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in specials
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _spellings(vocab, specials),
            "merges": [[spell(left), spell(right)] for left, right in merges],
        },
    }


def read_tokenizer_json(path: Path) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str], str]:
    """Read a Hugging Face tokenizer.json of byte-level BPE: (vocab, merges, special_tokens, pattern).

    The inverse of :func:`tokenizer_json`. Every added token becomes a special token, whether or not the file calls it
    special: both are found before text is cut into pretokens. What only adds tokens around a text, or shortens it, is
    left out with a warning. Raises UserError for a malformed file and for what would make text encode otherwise.
    """
    content = read_json(path)
    try:
        if feature := next(_unsupported_features(path, content), None):
            raise UserError(f"{path}: {feature} is not supported; use a tokenizer of byte-level BPE without it.")
        model, added = content["model"], content.get("added_tokens") or []
        spellings = {**model["vocab"]}
        for token in added:
            if spellings.setdefault(token["content"], token["id"]) != token["id"]:
                raise UserError(f"{path}: the added token {token['content']!r} has another id in the vocabulary.")
        specials = [token["content"] for token in added]
        vocab = _unspell_vocab(path, spellings, set(specials))
        lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        merges = _unspell_merges(lines, f"{path}, merge")
        pattern = _pretoken_pattern(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json of BPE: {error!r}.") from None
    try:
        compile_pattern(pattern)
    except UserError as error:  # it was written for another library
        raise UserError(f"{path}: {error}") from None
    _check_bytes(path, vocab)
    ids = {token: token_id for token_id, token in vocab.items()}
    if twice := [token for token_id, token in vocab.items() if ids[token] != token_id]:
        raise UserError(f"{path}: {twice[0]!r} has two ids, which is not supported; remove the added token.")
    return vocab, merges, specials, pattern


def _unsupported_features(path: Path, content: dict[str, Any]) -> Iterator[str]:
    """Name what in a tokenizer.json makes text encode otherwise than byte-level BPE does; warn of what is left out."""
    model, added = content["model"], content.get("added_tokens") or []
    if (kind := model.get("type", "BPE")) != "BPE":  # GPT-2's own file is older than this field
        yield f"the model type {kind!r}"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(name):
            yield f"{name} {model[name]!r}"
    for step in _steps(content, "normalizer"):
        yield f"the normalizer {step['type']!r}"
    if any(step.get("add_prefix_space") for step in _steps(content, "pre_tokenizer")):
        yield "add_prefix_space in the pre_tokenizer"
    if not _pretoken_pattern(content):
        yield f"the pre_tokenizer {content.get('pre_tokenizer')}"
    for token, name in product(added, ("lstrip", "rstrip", "single_word")):
        if token.get(name):
            yield f"{name} of the added token {token['content']!r}"
    # Hugging Face looks for the normalized tokens after the others; we take whichever begins first, or the longest.
    late, early = ([t["content"] for t in added if bool(t.get("normalized")) is flag] for flag in (True, False))
    for one, other in product(late, early):
        if other in one or any(other.startswith(one[i:]) for i in range(1, len(one))):
            yield f"the added token {one!r}, normalized and overlapping {other!r},"
    for step in _steps(content, "post_processor"):
        if step["type"] in ("TemplateProcessing", "BertProcessing", "RobertaProcessing"):
            log.warning("%s: the tokens that %s adds around a text are left out.", path, step["type"])
        elif step["type"] != "ByteLevel":  # which changes offsets only
            yield f"the post_processor {step['type']!r}"
    for name in ("truncation", "padding"):
        if content.get(name):
            log.warning("%s: its %s is left out.", path, name)


def _steps(content: dict[str, Any], component: str) -> list[dict[str, Any]]:
    """What a component of a tokenizer.json does, in order: the parts of a Sequence, or itself, or nothing."""
    found = content.get(component) or {"type": "Sequence"}
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}[component]
    return found.get(parts, []) if found["type"] == "Sequence" else [found]


def _pretoken_pattern(content: dict[str, Any]) -> str:
    """The pattern whose matches are the pretokens of a tokenizer.json, or an empty string where none says it."""
    match _steps(content, "pre_tokenizer"):
        case [{"type": "ByteLevel", **options}] if options.get("use_regex", True):
            return GPT2_PATTERN
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            return pattern
    return ""
