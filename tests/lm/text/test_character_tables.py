"""Character tables: known ones, and those that a tokenizer keeps when the installed ``regex`` has others."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text import character_tables
from lm.text.character_tables import (
    PUBLISHED_TABLES,
    check_tables,
    installed_tables,
    pack_tables,
    pretokenize_by_tables,
    tables_identity,
    unpack_tables,
    warn_of_other_tables,
)
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import pretokenize
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import bytes_tokenizer

# A published class of each is changed: a letter to none, an emoji to a letter, a digit to a mark, a space to a letter.
CHANGED = {"ж": "§", "😀": "ª", "Ж": "²", "٣": "\u0300", "\u3000": "é", "\u0378": "É"}


def other_tables() -> str:
    classes = unpack_tables(PUBLISHED_TABLES).copy()
    for character, like in CHANGED.items():
        classes[ord(character)] = classes[ord(like)]
    return pack_tables(classes)


def train_tokenizer(text: str, pattern: str = PATTERNS["gpt2"]) -> Tokenizer:
    [counts] = count_pretokens([[text.encode()]], [], pattern)
    return Tokenizer(*train_merges(counts, 316, []), pattern=pattern)


@pytest.fixture
def _warn_again() -> Iterator[None]:
    warn_of_other_tables.cache_clear()
    yield
    warn_of_other_tables.cache_clear()


def test_the_tables_of_the_installed_regex_are_its_classes() -> None:
    classes = unpack_tables(installed_tables())
    assert pack_tables(classes) == installed_tables()
    patterns = {0: r"\p{Ll}", 1: r"\p{N}", 2: r"\s", 4: r"\p{Lu}|\p{Lt}", 5: r"\p{Lm}|\p{Lo}", 6: r"\p{M}"}
    for expected, pattern in patterns.items():
        assert all((classes[ord(c)] == expected) == bool(regex.match(pattern, c)) for c in map(chr, range(0x3000)))


@pytest.mark.parametrize("name", ["gpt2", "o200k"])
def test_published_tables_split_text_as_tokenizers_does(name: str) -> None:
    """On characters that the installed ``regex`` has in other classes, and on others."""
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[name]), "isolated")
    different = unpack_tables(PUBLISHED_TABLES) != unpack_tables(installed_tables())
    codes = [*range(0x80, 0xD800, 7), *np.flatnonzero(different)[::5].tolist(), *map(ord, CHANGED)]
    text = "".join(f"a{chr(code)} {chr(code)}{chr(code)}1" for code in codes)
    ours = list(pretokenize_by_tables(text, PATTERNS[name], PUBLISHED_TABLES))
    assert ours == [piece for piece, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pattern", "classes"), [(r"\p{L}+", (0, 4, 5)), (r"[\p{Lu}\p{Lt}]+", (4,)), (r"\p{N}+", (1,))]
)
def test_the_published_tables_are_those_of_tiktoken(pattern: str, classes: tuple[int, ...]) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    peer = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=single_bytes, special_tokens={})
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    matched = bytes(peer.encode_ordinary("".join(characters))).decode()  # tiktoken drops what no pattern matches
    in_class = np.isin(unpack_tables(PUBLISHED_TABLES), classes)
    assert matched == "".join(character for character in characters if in_class[ord(character)])


@examples(100)
@given(st.text([*CHANGED, *"aB1 é!'s\n\u0300\u200b的の"], max_size=30), st.sampled_from([*PATTERNS]))
def test_any_tables_split_text_as_a_text_with_characters_of_these_classes(text: str, name: str) -> None:
    expected, start = list[str](), 0
    published = "".join(CHANGED.get(character, character) for character in text)
    for pretoken in pretokenize(published, PATTERNS[name]):
        expected.append(text[start : (start := start + len(pretoken))])
    assert list(pretokenize_by_tables(text, PATTERNS[name], other_tables())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PATTERNS])
def test_a_tokenizer_splits_by_its_own_tables(name: str) -> None:
    """The ids are pretokens here: merges join all that is one pretoken."""
    text = "aжж ЖaЖ 😀😀a a٣٣ 1\u3000a\u0378B " * 3
    merges = train_tokenizer(text, PATTERNS[name])
    tokenizer = Tokenizer(*merges.parts._replace(character_tables=other_tables()))
    assert tokenizer.encode(text) == tokenizer.encode_reference(text)
    assert merges.encode(text) == merges.encode_reference(text)
    assert tokenizer.encode(text) != merges.encode(text)


@pytest.mark.usefixtures("_warn_again")
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_saved_tokenizer_keeps_its_tables_and_a_difference_is_said(
    is_cached: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cached:
        monkeypatch.setattr("lm.tokenizer.tokenizer._MIN_CACHED_SIZE", 1)
        monkeypatch.setattr("lm.tokenizer.array_cache._directory", lambda: tmp_path / "cache")
    text = "aжж ЖaЖ 😀😀a a٣٣ " * 3
    plain = train_tokenizer(text)
    caplog.clear()
    plain.save(tmp_path / "plain")
    tokenizer = Tokenizer(*plain.parts._replace(character_tables=other_tables()))
    tokenizer.save(tmp_path / "other")
    assert "character_tables" in json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    for _ in range(2):
        assert Tokenizer.load(tmp_path / "plain").encode(text) == plain.encode(text)
    assert not caplog.records
    for _ in range(2):
        assert Tokenizer.load(tmp_path / "other").encode(text) == tokenizer.encode(text)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "with other character tables than those of the installed regex" in record.getMessage()
    assert record.getMessage().endswith("It splits text by its own tables.")
    assert (tmp_path / "cache").exists() == is_cached


@pytest.mark.usefixtures("_warn_again")
def test_a_pattern_without_a_compiled_scanner_follows_the_installed_tables_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = train_tokenizer("aжж Ж", r"\p{L}+|\s|.")
    Tokenizer(*plain.parts._replace(character_tables=other_tables())).save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("aжжЖ") == plain.encode("aжжЖ") == plain.encode_reference("aжжЖ")
    [record] = [record for record in caplog.records if record.name == "lm.text.character_tables"]
    assert "install the version of regex with which it was made" in record.getMessage()


def test_files_of_other_libraries_have_the_published_tables(tmp_path: Path) -> None:
    plain = bytes_tokenizer()
    plain.save(tmp_path)
    plain.save_tiktoken(tmp_path / "tiktoken")
    for tokenizer in (
        Tokenizer.from_files(tmp_path / "vocab.json", tmp_path / "merges.txt"),
        Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json"),
        Tokenizer.from_tiktoken(tmp_path / "tiktoken"),
    ):
        assert tokenizer.character_tables == PUBLISHED_TABLES
    assert Tokenizer.load(tmp_path).character_tables == installed_tables()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["character_tables"]  # of an older version
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).character_tables == installed_tables()


@pytest.mark.parametrize("tables", ["", "c5", "c1114111", "z1114112", "c1114112x", "c-5", 5, ["c1114112"]])
def test_malformed_tables_are_refused(tables: object, tmp_path: Path) -> None:
    bytes_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"character_tables": tables}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_the_identity_is_that_of_the_tables_and_not_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known, custom = tables_identity("gpt2"), tables_identity(r"\p{L}+|.")
    assert known == tables_identity(PATTERNS["o200k"])
    monkeypatch.setattr("lm.text.character_tables.metadata.version", lambda name: "2099.1.1")
    assert tables_identity("gpt2") == known
    assert tables_identity(r"\p{L}+|.") != custom  # regex itself finds the pretokens
    assert tables_identity("jieba") == tables_identity((r"\p{L}+", "[ab]")) == "regex 2099.1.1"
    check_tables("gpt2", known)
    monkeypatch.setattr(character_tables, "installed_tables", other_tables)
    assert tables_identity("gpt2") != known
    with pytest.raises(UserError, match="of this worker has other character tables"):
        check_tables("gpt2", known)
