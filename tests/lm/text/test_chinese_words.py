"""Chinese words as pretokens, by the library jieba."""

from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.pretokenize import END_OF_TEXT, JIEBA, _segmenter, pretokenize, split_at_safe_cuts, split_chinese_words
from lm.tokenizer.bpe import train_merges
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer

TEXT = "我来到北京清华大学。 小明硕士毕业于中国科学院计算所,后在Linux系统上工作3年。\n他说:“你好”,don't cry。"
PIECES = [
    "我",
    "来到",
    "北京",
    "清华大学",
    "中国",
    " ",
    "\n",
    "。",
    "Linux",
    "don't",
    "3",
    "𠀀",
    "日本語の",
    "é",
    "🙂",
    "\u3000",
]

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)


@pytest.fixture(autouse=True)
def _require_jieba() -> None:
    pytest.importorskip("jieba", reason="jieba is not installed")


def test_words() -> None:
    words = list(pretokenize(TEXT, JIEBA))
    assert words[:5] == ["我", "来到", "北京", "清华大学", "。"]
    assert words[5] == " 小明", "a space belongs to the word after it"
    assert {"中国科学院", "在", "Linux", "系统", "3", "don", "'t", " cry"} <= set(words)


@given(texts)
def test_words_divide_the_pretokens_of_gpt2(text: str) -> None:
    words = iter(pretokenize(text, JIEBA))
    for pretoken in pretokenize(text):
        joined = ""
        while joined != pretoken:
            word = next(words)
            assert word
            joined += word
            assert pretoken.startswith(joined)
        if not regex.search(r"\p{Han}", pretoken):
            assert list(split_chinese_words(pretoken)) == [pretoken]
    assert not list(words)


@given(st.lists(texts, max_size=5), st.integers(1, 30))
def test_a_text_may_be_cut_before_white_space(blocks: list[str], size: int) -> None:
    pieces = split_at_safe_cuts(blocks, [END_OF_TEXT], JIEBA, size)
    words = [word for piece in pieces for word in pretokenize(piece, JIEBA)]
    assert words == list(pretokenize("".join(blocks), JIEBA))


def test_merges_stay_within_words(tmp_path: Path) -> None:
    [table] = count_pretokens([[(TEXT * 50).encode()]], [END_OF_TEXT], JIEBA)
    counts = dict(zip(table["pretoken"].to_pylist(), table["count"].to_pylist(), strict=True))
    assert counts == Counter(word.encode() for word in pretokenize(TEXT * 50, JIEBA))
    tokenizer = Tokenizer(*train_merges(table, 257 + 200, [END_OF_TEXT]), [END_OF_TEXT], JIEBA)
    words = {word.encode() for word in pretokenize(TEXT, JIEBA)}
    learned = [left + right for left, right in tokenizer.merges]
    assert all(any(token in word for word in words) for token in learned)
    assert len(tokenizer.encode("清华大学")) == 1 and len(tokenizer.encode("来到北京")) == 2
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    tokenizer.save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert Tokenizer.load(tmp_path).encode(TEXT) == tokenizer.encode(TEXT)
    with pytest.raises(UserError, match="jieba cannot be exported"):
        tokenizer.save_tokenizer_json(tmp_path / "tokenizer.json")


def test_jieba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=PackageNotFoundError("jieba")))
    _segmenter.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'textmill\[jieba\]'"):
        list(pretokenize("中国", JIEBA))


def test_no_file_of_the_temporary_directory_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _segmenter.cache_clear()
    assert list(split_chinese_words("来到北京")) == ["来到", "北京"]
    assert not list(tmp_path.iterdir())
