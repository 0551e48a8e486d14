"""SentencePiece's models encode as the library does, and the kernels as the plain reference."""

import io
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.utf8 import replace_surrogates
from lm.tokenizer.piece_encoder import PieceEncoder
from lm.tokenizer.piece_reference import encode_pieces
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
)

sentencepiece = pytest.importorskip("sentencepiece", reason="trains the models")
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["<unused0>", "\n\n", "▁▁", "▁▁▁", "<b>", "abc"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama 2": {"model_type": "bpe", "byte_fallback": True, **LLAMA},
    "gemma": {"model_type": "bpe", "byte_fallback": True, **GEMMA},
    "bpe": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe, normalized": {"model_type": "bpe", "byte_fallback": True},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True, **LLAMA},
    "unigram, defined": {"model_type": "unigram", "byte_fallback": True, **GEMMA},
    "unigram, normalized": {"model_type": "unigram"},
}
CORPUS = [*demo_stories(150), *["naïve café 日本語 の文章 aaaa abababab", "two  spaces   three"] * 20]
TEXTS = st.lists(
    st.sampled_from(
        ["Once upon a time", " ", "  ", "▁", "aaaaaaa", "abab", "abc", "日本", "é", "🙂", "\n\n", "<b>", "<s>", "<unk>"]
    )
    | st.text(max_size=6),
    max_size=8,
).map("".join)


@cache
def load(name: str) -> tuple[Any, SentencePieceTokenizer]:
    """Return the library's tokenizer of a small model, and ours."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=file, vocab_size=480, hard_vocab_limit=False, minloglevel=2,
        num_threads=1, **MODELS[name],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(file.getvalue())
        return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue()), SentencePieceTokenizer(path)


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_the_library(name: str, text: str) -> None:
    library, ours = load(name)
    found, expected = ours.encode(text), library.encode(replace_surrogates(text))
    if name == "unigram, defined" and found != expected:  # pieces of users have one score: some paths are equal
        assert sorted(found) == sorted(expected)
    else:
        assert found == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_long_text_has_the_ids_of_the_library(name: str) -> None:
    library, ours = load(name)
    text = "".join(demo_stories(3000)) + "日本語🙂 naïve   ab\r\n\t" * 50
    assert ours.encode(text) == library.encode(text)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_read_as_by_the_library(name: str) -> None:
    library, ours = load(name)
    assert (ours.size, ours.bos_id, ours.eos_id) == (library.vocab_size(), library.bos_id(), library.eos_id())
    pieces = ours._model.pieces
    assert [piece.text for piece in pieces] == [library.id_to_piece(i) for i in range(ours.size)]
    assert [piece.score for piece in pieces] == [library.get_score(i) for i in range(ours.size)]
    for kind, is_kind in ((CONTROL, library.is_control), (UNKNOWN, library.is_unknown), (BYTE, library.is_byte)):
        assert [piece.type == kind for piece in pieces] == [is_kind(i) for i in range(ours.size)]


@st.composite
def models(draw: st.DrawFn) -> SentencePieceModel:
    """A model with few scores, so that many are equal, and with pieces that no merge makes."""
    texts = draw(st.lists(st.text("abc▁", min_size=1, max_size=5), unique=True, max_size=25))
    kinds = st.sampled_from([NORMAL] * 5 + [USER_DEFINED])
    scores = st.sampled_from([-1.0, -1.5, -2.0, -2.5, -9.0, 0.0, 1e-3, -0.1])
    pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL)]
    pieces += [Piece(text, draw(scores), draw(kinds)) for text in texts]
    byte_fallback = draw(st.booleans())
    if byte_fallback:
        pieces += [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return SentencePieceModel(pieces, draw(st.booleans()), byte_fallback)


@settings(deadline=None, max_examples=300)
@given(model=models(), text=st.text("abc▁dé", max_size=30))
def test_the_kernels_equal_the_reference(model: SentencePieceModel, text: str) -> None:
    assert PieceEncoder(model).encode(text) == encode_pieces(model, text)


def test_only_ties_and_unknown_text(tmp_path: Path) -> None:
    model = SentencePieceModel([Piece("<unk>", 0.0, UNKNOWN), Piece("a", -1.0), Piece("aa", -2.0)], is_bpe=False)
    assert PieceEncoder(model).encode("aaa") == encode_pieces(model, "aaa")
    assert PieceEncoder(model).encode("xyaxy") == [0, 1, 0]
    assert PieceEncoder(model._replace(is_bpe=True)).encode("xyaaxy") == [0, 2, 0]
    assert PieceEncoder(model).encode("") == []


def message(*fields: bytes) -> bytes:
    return b"".join(fields)


def part(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def number(field: int, value: int) -> bytes:
    return bytes([(field << 3) & 127 | 128, field >> 4, value]) if field > 15 else bytes([field << 3, value])


def piece(text: bytes, kind: int = NORMAL) -> bytes:
    return part(1, part(1, text) + number(3, kind))


GOOD = [piece(b"<unk>", UNKNOWN), piece(b"<s>", CONTROL), piece(b"</s>", CONTROL), piece(b"a")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no pieces"),
        (b"\xff" * 30, "a number of it does not end"),
        (b"\x0a\x7f", "a field of it goes beyond its end"),
        (b"\x0b", "no message of protobuf"),
        (message(*GOOD, piece(b"a")), "one piece twice"),
        (message(*GOOD, piece(b"")), "an empty piece"),
        (message(*GOOD, piece(b"\xff")), "can't decode"),
        (message(*GOOD, piece(b"b", 9)), "unknown type"),
        (message(*GOOD[1:]), "not one piece for unknown text"),
        (message(*GOOD, piece(b"<0xZZ>", BYTE)), "is not written as <0x0A>"),
        (message(*GOOD, part(2, number(35, 1))), "no pieces for all of them"),
        (message(*GOOD, part(2, number(3, 3))), "its type 3 is neither unigram nor BPE"),
        (message(*GOOD, part(2, number(24, 1))), "treat_whitespace_as_suffix"),
        (message(*GOOD, piece(b"u", UNUSED), part(2, number(3, 2))), "a BPE with unused pieces"),
        (message(*GOOD, part(1, number(1, 1))), "a text of it is a number"),
        (message(*GOOD, part(1, part(1, b"x") + part(3, b"x"))), "a number of it is a text"),
    ],
)
def test_damaged_models_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"cannot be read: .*{reason}.*It must be a SentencePiece model"):
        SentencePieceTokenizer(path)


def test_a_model_by_hand_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(message(*GOOD, piece("▁".encode())))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    tokenizer = SentencePieceTokenizer(path)
    assert tokenizer.encode("  a  a x") == [4, 3, 4, 3, 4, 0]
    assert tokenizer.decode([4, 3, 0]) == " a \u2047 "
    path.write_bytes(message(*GOOD, part(3, part(2, b"map"))))
    with pytest.raises(UserError, match="needs the sentencepiece library"):
        SentencePieceTokenizer(path)
