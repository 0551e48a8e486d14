"""Hugging Face's tokenizer.json: writing, reading, unsupported features, malformed files."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.formats.tokenizer_json import make_tokenizer_json, read_tokenizer_json
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer, published_parts, stable_text

BYTES = {i: bytes([i]) for i in range(256)}


def write_json(content: Any, directory: Path) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def content_of(textmill: Tokenizer) -> dict[str, Any]:
    """Return the content of the tokenizer.json of ``textmill``."""
    return json.loads(json.dumps(make_tokenizer_json(textmill.parts)))


def test_read_inverts_write(tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    odd = bytes_tokenizer(["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"])
    for textmill in (tokenizer, custom_tokenizer, odd, bytes_tokenizer()):
        assert read_tokenizer_json(write_json(content_of(textmill), tmp_path), []) == published_parts(textmill)


def test_special_tokens_may_be_missing_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(["<s>", "é!"])
    content = content_of(tokenizer)
    for special in tokenizer.special_tokens:
        del content["model"]["vocab"][special]
    assert read_tokenizer_json(write_json(content, tmp_path), []) == published_parts(tokenizer)


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
    token = AddedToken(END_OF_TEXT, normalized=True)
    parts = read_tokenizer_json(write_json(content, tmp_path), [])
    assert parts == published_parts(gpt2)._replace(added_tokens=[token])
    assert Tokenizer(*parts).encode("a" + END_OF_TEXT) == gpt2.encode("a" + END_OF_TEXT)


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

    textmill = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert textmill.special_tokens == ["<s>", END_OF_TEXT]
    assert textmill.added_tokens[2:] == [AddedToken(text, special=False, normalized=True) for text in ("xyzzy", "日本")]
    assert textmill.pattern == pattern
    assert len(textmill.merges) > 300

    @examples(200)
    @given(st.lists(stable_text | st.sampled_from(["<s>", END_OF_TEXT, "xyzzy", "日本"]), max_size=5).map("".join))
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
        read_tokenizer_json(tmp_path / "tokenizer.json", [])


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
        (put("normalizer", value={"type": "Lowercase"}), "the normalizer 'Lowercase'"),
        (
            put("normalizer", value={"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFKC"}]}),
            "the sequence of the normalizers NFD, NFKC",
        ),
        (
            put("normalizer", value={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
            "the normalizer 'Lowercase'",
        ),
        (put("pre_tokenizer", value=PREFIXED), "add_prefix_space in the pre_tokenizer"),
        (
            put("pre_tokenizer", value={"type": "Sequence", "pretokenizers": [{"type": "Digits"}, PREFIXED]}),
            "add_prefix_space in the pre_tokenizer",
        ),
        (
            put("pre_tokenizer", value={"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "Digits"}]}),
            "the pre_tokenizer 'Digits' after ByteLevel",
        ),
        (put("pre_tokenizer", value=None), "a pre_tokenizer without ByteLevel"),
        (put("pre_tokenizer", value={"type": "Digits"}), "a pre_tokenizer without ByteLevel"),
        (put("pre_tokenizer", value={"type": "Whitespace"}), "the pre_tokenizer {'type': 'Whitespace'}"),
        (put("pre_tokenizer", value=split_and_byte_level(behavior="Removed")), "the pre_tokenizer {'type': 'Split'"),
        (
            put("pre_tokenizer", value=split_and_byte_level(behavior="Removed", invert=True)),
            "the pre_tokenizer {'type': 'Split', 'pattern': {'Regex': 'a+'}, 'behavior': 'Removed', 'invert': True}",
        ),
        (
            put("pre_tokenizer", value=split_and_byte_level(behavior="MergedWithNext")),
            "the pre_tokenizer {'type': 'Split'",
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
    read_tokenizer_json(path, [])
    change(content)
    write_json(content, tmp_path)
    with pytest.raises(UserError, match=re.escape(f"{path}: {feature}") + r".* is not supported; use a tokenizer"):
        read_tokenizer_json(path, [])


@pytest.mark.parametrize(
    ("specials", "text", "is_different"),
    [
        (["<s>", "a<s"], "a<s>", True),
        (["<s>", "a<s>b"], "a<s>b", True),
        (["<s>", "<s>b"], "<s>b", True),
        (["<s>", ">a", "s", "b"], "<s>a<s>b>a", False),
    ],
)
def test_normalized_tokens_are_found_after_all_others(
    tmp_path: Path, specials: list[str], text: str, is_different: bool
) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    textmill = bytes_tokenizer(specials)
    content = content_of(textmill)
    for token in content["added_tokens"][1:]:
        token["normalized"] = True
    path = write_json(content, tmp_path)
    ids = Tokenizer.from_tokenizer_json(path).encode(text)
    assert ids == hf.Tokenizer.from_file(str(path)).encode(text).ids
    assert (ids != textmill.encode(text)) is is_different


def test_ignored_features_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    textmill = bytes_tokenizer(["<s>"])
    content = content_of(textmill)
    names = ["<s>", "A", "</s>"]
    single = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in names]
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    for post_processor in (None, BYTE_LEVEL, {"type": "Sequence", "processors": [BYTE_LEVEL]}):
        content["post_processor"] = post_processor
        assert read_tokenizer_json(write_json(content, tmp_path), []) == published_parts(textmill)
    assert caplog.messages == []
    content["post_processor"] = {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
    content["truncation"] = {"max_length": 512}
    path = write_json(content, tmp_path)
    assert Tokenizer.from_tokenizer_json(path).parts == published_parts(textmill)._replace(begin_token="<s>")
    assert caplog.messages == [
        f"{path}: truncation is ignored.",
        f"{path}: '</s>', which TemplateProcessing adds to each text, is ignored.",
    ]


@pytest.mark.parametrize(
    ("post_processor", "begin_token", "ignored"),
    [
        ({"type": "BertProcessing", "sep": ["</s>", 257], "cls": ["<s>", 256]}, "<s>", ["</s>"]),
        ({"type": "RobertaProcessing", "sep": ["<s>", 256], "cls": ["a", 97]}, None, ["a", "<s>"]),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}, None, []),
    ],
)
def test_the_begin_token_is_read(
    tmp_path: Path, post_processor: dict[str, Any], begin_token: str | None, ignored: list[str]
) -> None:
    content = content_of(bytes_tokenizer(["<s>", "</s>"])) | {"post_processor": post_processor}
    found: list[str] = []
    assert read_tokenizer_json(write_json(content, tmp_path), found).begin_token == begin_token
    assert [about.partition(",")[0] for about in found] == list(map(repr, ignored))


def test_the_begin_token_is_written(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    textmill = Tokenizer(*bytes_tokenizer(["</s>", "<s>"]).parts._replace(begin_token="<s>"))
    textmill.save(tmp_path)
    theirs = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode("ab").ids == [257, *b"ab"] and theirs.encode("a", "b").ids == [257, *b"a", 257, *b"b"]
    assert theirs.encode("ab", add_special_tokens=False).ids == [*b"ab"]
    assert Tokenizer.load(tmp_path).parts == textmill.parts
    assert Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json").parts == published_parts(textmill)
    with pytest.raises(UserError, match="'<t>' is not a special token"):
        Tokenizer(*textmill.parts._replace(begin_token="<t>"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("post_processor", value={"type": "TemplateProcessing", "single": []}), "is not a Hugging Face tokenizer"),
        (put("post_processor", value={"type": "BertProcessing"}), "is not a Hugging Face tokenizer"),
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
        read_tokenizer_json(path, [])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, [], {}, "tokenizer", 3, {"version": "1.0", "model": {}}])
def test_another_json_file_is_rejected(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json.* is not a Hugging Face tokenizer\.json|is not supported"):
        read_tokenizer_json(write_json(content, tmp_path), [])


def test_a_missing_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        read_tokenizer_json(tmp_path / "tokenizer.json", [])


def test_a_token_may_have_a_second_id_as_added_token(tmp_path: Path) -> None:
    """Two spaces are both an added and a merged token, as in GPT-NeoX's file."""
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    vocab, merges = {**BYTES, 256: b"  "}, [(b" ", b" ")]
    content = content_of(Tokenizer(vocab, merges))
    path = write_json(content, tmp_path)
    assert read_tokenizer_json(path, [])[:2] == (vocab, merges)
    token = AddedToken("a  ", special=False, normalized=True)
    for added in (token, AddedToken("  ", special=False, normalized=True, id=257)):
        content["added_tokens"] = [{**asdict(added), "id": 257}]
        tokenizer = Tokenizer.from_tokenizer_json(write_json(content, tmp_path))
        assert tokenizer.added_tokens == [added]
        for text in ("a   b", "    ", "x  "):
            assert tokenizer.encode(text) == hf.Tokenizer.from_file(str(path)).encode(text).ids


def test_two_tokens_of_the_same_bytes_are_rejected(tmp_path: Path) -> None:
    content = content_of(Tokenizer({**BYTES, 256: b"  "}, []))
    content["model"]["vocab"]["  "] = 257
    with pytest.raises(UserError, match=r"tokenizer\.json: b'  ' has two ids; that is not supported"):
        read_tokenizer_json(write_json(content, tmp_path), [])


def test_the_last_of_equal_merges_counts(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    content = content_of(Tokenizer({**BYTES, 256: b"ab", 257: b"bc"}, [(b"a", b"b"), (b"b", b"c")]))
    content["model"]["merges"].append(["a", "b"])
    path = write_json(content, tmp_path)
    ids = hf.Tokenizer.from_file(str(path)).encode("abc").ids
    assert Tokenizer.from_tokenizer_json(path).encode("abc") == ids == [ord("a"), 257]


def test_a_tokenizer_is_restored_from_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (again.vocab, again.merges, again.special_tokens) == (
        tokenizer.vocab,
        tokenizer.merges,
        tokenizer.special_tokens,
    )


def test_added_tokens_outside_of_the_vocabulary_have_the_ids_of_hugging_face(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    content = content_of(bytes_tokenizer(["<s>"]))
    flags = content["added_tokens"][0]
    content["model"]["vocab"]["<t>"] = 300
    tokens = {"<s>": 256, "<t>": 300, "<u>": 258, "<v>": 259}
    content["added_tokens"] = [{**flags, "content": text, "id": token_id} for text, token_id in tokens.items()]
    path = write_json(content, tmp_path)
    text = "<v><u><t>a<s>"
    assert Tokenizer.from_tokenizer_json(path).encode(text) == hf.Tokenizer.from_file(str(path)).encode(text).ids
    content["added_tokens"][2]["id"] = 301
    with pytest.raises(UserError, match=r"the added token '<u>' has the id 301, but Hugging Face gives it 258"):
        read_tokenizer_json(write_json(content, tmp_path), [])
