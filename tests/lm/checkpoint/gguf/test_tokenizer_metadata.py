"""The tokenizer of a GGUF file: as it was exported, with the template and the ends that the file states."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.external import load_any_tokenizer, load_external
from lm.checkpoint.gguf.reader import load_gguf_tokenizer as load_gguf_tokenizer_of_any_kind
from lm.checkpoint.gguf.writer import save_gguf
from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, add_chat_tokens, find_template, make_jinja_template
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.gguf_files import Change, rewrite, with_field, without
from tests.helpers.tokenizers import make_tokenizer, published_parts
from tests.lm.checkpoint.gguf.test_writer import TOKENIZER, make_model, read_fields

TEXT = "Once upon a time, there's 12345  cats.\n\n  Naïve café 日本語 🙂 I'LL go   \r\n x!!!\n"


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    tokenizer = load_gguf_tokenizer_of_any_kind(path)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def write(path: Path, tokenizer: Tokenizer) -> Path:
    save_gguf(make_model(vocab_size=tokenizer.size + 3), tokenizer, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "llama3, whole tokens", "qwen2", "deepseek"])
def test_an_exported_tokenizer_comes_back(tmp_path: Path, pattern: str) -> None:
    parts = make_tokenizer(pattern.partition(",")[0], [END_OF_TEXT]).parts
    tokenizer = Tokenizer(*parts._replace(ignore_merges="whole" in pattern))
    model, loaded = load_external(write(tmp_path / "model.gguf", tokenizer))
    assert isinstance(loaded, Tokenizer)
    assert (loaded.vocab, loaded.merges) == (tokenizer.vocab, tokenizer.merges)
    assert (loaded.pattern, loaded.special_tokens) == (tokenizer.pattern, [END_OF_TEXT])
    assert loaded.encode(TEXT + END_OF_TEXT) == tokenizer.encode(TEXT + END_OF_TEXT)
    assert loaded.begin_token is None
    assert model.config.vocab_size == loaded.size == tokenizer.size, "the padding of the vocabulary is removed"


def test_the_template_of_this_project_comes_back(tmp_path: Path) -> None:
    tokenizer = add_chat_tokens(TOKENIZER)
    loaded = load_gguf_tokenizer(write(tmp_path / "model.gguf", tokenizer))
    template = find_template(loaded)
    assert template and template.is_own and template.sources["default"] == make_jinja_template(tokenizer)
    assert loaded.stop_ids == {loaded.special_ids[END_TOKEN], loaded.special_ids[END_OF_TEXT]}


def test_a_begin_token_comes_back(tmp_path: Path) -> None:
    parts = make_tokenizer("llama3", ["<|end_of_text|>", "<s>"]).parts
    tokenizer = Tokenizer(*parts._replace(begin_token="<s>"))
    path = write(tmp_path / "model.gguf", tokenizer)
    assert load_gguf_tokenizer(path).begin_token == "<s>"
    assert load_gguf_tokenizer(rewrite(path, without("tokenizer.ggml.add_bos_token"))).begin_token is None


def test_llama_3_has_a_begin_token_without_a_word_of_the_file(tmp_path: Path) -> None:
    parts = make_tokenizer("llama3", ["<|end_of_text|>", "<s>"]).parts
    path = write(tmp_path / "model.gguf", Tokenizer(*parts._replace(begin_token="<s>", ignore_merges=True)))
    assert load_gguf_tokenizer(rewrite(path, without("tokenizer.ggml.add_bos_token"))).begin_token == "<s>"


def test_templates_and_ends_that_a_file_states(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("qwen2", [END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<pad>", "<x>"])
    ids = tokenizer.special_ids
    path = write(tmp_path / "model.gguf", tokenizer)
    for name, value, kind in (
        ("tokenizer.chat_template", "{{ messages }}", "STRING"),
        ("tokenizer.chat_templates", ["tool_use", "lost"], "STRING"),
        ("tokenizer.chat_template.tool_use", "{{ tools }}", "STRING"),
        ("tokenizer.ggml.eot_token_id", ids["<x>"], "UINT32"),
        ("tokenizer.ggml.padding_token_id", ids["<pad>"], "UINT32"),
    ):
        path = rewrite(path, with_field(name, value, kind)).rename(path)
    chat: Any = load_any_tokenizer(path).chat  # type: ignore[union-attr]
    assert chat.templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert chat.tokens == {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": "<pad>"}
    assert chat.end_ids == tuple(sorted(ids[text] for text in (END_OF_TEXT, "<|im_end|>", "<x>")))


def test_user_defined_tokens_are_added_and_not_special(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(special_tokens=[END_OF_TEXT, "<think>"])
    path = write(tmp_path / "model.gguf", tokenizer)
    types = [1] * tokenizer.size + [5] * 3
    types[tokenizer.special_ids[END_OF_TEXT]], types[tokenizer.special_ids["<think>"]] = 3, 4
    loaded = load_gguf_tokenizer(rewrite(path, with_field("tokenizer.ggml.token_type", types, "INT32")))
    assert loaded.special_tokens == [END_OF_TEXT]
    assert loaded.encode("a<think>", allowed_special=()) == [*loaded.encode("a"), tokenizer.special_ids["<think>"]]


def test_added_tokens_and_a_normalizer_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = make_tokenizer("qwen2", [END_OF_TEXT]).parts
    tokenizer = Tokenizer(*parts._replace(normalizer="NFC", added_tokens=[AddedToken("<think>", special=False)]))
    with caplog.at_level(logging.WARNING):
        path = write(tmp_path / "model.gguf", tokenizer)
    assert "normalizes text to NFC, and llama.cpp does not" in caplog.text
    loaded = load_gguf_tokenizer(path)
    assert published_parts(tokenizer)._replace(chat=None) == loaded.parts._replace(chat=None)
    text = "e\u0301 <think>"
    assert loaded.encode(text) == tokenizer.encode(text) == [*tokenizer.encode("é "), tokenizer.added_ids["<think>"]]
    for other in (None, "NFC"):
        path = write(tmp_path / f"{other}.gguf", Tokenizer(*parts._replace(normalizer=other)))
        assert load_gguf_tokenizer(path).normalizer == other
        if other:
            assert load_gguf_tokenizer(rewrite(path, without("textmill.normalizer"))).normalizer == "NFC", "Qwen's"


def test_digits_before_the_pattern_come_back(tmp_path: Path) -> None:
    parts = TOKENIZER.parts._replace(pattern=(r"\p{N}", GPT2_PATTERN), special_tokens=[END_OF_TEXT])
    tokenizer = Tokenizer(*parts)
    path = write(tmp_path / "model.gguf", tokenizer)
    assert read_fields(path)["tokenizer.ggml.pre"] == "smollm"
    loaded = load_gguf_tokenizer(path)
    assert loaded.pattern == tokenizer.pattern and loaded.encode(TEXT) == tokenizer.encode(TEXT)


def test_the_settings_of_a_published_model_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    specials = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<a>", "<b>", "<pad>"]
    plain = make_tokenizer("qwen2", specials)
    ids = plain.special_ids
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": END_OF_TEXT}
    ends = tuple(sorted(ids[text] for text in (END_OF_TEXT, "<|im_end|>", "<a>")))
    tokenizer = Tokenizer(*plain.parts._replace(chat=ChatSettings(templates, tokens, ends)))
    path = write(tmp_path / "model.gguf", tokenizer)
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in read_fields(path).items()}
    assert [fields[f"{name}_token_id"] for name in ("bos", "eos", "eot", "padding", "unknown")] == [
        *(ids[text] for text in ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<pad>", END_OF_TEXT))
    ]
    assert load_gguf_tokenizer(path).chat == tokenizer.chat and not caplog.text
    more = ChatSettings(templates, tokens, (*ends, ids["<b>"]))
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "more.gguf", Tokenizer(*plain.parts._replace(chat=more)))
    assert "no place for another token that ends a generation; llama.cpp goes on after <b>" in caplog.text


def test_ids_beyond_the_tokens_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rewrite(write(tmp_path / "model.gguf", TOKENIZER), with_field("tokenizer.ggml.eos_token_id", 1 << 31))
    with caplog.at_level(logging.WARNING):
        assert load_gguf_tokenizer(path).chat is None
    assert "tokenizer.ggml.eos_token_id is 2147483648, which is no id of a token" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_field("tokenizer.ggml.model", "t5", "STRING"), "tokenizer.ggml.model 't5' is not supported"),
        (with_field("tokenizer.ggml.model", "llama", "STRING"), "scores has no score for each"),
        (with_field("tokenizer.ggml.pre", "tekken", "STRING"), "pre 'tekken' is not supported; .* smollm"),
        (with_field("tokenizer.ggml.pre", 5), "pre 5 is not supported"),
        (without("tokenizer.ggml.pre"), "pre None is not supported"),
        (without("tokenizer.ggml.merges"), "has no tokenizer.ggml.merges"),
        (with_field("tokenizer.ggml.tokens", 5), "has no tokenizer.ggml.tokens"),
        (with_field("tokenizer.ggml.tokens", ["a", "a"], "STRING"), "token_type has no type for each of the 2"),
        (with_field("tokenizer.ggml.token_type", [1], "INT32"), "token_type has no type for each"),
        (with_field("tokenizer.ggml.merges", ["ab"], "STRING"), "merge 1: 'ab' is not two tokens"),
        (with_field("tokenizer.ggml.merges", ["a zzz"], "STRING"), "gguf: The vocabulary lacks the token b'zzz'"),
        (with_field("textmill.normalizer", "x", "STRING"), "textmill.normalizer 'x' is unknown"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    path = rewrite(write(tmp_path / "model.gguf", TOKENIZER), change)
    with pytest.raises(UserError, match=message):
        load_gguf_tokenizer(path)


@pytest.mark.parametrize(
    ("tokens", "message"), [(["a"] * 300, "has a text twice"), (["a"], "no tokens for 255 of the 256")]
)
def test_odd_vocabularies_are_refused(tmp_path: Path, tokens: list[str], message: str) -> None:
    path = rewrite(write(tmp_path / "model.gguf", TOKENIZER), with_field("tokenizer.ggml.tokens", tokens, "STRING"))
    path = rewrite(path.rename(tmp_path / "model.gguf"), without("tokenizer.ggml.token_type"))
    with pytest.raises(UserError, match=message):
        load_gguf_tokenizer(path)
