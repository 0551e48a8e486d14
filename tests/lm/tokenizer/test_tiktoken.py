"""tiktoken's rank files: writing, reading, malformed files."""

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.formats.tiktoken import read_tiktoken, write_tiktoken
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer, stable_text

BYTES = {i: bytes([i]) for i in range(256)}


def load_with_tiktoken(path: Path, specials: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a rank file with tiktoken."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # disables its cache
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("trained", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def test_tiktoken_encodes_the_same_with_our_file(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken.load", reason="tiktoken is not installed")
    textmill = make_tokenizer(special_tokens=[END_OF_TEXT, "<|pad|>"])
    path = tmp_path_factory.mktemp("ranks") / "ranks.tiktoken"
    write_tiktoken(path, textmill.vocab, textmill.special_tokens, textmill.merges)
    encoding = load_with_tiktoken(path, textmill.special_ids, monkeypatch)
    assert {256, 257} == set(textmill.special_ids.values()), "the ranks have a gap"

    @examples(200)
    @given(stable_text)
    def encodes_the_same(text: str) -> None:
        text += END_OF_TEXT
        ids = textmill.encode(text)
        assert encoding.encode(text, allowed_special="all") == ids
        assert encoding.decode_bytes(ids) == text.encode()
        assert encoding.encode_ordinary(text) == textmill.encode(text, allowed_special=())

    encodes_the_same()
    stories = END_OF_TEXT.join(demo_stories(200, seed=2))
    assert max(textmill.encode(stories)) > 258
    assert encoding.encode(stories, allowed_special="all") == textmill.encode(stories)


def test_read_inverts_write(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    for textmill in (tokenizer, custom_tokenizer, bytes_tokenizer(["<s>"])):
        write_tiktoken(path, textmill.vocab, textmill.special_tokens, textmill.merges)
        vocab, merges, ignore_merges = read_tiktoken(path)
        assert not ignore_merges
        specials = set(textmill.special_ids.values())
        assert list(vocab.items()) == [(i, token) for i, token in sorted(textmill.vocab.items()) if i not in specials]
        assert merges == textmill.merges


words = st.text("ab", min_size=2, max_size=12) | st.text(st.characters(codec="utf-8"), max_size=12)


@examples(200)
@given(st.lists(words, min_size=1, max_size=20).map(" ".join))
def test_merges_follow_from_the_ranks(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_text(text, encoding="utf-8")
    vocab, merges = train_bpe(path, 290, [END_OF_TEXT])
    write_tiktoken(path, vocab, [END_OF_TEXT], merges)
    assert read_tiktoken(path)[1] == merges


def test_gpt2_merges_follow_from_its_ranks(gpt2: Tokenizer, tmp_path: Path) -> None:
    """GPT-2's bytes are not in the order of their values; ``!`` is first."""
    path = tmp_path / "gpt2.tiktoken"
    write_tiktoken(path, gpt2.vocab, gpt2.special_tokens, gpt2.merges)
    lines = path.read_bytes().splitlines()
    assert lines[0] == b"IQ== 0"
    assert len(lines) == 50_256
    vocab, merges, _ = read_tiktoken(path)
    assert vocab == {i: token for i, token in gpt2.vocab.items() if i != 50_256}
    assert merges == gpt2.merges


def test_a_special_token_of_one_byte_stays_in_the_rank_file(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    write_tiktoken(path, bytes_tokenizer(["a", "<s>"]).vocab, ["a", "<s>"], [])
    assert read_tiktoken(path) == (BYTES, [], False)


@pytest.mark.parametrize(
    ("tokens", "merges"),
    [
        ([b"abcd"], []),  # no merge gives it: it only stands for a whole pretoken
        ([b"bc", b"ab", b"cd", b"abcd"], [(b"b", b"c"), (b"a", b"b"), (b"c", b"d")]),  # bc is merged first: a, bc, d
        ([b"abc", b"ab"], [(b"ab", b"c"), (b"a", b"b")]),  # as in Llama 3: a merge of a token of higher rank
    ],
)
def test_ranks_may_be_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[bytes], merges: list[tuple[bytes, bytes]]
) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"\n".join(rank_lines(*tokens)))
    _, found, ignore_merges = read_tiktoken(path)
    assert found == merges and ignore_merges == (len(merges) < len(tokens))
    textmill, encoding = Tokenizer.from_tiktoken(path), load_with_tiktoken(path, {}, monkeypatch)
    for text in ("abcd", "abcde", "zabcd abcd", "abc ab bc abccd bcd dabcabcd"):
        assert textmill.encode(text) == encoding.encode_ordinary(text)
    again = tmp_path / "again.tiktoken"
    textmill.save_tiktoken(again)
    assert read_tiktoken(again) == read_tiktoken(path)


@examples(300)
@given(
    st.lists(st.text("ab c", min_size=2, max_size=5), unique=True, max_size=12), st.lists(st.text("ab c", max_size=12))
)
def test_any_ranks_encode_as_with_tiktoken(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[str], texts: list[str]
) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    path = tmp_path_factory.getbasetemp() / "drawn.tiktoken"
    path.write_bytes(b"\n".join(rank_lines(*(token.encode() for token in tokens))))
    ranks = {token: rank for rank, token in read_tiktoken(path)[0].items()}
    encoding = tiktoken.Encoding("drawn", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    textmill = Tokenizer.from_tiktoken(path)
    for text in [*texts, *tokens]:
        assert textmill.encode(text) == encoding.encode_ordinary(text)


@pytest.mark.parametrize(
    ("tokens", "specials", "merges"),
    [
        ([b"bc", b"ab"], [], [(b"a", b"b"), (b"b", b"c")]),  # the ids are not in the order of the merges
        ([b"ab", b"abc"], ["ab"], [(b"a", b"b"), (b"ab", b"c")]),  # a merge needs a special token
        ([b"ab", b"xyz"], [], [(b"a", b"b")]),  # a token that no merge gives
    ],
)
def test_ids_that_do_not_follow_the_merges_are_not_written(
    tmp_path: Path, tokens: list[bytes], specials: list[str], merges: list[tuple[bytes, bytes]]
) -> None:
    path = tmp_path / "ranks.tiktoken"
    with pytest.raises(UserError, match="do not follow the order of the merges") as caught:
        write_tiktoken(path, dict(enumerate([*BYTES.values(), *tokens])), specials, merges)
    assert str(path) in str(caught.value)
    assert not path.exists()


def rank_lines(*tokens: bytes) -> list[bytes]:
    """Return the lines of a rank file: the single bytes in descending order, then ``tokens``."""
    ranked = [*reversed(BYTES.values()), *tokens]
    return [b"%b %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranked)]


def test_lines_may_be_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    lines = rank_lines(b"bc", b"ab", b"abc")
    path.write_bytes(b"\r\n".join([*reversed(lines), b"", b""]))
    vocab, merges, _ = read_tiktoken(path)
    assert vocab[0] == b"\xff" and vocab[255] == b"\0" and vocab[258] == b"abc"
    assert merges == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]  # bc ranks before ab


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"YWI= 256", b"YWI 257"], r"line 258: b'YWI 257' is not the Base64 of a token, a space and its rank"),
        ([b"YW*I= 256"], "line 257: .* is not the Base64"),
        ([b"YWI="], "line 257: .* is not the Base64"),
        ([b"256"], "line 257: .* is not the Base64"),
        ([b"YWI= 256 a"], "line 257: .* is not the Base64"),
        ([b"YWI= x"], "line 257: .* is not the Base64"),
        ([b"YWI= -1"], "line 257: .* is not the Base64"),
        ([b"YWI= 2.5"], "line 257: .* is not the Base64"),
        ([b"\xff\xfe 256"], "line 257: .* is not the Base64"),
        ([b"", b"YWI= 256", b"YWI= 257"], r"line 259: the token b'ab' is given twice; remove"),
        ([b"YWI= 256", b"YmM= 256"], r"line 258: the rank 256 is given twice; remove"),
    ],
)
def test_a_malformed_rank_file_is_rejected(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"\n".join(rank_lines() + lines))
    with pytest.raises(UserError, match=message) as caught:
        read_tiktoken(path)
    assert str(path) in str(caught.value)


def test_a_rank_file_without_every_byte_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"\n".join(line for line in rank_lines(b"ab") if not line.startswith((b"YQ==", b"AA=="))))
    with pytest.raises(UserError, match=r"ranks\.tiktoken has no tokens for 2 of the 256 single bytes.*b'\\x00'"):
        read_tiktoken(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="256 of the 256"):
        read_tiktoken(path)
    with pytest.raises(UserError, match=r"other\.tiktoken cannot be read: No such file"):
        read_tiktoken(tmp_path / "other.tiktoken")


def test_a_tokenizer_is_restored_from_a_rank_file(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_tiktoken(tmp_path / "ranks.tiktoken")
    again = Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", tokenizer.special_ids)
    text = "Once upon a time<|endoftext|> there was café 日本語"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.vocab, again.merges) == (tokenizer.vocab, tokenizer.merges)
    with pytest.raises(UserError, match="another token with the id 97 of the special token '<s>'"):
        Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", {"<s>": 97})


def test_a_token_with_two_ids_is_not_written(tmp_path: Path) -> None:
    vocab = {**BYTES, 256: b"ab", 257: b"ab"}
    with pytest.raises(UserError, match="was not written"):
        write_tiktoken(tmp_path / "ranks.tiktoken", vocab, [], [(b"a", b"b")], ignore_merges=True)
