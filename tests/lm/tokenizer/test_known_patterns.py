"""Patterns of real tokenizers: those in tiktoken's package, and DeepSeek's three splits."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.patterns import DEEPSEEK_SPLITS, PATTERNS, has_compiled_scanner, warn_of_slow_pattern
from lm.text.pretokenize import pretokenize
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.pretoken_counts import count_pretokens
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.kernels import hard_texts
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer, stable_text

_GPT_OSS_SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|start|>", "<|message|>", "<|end|>"]
_TEXT = "IT'S iPhone HTTPServer's 12345 \r\n\n x!\n/“He'LL” 日本ABc naïve\u0301 \t"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _write_tokenizer_json(path: Path, tokenizer: Tokenizer, patterns: tuple[str, ...]) -> Path:
    """Write a tokenizer.json that splits by ``patterns`` in turn."""
    tokenizer.save_tokenizer_json(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*map(_split, patterns), byte_level]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _tiktoken_pattern(encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the pattern of an encoding of tiktoken, without the ranks, which it would download."""
    encodings = pytest.importorskip("tiktoken_ext.openai_public", reason="tiktoken is not installed")
    monkeypatch.setattr(encodings, "load_tiktoken_bpe", lambda *args, **options: {})
    return str(getattr(encodings, encoding)()["pat_str"])


@pytest.mark.parametrize(
    ("encoding", "name"), [("cl100k_base", "cl100k"), ("o200k_base", "o200k"), ("o200k_harmony", "o200k")]
)
def test_patterns_are_those_of_tiktoken(encoding: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tiktoken_pattern(encoding, monkeypatch) == PATTERNS[name]


def test_the_pattern_of_gpt_oss_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss has the pattern of tiktoken's o200k_harmony in its tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    pattern = _tiktoken_pattern("o200k_harmony", monkeypatch)
    trained = make_tokenizer(pattern, _GPT_OSS_SPECIALS)
    path = _write_tokenizer_json(tmp_path / "tokenizer.json", trained, (pattern,))
    tokenizer = Tokenizer.from_tokenizer_json(path)
    assert tokenizer.pattern == PATTERNS["o200k"] and has_compiled_scanner(tokenizer.pattern)
    assert tokenizer.special_ids == trained.special_ids
    text = f"<|start|>user<|message|>{_TEXT}<|end|>"
    assert tokenizer.encode(text) == tokenizers.Tokenizer.from_file(str(path)).encode(text).ids


@examples(500)
@given(stable_text | hard_texts | st.text("aA1 \n\r'#.・ア゛一龥が\u3040\x00\x01\u200d\u0301\u3000", max_size=40))
def test_deepseek_equals_its_three_splits(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in DEEPSEEK_SPLITS]
    expected = [
        text[start:end] for _, (start, end) in tokenizers.pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
    ]
    assert list(pretokenize(text, PATTERNS["deepseek"])) == expected


def test_a_tokenizer_json_of_deepseek_is_read_and_written(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    trained = make_tokenizer(PATTERNS["deepseek"], ["<｜end▁of▁sentence｜>"])
    path = _write_tokenizer_json(tmp_path / "tokenizer.json", trained, DEEPSEEK_SPLITS)
    tokenizer = Tokenizer.from_tokenizer_json(path)
    assert tokenizer.pattern == PATTERNS["deepseek"] and has_compiled_scanner(tokenizer.pattern)
    assert Tokenizer(trained.vocab, trained.merges, pattern=DEEPSEEK_SPLITS).pattern == tokenizer.pattern
    tokenizer.save(tmp_path / "saved")
    text = f"{_TEXT}<｜end▁of▁sentence｜>カタカナ・漢字とかな。 1234年\x00\n"
    ids = tokenizers.Tokenizer.from_file(str(path)).encode(text).ids
    assert tokenizer.encode(text) == trained.encode(text) == ids
    assert Tokenizer.load(tmp_path / "saved").encode(text) == ids
    trained.save(tmp_path / "trained")
    for name in ("saved", "trained"):
        assert tokenizers.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")).encode(text).ids == ids


def test_the_log_says_once_that_a_pattern_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_slow_pattern.cache_clear()
    slow, fast = (Tokenizer(bytes_tokenizer().vocab, [], pattern=pattern) for pattern in (r"\w+|\W+", "gpt2"))
    assert isinstance(slow.pattern, str)
    assert fast.encode("a b") == slow.encode("a b") == slow.encode("a b")
    assert list(count_pretokens([[b"a b"]], [], slow.pattern))
    [message] = [record.getMessage() for record in caplog.records if record.name == warn_of_slow_pattern.__module__]
    assert slow.pattern.replace("\\", "\\\\") in message and "gpt2, cl100k, llama3, qwen2, o200k, deepseek" in message


def test_a_misspelt_name_is_no_regular_expression() -> None:
    for pattern in ("gpt4", "llama-3"):
        with pytest.raises(UserError, match=rf"There is no pattern '{pattern}'.* Patterns: gpt2, cl100k, llama3"):
            TokenizerConfig(pattern=pattern)
        with pytest.raises(UserError, match=rf"There is no pattern '{pattern}'"):
            Tokenizer({i: bytes([i]) for i in range(256)}, [], pattern=pattern)
    assert TokenizerConfig(pattern=r"\w+|\W").pattern == r"\w+|\W"


def test_several_patterns_with_jieba_are_saved_without_a_tokenizer_json(tmp_path: Path) -> None:
    for pattern in ("gpt2", ("gpt2", "jieba")):  # the second takes the place of the first
        Tokenizer({i: bytes([i]) for i in range(256)}, [], pattern=pattern).save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists() and (tmp_path / "tokenizer_config.json").exists()
