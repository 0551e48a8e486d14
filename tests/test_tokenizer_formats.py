"""The formats of other libraries: GPT-2's vocabulary and merges, and tiktoken's rank files, read and written."""

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm import formats
from lm.bpe import train_bpe
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer import Tokenizer
from tests.test_tokenizer_peers import known_text
from tests.tokenizers_made import bytes_tokenizer, make_tokenizer

BYTES = {i: bytes([i]) for i in range(256)}


# GPT-2's spelling


def test_every_byte_is_spelled_and_read_back() -> None:
    assert formats.spell(b" A\n\x00\xad\xff") == "ĠAĊĀŃÿ"
    assert len(set(formats.spell(bytes(range(256))))) == 256
    assert formats.unspell(formats.spell(bytes(range(256)))) == bytes(range(256))


@pytest.mark.parametrize("character", [" ", "\n", "\x7f", "\xa0", "\xad", "ń", "日", "🙂", "\ud800"])
def test_other_characters_spell_no_byte(character: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        formats.unspell("a" + character)


def test_a_spelling_outside_the_alphabet_is_a_special_token(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text('{"Ġa": 0, "a b": 1, "日": 2, "é": 3, "Ġé": 4}', encoding="utf-8")
    assert formats.read_vocab(path) == {0: b" a", 1: b"a b", 2: "日".encode(), 3: b"\xe9", 4: b" \xe9"}
    assert formats.read_vocab(path, ["é", "Ġa"])[3] == "é".encode()
    assert formats.read_vocab(path, ["é", "Ġa"])[0] == "Ġa".encode()


@pytest.mark.parametrize("content", ['{"a": true}', '{"a": 1.0}', '{"a": null}', '{"a": 0, "b c": 0}'])
def test_an_id_is_a_whole_number_used_once(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"vocab\.json: the id of '(a|b c)', .* is not a whole number used once"):
        formats.read_vocab(path)


@pytest.mark.parametrize("line", ["a ", " a", "a", "a  b", "a b ", "a b c", "a \u2003", " "])
def test_a_merge_is_two_spellings_with_a_space_between(tmp_path: Path, line: str) -> None:
    path = tmp_path / "merges.txt"
    path.write_text(f"#version: 0.2\n\na b\n{line}\nc d\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(f"merges.txt, line 4: {line!r} is not two spellings")):
        formats.read_merges(path)
    path.write_text("#version: 0.2\n\na b\nĠ Ċ\n#version c", encoding="utf-8")
    assert formats.read_merges(path) == [(b"a", b"b"), (b" ", b"\n"), (b"#version", b"c")]


# tiktoken


def tiktoken_reads(path: Path, specials: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiktoken's own encoder out of a rank file."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # it would keep a copy for good
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def test_tiktoken_encodes_alike_out_of_our_file(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken.load", reason="tiktoken is not installed")
    ours = make_tokenizer(special_tokens=[END_OF_TEXT, "<|pad|>"])
    path = tmp_path_factory.mktemp("ranks") / "ours.tiktoken"
    formats.write_tiktoken(path, ours.vocab, ours.special_tokens, ours.merges)
    theirs = tiktoken_reads(path, ours.special_ids, monkeypatch)
    assert {256, 257} == set(ours.special_ids.values()), "the ranks have a gap"

    @settings(deadline=None, max_examples=200)
    @given(known_text)
    def encode_alike(text: str) -> None:
        text += END_OF_TEXT
        ids = ours.encode(text)
        assert theirs.encode(text, allowed_special="all") == ids
        assert theirs.decode_bytes(ids) == text.encode()
        assert theirs.encode_ordinary(text) == ours.encode(text, allowed_special=())

    encode_alike()
    stories = END_OF_TEXT.join(demo_stories(200, seed=2))
    assert max(ours.encode(stories)) > 258
    assert theirs.encode(stories, allowed_special="all") == ours.encode(stories)


def test_a_rank_file_reads_as_it_was_written(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "ours.tiktoken"
    for ours in (tokenizer, custom_tokenizer, bytes_tokenizer(["<s>"])):
        formats.write_tiktoken(path, ours.vocab, ours.special_tokens, ours.merges)
        vocab, merges = formats.read_tiktoken(path)
        specials = set(ours.special_ids.values())
        assert list(vocab.items()) == [(i, token) for i, token in sorted(ours.vocab.items()) if i not in specials]
        assert merges == ours.merges


words = st.text("ab", min_size=2, max_size=12) | st.text(st.characters(codec="utf-8"), max_size=12)


@settings(deadline=None, max_examples=200)
@given(st.lists(words, min_size=1, max_size=20).map(" ".join))
def test_merges_follow_from_the_ranks(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever was learned, runs of one byte included."""
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_text(text, encoding="utf-8")
    vocab, merges = train_bpe(path, 290, [END_OF_TEXT])
    formats.write_tiktoken(path, vocab, [END_OF_TEXT], merges)
    assert formats.read_tiktoken(path)[1] == merges


def test_gpt2s_ranks_give_its_merges(gpt2: Tokenizer, tmp_path: Path) -> None:
    """The ids of GPT-2's bytes have an order of their own, ``!`` first."""
    path = tmp_path / "gpt2.tiktoken"
    formats.write_tiktoken(path, gpt2.vocab, gpt2.special_tokens, gpt2.merges)
    lines = path.read_bytes().splitlines()
    assert lines[0] == b"IQ== 0"
    assert len(lines) == 50_256
    vocab, merges = formats.read_tiktoken(path)
    assert vocab == {i: token for i, token in gpt2.vocab.items() if i != 50_256}
    assert merges == gpt2.merges


def test_a_special_token_of_one_byte_stays_in_the_rank_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.tiktoken"
    formats.write_tiktoken(path, bytes_tokenizer(["a", "<s>"]).vocab, ["a", "<s>"], [])
    assert formats.read_tiktoken(path) == (BYTES, [])


@pytest.mark.parametrize(
    ("tokens", "specials", "merges"),
    [
        ([b"bc", b"ab"], [], [(b"a", b"b"), (b"b", b"c")]),  # another order
        ([b"ab", b"abc"], ["ab"], [(b"a", b"b"), (b"ab", b"c")]),  # a merge needs a special token
        ([b"ab", b"xyz"], [], [(b"a", b"b")]),  # a token that no merge gives
    ],
)
def test_what_tiktoken_would_encode_otherwise_is_not_written(
    tmp_path: Path, tokens: list[bytes], specials: list[str], merges: list[tuple[bytes, bytes]]
) -> None:
    path = tmp_path / "ours.tiktoken"
    with pytest.raises(UserError, match="do not follow the order of the merges") as caught:
        formats.write_tiktoken(path, dict(enumerate([*BYTES.values(), *tokens])), specials, merges)
    assert str(path) in str(caught.value)
    assert not path.exists()


def ranks_of(*tokens: bytes) -> list[bytes]:
    """The lines of a rank file: the single bytes from the last to the first, then ``tokens``."""
    ranked = [*reversed(BYTES.values()), *tokens]
    return [b"%b %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranked)]


def test_the_order_of_the_ranks_counts_not_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    lines = ranks_of(b"bc", b"ab", b"abc")
    path.write_bytes(b"\r\n".join([*reversed(lines), b"", b""]))
    vocab, merges = formats.read_tiktoken(path)
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
        ([b"YWJjZA== 256"], r"line 257: no two tokens .* merge to b'abcd', which stays in 4 parts; use"),
        # ab would have to come first
        ([b"YWJj 256", b"YWI= 257"], r"line 257: no two tokens .* merge to b'abc', which stays in 3 parts"),
        # abcd is ab and cd, but bc comes before both: a, bc, d
        ([b"YmM= 256", b"YWI= 257", b"Y2Q= 258", b"YWJjZA== 259"], r"line 260: .* b'abcd', which stays in 3 parts"),
    ],
)
def test_a_malformed_rank_file_is_a_users_mistake(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"\n".join(ranks_of() + lines))
    with pytest.raises(UserError, match=message) as caught:
        formats.read_tiktoken(path)
    assert str(path) in str(caught.value)


def test_a_rank_file_needs_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"\n".join(line for line in ranks_of(b"ab") if not line.startswith((b"YQ==", b"AA=="))))
    with pytest.raises(UserError, match=r"ranks\.tiktoken has no tokens for 2 of the 256 single bytes.*b'\\x00'"):
        formats.read_tiktoken(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="256 of the 256"):
        formats.read_tiktoken(path)
    with pytest.raises(UserError, match=r"other\.tiktoken cannot be read: No such file"):
        formats.read_tiktoken(tmp_path / "other.tiktoken")


def test_a_tokenizer_goes_through_tiktokens_ranks(tmp_path: Path) -> None:
    """The file names no special tokens: they are told beside it, with their ids."""
    tokenizer = make_tokenizer()
    tokenizer.save_tiktoken(tmp_path / "ranks.tiktoken")
    again = Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", tokenizer.special_ids)
    text = "Once upon a time<|endoftext|> there was café 日本語"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.vocab, again.merges) == (tokenizer.vocab, tokenizer.merges)
    with pytest.raises(UserError, match="another token with the id 97 of the special token '<s>'"):
        Tokenizer.from_tiktoken(tmp_path / "ranks.tiktoken", {"<s>": 97})
