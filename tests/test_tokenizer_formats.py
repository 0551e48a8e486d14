"""The formats of other libraries: tiktoken's rank files and Hugging Face's tokenizer.json, read and written."""

import base64
import json
import re
from collections.abc import Callable
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
from tests.tokenizers_made import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer

BYTES = {i: bytes([i]) for i in range(256)}


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> Tokenizer:
    return Tokenizer.from_files(shared_data / "gpt2_vocab.json", shared_data / "gpt2_merges.txt", [END_OF_TEXT])


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


# Hugging Face


def written(content: Any, directory: Path) -> Path:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def content_of(ours: Tokenizer) -> dict[str, Any]:
    """What ``ours`` writes as its tokenizer.json, as JSON reads it."""
    made = formats.tokenizer_json(ours.vocab, ours.merges, ours.special_tokens, ours.pattern)
    return json.loads(json.dumps(made))


def parts_of(ours: Tokenizer) -> tuple[Any, ...]:
    return ours.vocab, ours.merges, ours.special_tokens, ours.pattern


def test_a_tokenizer_json_reads_as_it_was_written(
    tokenizer: Tokenizer, custom_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    odd = bytes_tokenizer(["�", "a", " ", "\n\n", "日本", '"<|é|>"', "Ġa"])
    for ours in (tokenizer, custom_tokenizer, odd, bytes_tokenizer()):
        assert formats.read_tokenizer_json(written(content_of(ours), tmp_path)) == parts_of(ours)


def test_special_tokens_may_stand_outside_the_vocabulary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = content_of(tokenizer)
    for special in tokenizer.special_tokens:
        del content["model"]["vocab"][special]
    assert formats.read_tokenizer_json(written(content, tmp_path)) == parts_of(tokenizer)


def test_gpt2s_own_form_is_read(gpt2: Tokenizer, tmp_path: Path) -> None:
    """The published file has merges as strings and empty affixes, and neither the model's type nor use_regex."""
    content = content_of(gpt2)
    model = content["model"]
    model["merges"] = [" ".join(merge) for merge in model["merges"]]
    model["continuing_subword_prefix"] = model["end_of_word_suffix"] = ""
    del model["type"], model["byte_fallback"], model["ignore_merges"]
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    content["added_tokens"][0]["normalized"] = True
    assert formats.read_tokenizer_json(written(content, tmp_path)) == parts_of(gpt2)


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, CUSTOM_PATTERN])
def test_hugging_faces_own_tokenizer_is_imported(tmp_path: Path, pattern: str) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    theirs = hf.Tokenizer(hf.models.BPE())
    byte_level = hf.pre_tokenizers.ByteLevel
    theirs.pre_tokenizer = byte_level(add_prefix_space=False)
    if pattern != GPT2_PATTERN:
        split = hf.pre_tokenizers.Split(hf.Regex(pattern), "isolated")
        theirs.pre_tokenizer = hf.pre_tokenizers.Sequence([split, byte_level(add_prefix_space=False, use_regex=False)])
    theirs.decoder = hf.decoders.ByteLevel()
    theirs.post_processor = hf.processors.ByteLevel(trim_offsets=False)
    trainer = hf.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", END_OF_TEXT], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    theirs.train_from_iterator([*demo_stories(200), "naïve café 日本語の文章 🙂🙂" * 20], trainer)
    theirs.add_tokens(["xyzzy", "日本"])  # not special; Hugging Face calls them normalized
    theirs.save(str(tmp_path / "tokenizer.json"))

    vocab, merges, specials, found = formats.read_tokenizer_json(tmp_path / "tokenizer.json")
    assert specials == ["<s>", END_OF_TEXT, "xyzzy", "日本"]
    assert found == pattern
    assert len(merges) > 300
    ours = Tokenizer(vocab, merges, specials, found)

    @settings(deadline=None, max_examples=200)
    @given(st.lists(known_text | st.sampled_from(specials), max_size=5).map("".join))
    def encode_alike(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text).ids

    encode_alike()
    stories = "<s>".join(demo_stories(100, seed=3))
    assert ours.encode(stories) == theirs.encode(stories).ids


def test_hugging_faces_tokenizer_without_all_bytes_is_refused(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    theirs = hf.Tokenizer(hf.models.BPE())
    theirs.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.train_from_iterator(["abc"], hf.trainers.BpeTrainer(show_progress=False))
    theirs.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json has no tokens for 253 of the 256 single bytes"):
        formats.read_tokenizer_json(tmp_path / "tokenizer.json")


def put(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change to a file's content: ``value`` at the place that ``keys`` lead to."""

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
        (put("model", "ignore_merges", value=True), "ignore_merges True"),
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
def test_a_feature_that_we_lack_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], feature: str
) -> None:
    content = content_of(bytes_tokenizer(["<s>", "<s><s>"]))
    path = written(content, tmp_path)
    formats.read_tokenizer_json(path)
    change(content)
    written(content, tmp_path)
    with pytest.raises(UserError, match=re.escape(f"{path}: {feature}") + r".* is not supported; use a tokenizer"):
        formats.read_tokenizer_json(path)


@pytest.mark.parametrize(
    ("specials", "text", "refused"),
    [
        (["<s>", "a<s"], "a<s>", True),
        (["<s>", "a<s>b"], "a<s>b", True),
        (["<s>", "<s>b"], "<s>b", True),
        (["<s>", ">a", "s", "b"], "<s>a<s>b>a", False),
    ],
)
def test_hugging_face_finds_normalized_tokens_last(
    tmp_path: Path, specials: list[str], text: str, refused: bool
) -> None:
    """Why some overlaps of added tokens are refused, and others are not."""
    hf = pytest.importorskip("tokenizers", reason="the Hugging Face library is not installed")
    ours = bytes_tokenizer(specials)
    content = content_of(ours)
    for token in content["added_tokens"][1:]:
        token["normalized"] = True
    path = written(content, tmp_path)
    agree = hf.Tokenizer.from_file(str(path)).encode(text).ids == ours.encode(text)
    assert agree is not refused
    if refused:
        with pytest.raises(UserError, match=f"{specials[1]!r}, normalized and overlapping '<s>'"):
            formats.read_tokenizer_json(path)
    else:
        assert formats.read_tokenizer_json(path) == parts_of(ours)


def test_what_is_left_out_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = bytes_tokenizer(["<s>"])
    content = content_of(ours)
    template = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    for post_processor in (None, BYTE_LEVEL, {"type": "Sequence", "processors": [BYTE_LEVEL]}):
        content["post_processor"] = post_processor
        assert formats.read_tokenizer_json(written(content, tmp_path)) == parts_of(ours)
    assert caplog.messages == []
    content["post_processor"] = {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
    content["truncation"] = {"max_length": 512}
    path = written(content, tmp_path)
    assert formats.read_tokenizer_json(path) == parts_of(ours)
    assert caplog.messages == [
        f"{path}: the tokens that TemplateProcessing adds around a text are left out.",
        f"{path}: its truncation is left out.",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("added_tokens", 0, "id", value=7), "the added token '<s>' has another id in the vocabulary"),
        (put("model", "vocab", "<s>", value=7), "the added token '<s>' has another id in the vocabulary"),
        (put("model", "vocab", "a b", value=7), "the id of 'a b', 7, is not a whole number used once"),
        (put("model", "vocab", "ab", value=None), "the id of 'ab', None, is not"),
        (put("model", "merges", value=["a b", "a"]), "merge 2: 'a' is not two spellings"),
        (put("model", "merges", value=[["a", "b"], ["a", "b", "c"]]), "merge 2: 'a b c' is not two spellings"),
        (put("model", "merges", value=[["a", "日"]]), "merge 1: 'a 日' is not two spellings"),
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
def test_a_malformed_tokenizer_json_is_a_users_mistake(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = content_of(bytes_tokenizer(["<s>"]))
    change(content)
    path = written(content, tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        formats.read_tokenizer_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, [], {}, "tokenizer", 3, {"version": "1.0", "model": {}}])
def test_another_file_is_no_tokenizer_json(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json.* is not a Hugging Face tokenizer\.json|is not supported"):
        formats.read_tokenizer_json(written(content, tmp_path))


def test_a_missing_tokenizer_json_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        formats.read_tokenizer_json(tmp_path / "tokenizer.json")


def test_a_text_has_one_id(tmp_path: Path) -> None:
    """Two spaces as an added token beside the merged one: which of the two is the token would be chance."""
    vocab, merges = {**BYTES, 256: b"  "}, [(b" ", b" ")]
    content = content_of(Tokenizer(vocab, merges))
    path = written(content, tmp_path)
    assert formats.read_tokenizer_json(path)[:2] == (vocab, merges)
    content["added_tokens"] = [{"id": 257, "content": "  ", "normalized": True}]
    with pytest.raises(UserError, match=r"tokenizer\.json: b'  ' has two ids, which is not supported"):
        formats.read_tokenizer_json(written(content, tmp_path))


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


def test_a_tokenizer_is_read_from_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert (again.vocab, again.merges, again.special_tokens) == (
        tokenizer.vocab,
        tokenizer.merges,
        tokenizer.special_tokens,
    )
