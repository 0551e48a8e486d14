"""Hugging Face's tokenizer.json: writing, reading, unsupported features, malformed files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.formats.hugging_face import make_tokenizer_json, read_tokenizer_json
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer, stable_text

BYTES = {i: bytes([i]) for i in range(256)}


def write_json(content: Any, directory: Path) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def content_of(textmill: Tokenizer) -> dict[str, Any]:
    """Return the content of the tokenizer.json of ``textmill``."""
    content = make_tokenizer_json(
        textmill.vocab, textmill.merges, textmill.special_tokens, textmill.pattern, textmill.ignore_merges
    )
    return json.loads(json.dumps(content))


def parts_of(textmill: Tokenizer) -> tuple[Any, ...]:
    return textmill.vocab, textmill.merges, textmill.special_tokens, textmill.pattern, textmill.ignore_merges


def test_read_inverts_write(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    odd = bytes_tokenizer(["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"])
    for textmill in (tokenizer, custom_tokenizer, odd, bytes_tokenizer()):
        assert read_tokenizer_json(write_json(content_of(textmill), tmp_path)) == parts_of(textmill)


def test_special_tokens_may_be_missing_from_the_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = content_of(tokenizer)
    for special in tokenizer.special_tokens:
        del content["model"]["vocab"][special]
    assert read_tokenizer_json(write_json(content, tmp_path)) == parts_of(tokenizer)


def test_the_published_gpt2_file_is_read(gpt2: Tokenizer, tmp_path: Path) -> None:
    """It has merges as strings and empty affixes, and neither the type of the model nor use_regex."""
    content = content_of(gpt2)
    model = content["model"]
    model["merges"] = [" ".join(merge) for merge in model["merges"]]
    model["continuing_subword_prefix"] = model["end_of_word_suffix"] = ""
    del model["type"], model["byte_fallback"], model["ignore_merges"]
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    content["added_tokens"][0]["normalized"] = True
    assert read_tokenizer_json(write_json(content, tmp_path)) == parts_of(gpt2)


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CUSTOM_PATTERN])
def test_a_tokenizer_trained_by_hugging_face_is_read(tmp_path: Path, pattern: str) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    hf_tokenizer = hf.Tokenizer(hf.models.BPE())
    byte_level = hf.pre_tokenizers.ByteLevel
    hf_tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    if pattern != GPT2_PATTERN:
        split = hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated")
        hf_tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence(
            [split, byte_level(add_prefix_space=False, use_regex=False)]
        )
    hf_tokenizer.decoder = hf.decoders.ByteLevel()
    hf_tokenizer.post_processor = hf.processors.ByteLevel(trim_offsets=False)
    trainer = hf.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", END_OF_TEXT], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    hf_tokenizer.train_from_iterator([*demo_stories(200), "naïve café 日本語の文章 🙂🙂" * 20], trainer)
    hf_tokenizer.add_tokens(["xyzzy", "日本"])  # normalized, not special
    hf_tokenizer.save(str(tmp_path / "tokenizer.json"))

    vocab, merges, specials, read_pattern, _ = read_tokenizer_json(tmp_path / "tokenizer.json")
    assert specials == ["<s>", END_OF_TEXT, "xyzzy", "日本"]
    assert read_pattern == pattern
    assert len(merges) > 300
    textmill = Tokenizer(vocab, merges, specials, read_pattern)

    @examples(200)
    @given(st.lists(stable_text | st.sampled_from(specials), max_size=5).map("".join))
    def encodes_the_same(text: str) -> None:
        assert textmill.encode(text) == hf_tokenizer.encode(text).ids

    encodes_the_same()
    stories = "<s>".join(demo_stories(100, seed=3))
    assert textmill.encode(stories) == hf_tokenizer.encode(stories).ids


def test_a_tokenizer_without_all_bytes_is_rejected(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    hf_tokenizer = hf.Tokenizer(hf.models.BPE())
    hf_tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.train_from_iterator(["abc"], hf.trainers.BpeTrainer(show_progress=False))
    hf_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json has no tokens for 253 of the 256 single bytes"):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def put(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that sets the ``value`` at the path ``keys`` of a file's content."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def split_and_byte_level(**changed: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False, **changed}
    return {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
PREFIXED = {"type": "ByteLevel", "add_prefix_space": True}


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        (put("model", "type", value="WordPiece"), "the model type 'WordPiece'"),
        (put("model", "dropout", value=0.1), "dropout 0.1"),
        (put("model", "continuing_subword_prefix", value="##"), "continuing_subword_prefix '##'"),
        (put("model", "end_of_word_suffix", value="</w>"), "end_of_word_suffix '</w>'"),
        (put("model", "byte_fallback", value=True), "byte_fallback True"),
        (put("normalizer", value={"type": "NFC"}), "the normalizer 'NFC'"),
        (
            put("normalizer", value={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
            "the normalizer 'Lowercase'",
        ),
        (put("pre_tokenizer", value=PREFIXED), "add_prefix_space in the pre_tokenizer"),
        (
            put("pre_tokenizer", value={"type": "Sequence", "pretokenizers": [BYTE_LEVEL, PREFIXED]}),
            "add_prefix_space in the pre_tokenizer",
        ),
        (put("pre_tokenizer", value=None), "the pre_tokenizer None"),
        (put("pre_tokenizer", value={"type": "Whitespace"}), "the pre_tokenizer {'type': 'Whitespace'}"),
        (put("pre_tokenizer", value={**BYTE_LEVEL, "use_regex": False}), "the pre_tokenizer {'type': 'ByteLevel'"),
        (put("pre_tokenizer", value=split_and_byte_level(behavior="Removed")), "the pre_tokenizer {'type': 'Sequence'"),
        (put("pre_tokenizer", value=split_and_byte_level(invert=True)), "the pre_tokenizer {'type': 'Sequence'"),
        (
            put("pre_tokenizer", value=split_and_byte_level(pattern={"String": "a"})),
            "the pre_tokenizer {'type': 'Sequence'",
        ),
        (
            put("pre_tokenizer", value={"type": "Sequence", "pretokenizers": [{"type": "Digits"}, BYTE_LEVEL]}),
            "the pre_tokenizer {'type': 'Sequence'",
        ),
        (put("added_tokens", 1, "lstrip", value=True), "lstrip of the added token '<s><s>'"),
        (put("added_tokens", 0, "rstrip", value=True), "rstrip of the added token '<s>'"),
        (put("added_tokens", 0, "single_word", value=True), "single_word of the added token '<s>'"),
        (
            put("added_tokens", 1, "normalized", value=True),
            "the added token '<s><s>', normalized and overlapping '<s>',",
        ),
        (put("post_processor", value={"type": "Other"}), "the post_processor 'Other'"),
        (
            put("post_processor", value={"type": "Sequence", "processors": [BYTE_LEVEL, {"type": "Other"}]}),
            "the post_processor 'Other'",
        ),
    ],
)
def test_an_unsupported_feature_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], feature: str
) -> None:
    content = content_of(bytes_tokenizer(["<s>", "<s><s>"]))
    path = write_json(content, tmp_path)
    read_tokenizer_json(path)
    change(content)
    write_json(content, tmp_path)
    with pytest.raises(UserError, match=re.escape(f"{path}: {feature}") + r".* is not supported; use a tokenizer"):
        read_tokenizer_json(path)


@pytest.mark.parametrize(
    ("specials", "text", "is_rejected"),
    [
        (["<s>", "a<s"], "a<s>", True),
        (["<s>", "a<s>b"], "a<s>b", True),
        (["<s>", "<s>b"], "<s>b", True),
        (["<s>", ">a", "s", "b"], "<s>a<s>b>a", False),
    ],
)
def test_overlaps_of_normalized_tokens_are_rejected_if_ids_differ(
    tmp_path: Path, specials: list[str], text: str, is_rejected: bool
) -> None:
    """Hugging Face finds normalized tokens after all others."""
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    textmill = bytes_tokenizer(specials)
    content = content_of(textmill)
    for token in content["added_tokens"][1:]:
        token["normalized"] = True
    path = write_json(content, tmp_path)
    has_same_ids = hf.Tokenizer.from_file(str(path)).encode(text).ids == textmill.encode(text)
    assert has_same_ids is not is_rejected
    if is_rejected:
        with pytest.raises(UserError, match=f"{specials[1]!r}, normalized and overlapping '<s>'"):
            read_tokenizer_json(path)
    else:
        assert read_tokenizer_json(path) == parts_of(textmill)


def test_ignored_features_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    textmill = bytes_tokenizer(["<s>"])
    content = content_of(textmill)
    template = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    for post_processor in (None, BYTE_LEVEL, {"type": "Sequence", "processors": [BYTE_LEVEL]}):
        content["post_processor"] = post_processor
        assert read_tokenizer_json(write_json(content, tmp_path)) == parts_of(textmill)
    assert caplog.messages == []
    content["post_processor"] = {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
    content["truncation"] = {"max_length": 512}
    path = write_json(content, tmp_path)
    assert read_tokenizer_json(path) == parts_of(textmill)
    assert caplog.messages == [
        f"{path}: the tokens that TemplateProcessing adds around a text are ignored.",
        f"{path}: truncation is ignored.",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("added_tokens", 0, "id", value=7), "the added token '<s>' has another id in the vocabulary"),
        (put("model", "vocab", "<s>", value=7), "the added token '<s>' has another id in the vocabulary"),
        (put("model", "vocab", "a b", value=7), "the id of 'a b', 7, is not a whole number used once"),
        (put("model", "vocab", "ab", value=None), "the id of 'ab', None, is not"),
        (put("model", "merges", value=["a b", "a"]), "merge 2: 'a' is not two tokens"),
        (put("model", "merges", value=[["a", "b"], ["a", "b", "c"]]), "merge 2: 'a b c' is not two tokens"),
        (put("model", "merges", value=[["a", "日"]]), "merge 1: 'a 日' is not two tokens"),
        (put("pre_tokenizer", value=split_and_byte_level(pattern={"Regex": "(a"})), "'(a' is not a regular expression"),
        (put("model", "merges", value=[3]), "is not a Hugging Face tokenizer.json"),
        (put("model", "merges", value=None), "is not a Hugging Face tokenizer.json"),
        (put("model", "vocab", value=None), "is not a Hugging Face tokenizer.json"),
        (put("model", value=None), "is not a Hugging Face tokenizer.json"),
        (put("added_tokens", value=["<s>"]), "is not a Hugging Face tokenizer.json"),
        (put("added_tokens", value=[{"id": 3}]), "is not a Hugging Face tokenizer.json"),
        (put("pre_tokenizer", value={"use_regex": True}), "is not a Hugging Face tokenizer.json"),
        (put("pre_tokenizer", value="ByteLevel"), "is not a Hugging Face tokenizer.json"),
    ],
)
def test_a_malformed_tokenizer_json_is_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = content_of(bytes_tokenizer(["<s>"]))
    change(content)
    path = write_json(content, tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_tokenizer_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, [], {}, "tokenizer", 3, {"version": "1.0", "model": {}}])
def test_another_json_file_is_rejected(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json.* is not a Hugging Face tokenizer\.json|is not supported"):
        read_tokenizer_json(write_json(content, tmp_path))


def test_a_missing_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def test_a_token_with_two_ids_is_rejected(tmp_path: Path) -> None:
    """Two spaces are both an added and a merged token."""
    vocab, merges = {**BYTES, 256: b"  "}, [(b" ", b" ")]
    content = content_of(Tokenizer(vocab, merges))
    path = write_json(content, tmp_path)
    assert read_tokenizer_json(path)[:2] == (vocab, merges)
    content["added_tokens"] = [{"id": 257, "content": "  ", "normalized": True}]
    with pytest.raises(UserError, match=r"tokenizer\.json: b'  ' has two ids, which is not supported"):
        read_tokenizer_json(write_json(content, tmp_path))


def test_a_tokenizer_is_restored_from_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (again.vocab, again.merges, again.special_tokens) == (
        tokenizer.vocab,
        tokenizer.merges,
        tokenizer.special_tokens,
    )
