"""Encoding and decoding: an obvious reference, other libraries on real text, files, and what users get wrong."""

import itertools
import json
import lzma
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.bpe import train_merges
from lm.counts import count_pretokens
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.pretokens import END_OF_TEXT, GPT2_PATTERN, pretokenize, split_special
from lm.tokenizer import Tokenizer

SPECIALS = [END_OF_TEXT, "<|endoftext|><|endoftext|>", "<|a b|>", "é!"]
CUSTOM_PATTERN = r"\p{L}{1,3}|\p{N}|[^\p{L}\p{N}\s]+"  # white space falls into the gaps


def make_tokenizer(
    pattern: str = GPT2_PATTERN, special_tokens: list[str] | None = None, merges: int = 400
) -> Tokenizer:
    """A tokenizer trained on demo stories and some text that is not ASCII."""
    special_tokens = SPECIALS if special_tokens is None else special_tokens
    blocks = [*demo_stories(100), "naïve café déjà vu 日本語の文章 日本語 🙂🙂 aaaaaaaa abababab \n\n\n\t\t" * 5]
    counts = count_pretokens(blocks, SPECIALS, pattern)
    pairs = ((pretoken.encode(), count) for pretoken, count in counts.items())
    vocab, learned = train_merges(pairs, 256 + len(special_tokens) + merges, special_tokens)
    return Tokenizer(vocab, learned, special_tokens, pattern)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def custom_tokenizer() -> Tokenizer:
    return make_tokenizer(CUSTOM_PATTERN)


def bytes_tokenizer(special_tokens: list[str] | None = None) -> Tokenizer:
    """A tokenizer without merges."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], special_tokens)


def naive_encode(tokenizer: Tokenizer, text: str, special_tokens: list[str]) -> list[int]:
    """Encode as the textbook has it: join the leftmost pair that was learned first, then look at all pairs anew."""
    ids = {token: token_id for token_id, token in tokenizer.vocab.items()}
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(tokenizer.merges)))}
    found: list[int] = []
    for piece, is_special in split_special(text, special_tokens):
        if is_special:
            found.append(ids[piece.encode()])
            continue
        for pretoken in pretokenize(piece, tokenizer.pattern):
            word = [bytes([byte]) for byte in pretoken.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(word)) if pair in ranks]:
                _, i = min(pairs)
                word[i : i + 2] = [word[i] + word[i + 1]]
            found += [ids[token] for token in word]
    return found


pieces = st.sampled_from(
    [
        *SPECIALS,
        "<|endof",
        "<|a",
        " b|>",
        "Once upon a time",
        "there was",
        "café",
        "日本語",
        "aaaaa",
        "ababa",
        "🙂",
        " ",
        "\n",
    ]
)
any_text = st.lists(pieces | st.text(max_size=8), max_size=12).map("".join) | st.text()


@settings(deadline=None, max_examples=300)
@given(any_text)
def test_decode_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, allowed_special=())) == text


@settings(deadline=None, max_examples=100)
@given(any_text)
def test_decode_gives_the_text_back_with_a_custom_pattern(custom_tokenizer: Tokenizer, text: str) -> None:
    assert custom_tokenizer.decode(custom_tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=300)
@given(any_text)
def test_encode_equals_the_naive_reference(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, SPECIALS)
    assert tokenizer.encode(text, allowed_special=()) == naive_encode(tokenizer, text, [])
    assert custom_tokenizer.encode(text) == naive_encode(custom_tokenizer, text, SPECIALS)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=12), st.text("ab ", max_size=60))
def test_encode_equals_the_naive_reference_with_any_merges(words: list[str], text: str) -> None:
    """Many merges of two letters: runs such as ``aaaa``, where it matters which pair is joined first."""
    vocab, merges = train_merges([(word.encode(), 1) for word in words], 300, [])
    tokenizer = Tokenizer(vocab, merges)
    assert tokenizer.encode(text) == naive_encode(tokenizer, text, [])


def test_the_handout_example() -> None:
    """CS336 assignment 1, section 2.6.1."""
    tokens = [b" ", b"a", b"c", b"e", b"h", b"t", b"th", b" c", b" a", b"the", b" at"]
    rest = [bytes([byte]) for byte in range(256) if bytes([byte]) not in tokens]
    merges = [(b"t", b"h"), (b" ", b"c"), (b" ", b"a"), (b"th", b"e"), (b" a", b"t")]
    tokenizer = Tokenizer(dict(enumerate(tokens + rest)), merges)
    assert tokenizer.encode("the cat ate") == [9, 7, 1, 5, 10, 3]


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b \udfff")) == "a\ufffdb \ufffd"
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")


def test_one_pretoken_of_200_000_letters() -> None:
    """The merges double a run up to 64 letters, so that the leftmost-first order gives 3,125 whole tokens."""
    doubles = [b"a" * 2**i for i in range(7)]
    vocab = {i: bytes([i]) for i in range(256)} | {255 + i: token for i, token in enumerate(doubles) if i}
    tokenizer = Tokenizer(vocab, [(token, token) for token in doubles[:-1]])
    assert tokenizer.encode("a" * 200_000) == [255 + 6] * (200_000 // 64)


# encode_iterable


@settings(deadline=None, max_examples=200)
@given(st.lists(any_text, max_size=6))
def test_encode_iterable_equals_encode_of_the_whole(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, blocks: list[str]
) -> None:
    assert list(tokenizer.encode_iterable(blocks)) == tokenizer.encode("".join(blocks))
    assert list(custom_tokenizer.encode_iterable(blocks)) == custom_tokenizer.encode("".join(blocks))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9000), st.integers(0, 5000))
def test_encode_iterable_equals_encode_past_its_buffer(tokenizer: Tokenizer, size: int, start: int) -> None:
    """Blocks of any size of a text that is many times longer than what is held."""
    text = "".join(demo_stories(60))[start:]
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    assert list(tokenizer.encode_iterable(blocks)) == tokenizer.encode(text)


def test_encode_iterable_is_lazy(tokenizer: Tokenizer) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "Once upon a time. "

    ids = list(itertools.islice(tokenizer.encode_iterable(endless()), 10_000))
    assert ids == tokenizer.encode("Once upon a time. " * 10_000)[:10_000]
    assert taken < 10_000


def test_encode_iterable_takes_an_open_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n\nthree<|endoftext|>\n")
    with path.open() as file:
        assert list(tokenizer.encode_iterable(file)) == tokenizer.encode("one\ntwo\n\nthree<|endoftext|>\n")


def test_encode_iterable_of_nothing(tokenizer: Tokenizer) -> None:
    assert list(tokenizer.encode_iterable([])) == []
    assert list(tokenizer.encode_iterable(["", ""])) == []


# special tokens


def test_of_overlapping_special_tokens_the_longest_wins(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.special_ids[END_OF_TEXT], tokenizer.special_ids[END_OF_TEXT * 2]
    assert tokenizer.encode(END_OF_TEXT) == [one]
    assert tokenizer.encode(END_OF_TEXT * 2) == [two]
    assert tokenizer.encode(END_OF_TEXT * 3) == [two, one]


def test_missing_special_tokens_are_appended() -> None:
    tokenizer = bytes_tokenizer(["<s>", "a", "<t>"])
    assert tokenizer.special_ids == {"<s>": 256, "a": ord("a"), "<t>": 257}
    assert tokenizer.size == 258
    assert tokenizer.encode("<t>b<s>") == [257, ord("b"), 256]
    assert tokenizer.decode([256, 257]) == "<s><t>"


def test_a_given_vocabulary_is_not_changed() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    Tokenizer(vocab, [], ["<s>"])
    assert len(vocab) == 256


def test_special_tokens_that_are_not_allowed_are_plain_text(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b<|a b|>"
    plain = tokenizer.encode(text, allowed_special=())
    assert not set(plain) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(plain) == text
    some = tokenizer.encode(text, allowed_special={"<|a b|>"})
    assert tokenizer.special_ids["<|a b|>"] in some
    assert tokenizer.special_ids[END_OF_TEXT] not in some
    assert tokenizer.encode(text, allowed_special=SPECIALS) == tokenizer.encode(text)


def test_an_unknown_allowed_special_token_is_a_users_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="'<x>' is not a special token"):
        tokenizer.encode("a", allowed_special=["<x>"])


@pytest.mark.parametrize("special_tokens", [["<s>", "<s>"], [""], ["\ud800"]])
def test_unfit_special_tokens_are_a_users_mistake(special_tokens: list[str]) -> None:
    with pytest.raises(UserError, match=r"[Ss]pecial token"):
        bytes_tokenizer(special_tokens)


# decode


@pytest.mark.parametrize("token_id", [-1, 256, 10**9])
def test_decoding_an_unknown_id_is_a_users_mistake(token_id: int) -> None:
    with pytest.raises(UserError, match=f"Token id {token_id} is not in the vocabulary of 256"):
        bytes_tokenizer().decode([65, token_id])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=20))
def test_bytes_that_are_not_utf8_decode_to_the_replacement_character(data: bytes) -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.decode(data) == data.decode("utf-8", "replace")
    assert tokenizer.decode(data, errors="ignore") == data.decode("utf-8", "ignore")
    assert tokenizer.decode_bytes(data) == data


def test_decode_takes_any_iterable_of_ids() -> None:
    assert bytes_tokenizer().decode(iter([72, 105])) == "Hi"
    assert bytes_tokenizer().decode([]) == ""


# files


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    """Two tokenizers hold the same, in the same order."""
    assert sorted(one.vocab.items()) == sorted(other.vocab.items())
    assert one.merges == other.merges
    assert one.special_tokens == other.special_tokens
    assert one.pattern == other.pattern


def test_a_saved_tokenizer_loads_the_same(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number, saved in enumerate([tokenizer, custom_tokenizer, bytes_tokenizer()]):
        saved.save(tmp_path / str(number))
        assert_same(Tokenizer.load(tmp_path / str(number)), saved)


def test_a_saved_tokenizer_reads_from_its_gpt2_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt", SPECIALS), tokenizer)
    unnamed = Tokenizer.from_files(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert unnamed.special_tokens == []
    assert unnamed.encode("Once upon a time") == tokenizer.encode("Once upon a time")
    assert unnamed.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT


def test_merges_may_begin_with_a_version_line_and_end_with_crlf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_bytes(b"#version: 0.2\r\n" + merges.read_bytes().replace(b"\n", b"\r\n"))
    assert Tokenizer.from_files(tmp_path / "vocab.json", merges, SPECIALS).merges == tokenizer.merges


def test_the_vocabulary_is_dumped_for_human_eyes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(tokenizer.vocab)
    assert lines[ord("A")].split() == ["65", "'A'"]
    left, right = tokenizer.merges[0]
    assert lines[256 + len(SPECIALS)].split("  ")[-1] == f"= {left.decode()!r} + {right.decode()!r}"


def test_a_vocabulary_and_merges_of_two_tokenizers_are_a_users_mistake() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    with pytest.raises(UserError, match=r"lacks the token b'ab'.*not of one tokenizer"):
        Tokenizer(vocab, [(b"a", b"b")])
    with pytest.raises(UserError, match="lacks the token b'xy'"):
        Tokenizer(vocab, [(b"xy", b"b")])
    with pytest.raises(UserError, match="lacks the token b'A'"):
        Tokenizer({i: token for i, token in vocab.items() if i != 65}, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not a JSON file"),
        (b"\xff", "is not a JSON file"),
        (b"[]", "is not a vocabulary"),
        (b'{"a": "0"}', "the id of 'a', '0', is not a whole number used once"),
        (b'{"a": -1}', "the id of 'a', -1,"),
        (b'{"a": 0, "b": 0}', "the id of 'b', 0,"),
        (b'{"\\ud800": 0}', "lone surrogate"),
        (b'{"a": 0}', "lacks the token"),
    ],
)
def test_a_malformed_vocabulary_is_a_users_mistake(tmp_path: Path, content: bytes, message: str) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_bytes(content)
    merges.write_text("")
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_files(vocab, merges)
    assert "lacks" in message or str(vocab) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"), [("t h\nth\n", 2), ("t h\n\nt h e\n", 3), ("a \u2603\n", 1), ("#version\nt\th\n", 2)]
)
def test_malformed_merges_are_a_users_mistake(tmp_path: Path, content: str, line: int) -> None:
    bytes_tokenizer().save(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"line {line}: ") as caught:
        Tokenizer.from_files(tmp_path / "vocab.json", merges)
    assert str(merges) in str(caught.value)


def test_merges_that_are_not_text_are_a_users_mistake(tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"merges\.txt cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_missing_file_is_a_users_mistake(tmp_path: Path, name: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"special_tokens": []}', "null", "no json"])
def test_a_malformed_config_is_a_users_mistake(tmp_path: Path, content: str) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("special", ["é", "Ġ"])
def test_a_special_token_spelled_as_a_byte_is_not_saved(tmp_path: Path, special: str) -> None:
    """GPT-2's spelling of the byte 0xE9 is ``é``: a file with both would lose one of them."""
    with pytest.raises(UserError, match="choose another special token"):
        bytes_tokenizer([special]).save(tmp_path)


def test_any_other_special_token_is_saved(tmp_path: Path) -> None:
    specials = ["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"]
    tokenizer = bytes_tokenizer(specials)
    tokenizer.save(tmp_path)
    assert_same(Tokenizer.load(tmp_path), tokenizer)
    assert (tmp_path / "tokenizer.json").exists()


# other libraries


def is_classified_alike(text: str) -> bool:
    """Whether every Unicode table gives these characters their classes: each library has the table of its own year.

    Unicode 3.2, which Python keeps, is older than all of them. A character that it knows and that has the same
    category today is a letter, a number or neither in every version between.
    """
    return all(unicodedata.ucd_3_2_0.category(c) == unicodedata.category(c) != "Cn" for c in text)


known_characters = st.characters(codec="utf-8").filter(is_classified_alike)
known_text = st.lists(pieces | st.text(known_characters, max_size=10), max_size=10).map("".join)


def hugging_face(directory: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def both_saved(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Tokenizer, Any]]:
    """The two trained tokenizers, each with what Hugging Face reads from its files."""
    saved = []
    for ours in (tokenizer, custom_tokenizer):
        directory = tmp_path_factory.mktemp("tokenizer")
        ours.save(directory)
        saved.append((ours, hugging_face(directory)))
    return saved


@settings(deadline=None, max_examples=200)
@given(known_text)
def test_hugging_face_reads_our_file_and_encodes_the_same(both_saved: list[tuple[Tokenizer, Any]], text: str) -> None:
    for ours, theirs in both_saved:
        ids = ours.encode(text)
        assert theirs.encode(text).ids == ids
        if "é!" not in text:  # Hugging Face reads special tokens in the byte spelling too when it decodes
            assert theirs.decode(ids, skip_special_tokens=False) == text


def test_hugging_face_encodes_stories_the_same(both_saved: list[tuple[Tokenizer, Any]]) -> None:
    text = "".join(demo_stories(300, seed=1))
    for ours, theirs in both_saved:
        assert theirs.encode(text).ids == ours.encode(text)


def test_hugging_face_knows_special_tokens_missing_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(["<s>", "日本"])
    tokenizer.save(tmp_path)
    text = "a<s>b 日本 é"
    assert hugging_face(tmp_path).encode(text).ids == tokenizer.encode(text)


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> Tokenizer:
    return Tokenizer.from_files(shared_data / "gpt2_vocab.json", shared_data / "gpt2_merges.txt", [END_OF_TEXT])


@pytest.fixture(scope="module")
def tiktoken_gpt2(shared_data: Path) -> Any:
    """tiktoken's GPT-2 out of the published vocabulary, read here apart from ``lm.formats``."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    spellings = json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))
    end_of_text = spellings.pop(END_OF_TEXT)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={bytes(map(byte_of.__getitem__, text)): rank for text, rank in spellings.items()},
        special_tokens={END_OF_TEXT: end_of_text},
    )


@pytest.mark.parametrize(
    "name", ["tinyshakespeare.txt", "tinystories_sample.txt", "stories_valid.txt.xz", "stories_train.txt.xz"]
)
def test_gpt2_equals_tiktoken_on_real_text(gpt2: Tokenizer, tiktoken_gpt2: Any, shared_data: Path, name: str) -> None:
    with (lzma.open if name.endswith(".xz") else open)(shared_data / name, "rb") as file:
        text = file.read(2_000_000).decode(errors="ignore")
    expected = tiktoken_gpt2.encode(text, allowed_special="all")
    assert gpt2.encode(text) == expected
    assert gpt2.decode(expected) == text


@settings(deadline=None, max_examples=500)
@given(known_text | st.text(known_characters, max_size=60))
def test_gpt2_equals_tiktoken_on_any_text(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode(text, allowed_special="all")
    assert gpt2.encode(text, allowed_special=()) == tiktoken_gpt2.encode_ordinary(text)


@settings(deadline=None, max_examples=200)
@given(st.text("a1 \n\t'sdmtlverS\u00a0\u3000\x1c\x85!é", max_size=40))
def test_gpt2_equals_tiktoken_on_contractions_and_white_space(gpt2: Tokenizer, tiktoken_gpt2: Any, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_gpt2_files_are_written_as_they_were_read(gpt2: Tokenizer, shared_data: Path, tmp_path: Path) -> None:
    gpt2.save(tmp_path)
    assert (tmp_path / "merges.txt").read_bytes().rstrip() == (shared_data / "gpt2_merges.txt").read_bytes().rstrip()
    ours = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert ours == json.loads((shared_data / "gpt2_vocab.json").read_text(encoding="utf-8"))


@given(st.text(known_characters, max_size=60))
@settings(deadline=None, max_examples=100)
def test_a_tokenizer_of_our_own_equals_tiktoken(text: str) -> None:
    """Needs no files of GPT-2's: tiktoken takes our ids for ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    counts = [(word.encode(), 9 - i) for i, word in enumerate((" the", " then", " other", "ing", "123", "…", " don"))]
    vocab, merges = train_merges(counts, 290, [END_OF_TEXT])
    ranks = {token: token_id for token_id, token in vocab.items() if token_id != 256}
    theirs = tiktoken.Encoding("ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256})
    text += " the other thing, don't 123" + END_OF_TEXT + text
    assert Tokenizer(vocab, merges, [END_OF_TEXT]).encode(text) == theirs.encode(text, allowed_special="all")
