"""A mask holds the tokens that keep the text possible, no more and no less."""

import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.inference.constraints import Constraint, ConstraintCompiler, ConstraintError
from lm.inference.grammars import Grammar
from tests.helpers.constrained import is_valid_json, make_constraint, schemas, words_tokenizer
from tests.helpers.examples import examples
from tests.helpers.tokenizers import bytes_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")

_characters = st.sampled_from(["a", "b", "é", "日", " ", "e", "there", "abab", r"\n", r"\.", "[a-e]", "[^a]", "."])
regexes = st.recursive(
    _characters,
    lambda parts: st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("(?:{}|{})".format, parts, parts),
        st.builds("(?:{}){}".format, parts, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])),
    ),
    max_leaves=6,
)


def end_ids() -> list[int]:
    return list(words_tokenizer().special_ids.values())


def walk(constraint: Constraint, source: random.Random, num_steps: int) -> list[int]:
    """Advance by random ids of the mask, and return them."""
    ids: list[int] = []
    ends = end_ids()
    for _ in range(num_steps):
        mask = constraint.mask(ends)
        mask[ends] = False
        if not mask.any():
            break
        ids.append(source.choice(np.flatnonzero(mask).tolist()))
        constraint.advance(ids[-1])
    return ids


def fits(constraint: Constraint, token_id: int) -> bool:
    try:
        constraint.copy().advance(token_id)
    except ConstraintError:
        return False
    return True


@examples(40)
@given(pattern=regexes, steps=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_mask_of_a_regex_is_that_of_partial_matching(pattern: str, steps: int, seed: int) -> None:
    """The library ``regex`` tells for each token whether the text with it can be completed to a match."""
    constraint, tokenizer = make_constraint(Grammar.from_regex(pattern)), words_tokenizer()
    text = tokenizer.decode_bytes(walk(constraint, random.Random(seed), steps))
    mask = constraint.mask(end_ids())
    ends = set(end_ids())
    for token_id in range(tokenizer.size):
        longer = text if token_id in ends else text + tokenizer.vocab[token_id]
        try:
            whole = longer.decode()
        except UnicodeDecodeError:
            continue  # regex knows no parts of characters
        can_be = regex.fullmatch(pattern, whole, partial=token_id not in ends) is not None
        assert mask[token_id] == can_be, (whole, token_id)


@examples(20)
@given(schema=schemas, steps=st.integers(0, 30), seed=st.integers(0, 99))
def test_the_mask_equals_trying_every_token(schema: dict[str, Any], steps: int, seed: int) -> None:
    constraint, ends = make_constraint(Grammar.from_json_schema(schema)), end_ids()
    ids = walk(constraint, random.Random(seed), steps)
    mask = constraint.mask()
    assert constraint.mask().tolist() == mask.tolist(), "a mask changes nothing"
    text = words_tokenizer().decode_bytes(ids).decode(errors="replace")
    can_end = constraint.mask(ends)[ends[0]]
    assert can_end == is_valid_json(text, schema)
    if can_end and constraint.is_complete:
        assert mask.all(), "no token fits, and none ends the text"
        return
    assert mask.tolist() == [fits(constraint, token_id) for token_id in range(words_tokenizer().size)]


@examples(100)
@given(choices=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=4), data=st.data())
def test_a_choice_allows_its_texts_only(choices: list[str], data: st.DataObject) -> None:
    """Any characters: quotes, escapes, controls. After each byte of a text, those of all texts that begin so fit."""
    constraint = make_constraint(Grammar.from_choices(choices))
    text = data.draw(st.sampled_from(choices)).encode()
    for end in range(len(text) + 1):
        fitting = [choice.encode() for choice in choices if choice.encode().startswith(text[:end])]
        mask = constraint.mask(end_ids())
        assert set(np.flatnonzero(mask[:256]).tolist()) == {choice[end] for choice in fitting if len(choice) > end}
        assert mask[end_ids()].all() == (text[:end] in fitting)
        if end < len(text):
            constraint.advance(text[end])


def test_stop_ids_come_at_the_end_only_whatever_their_bytes_are() -> None:
    tokenizer = words_tokenizer()
    [there] = tokenizer.encode(" there", allowed_special=())
    constraint = make_constraint(Grammar.from_regex("a there!?"))
    constraint.advance(97)
    assert constraint.mask()[there] and not constraint.mask([there])[there]
    constraint.advance(there)
    assert set(np.flatnonzero(constraint.mask([there])).tolist()) == {33, there}
    assert not constraint.is_complete
    constraint.advance(33)
    assert constraint.is_complete
    assert np.flatnonzero(constraint.mask([there])).tolist() == [there]


def test_a_copy_is_independent() -> None:
    constraint = make_constraint(Grammar.from_regex("ab|cd"))
    copy = constraint.copy()
    constraint.advance(97)
    assert np.flatnonzero(constraint.mask()).tolist() == [98]
    assert copy.mask()[[97, 99]].all() and not copy.mask()[98]


def test_a_token_outside_the_mask_is_an_error() -> None:
    constraint = make_constraint(Grammar.from_regex("ab"))
    with pytest.raises(ConstraintError, match="does not fit"):
        constraint.advance(98)


def test_a_special_token_of_a_grammar_is_the_token_and_not_its_text() -> None:
    tokenizer = words_tokenizer()
    special = tokenizer.special_ids["<|endoftext|>"]
    named = make_constraint(Grammar.from_grammar('start: <|endoftext|> "b"'))
    assert np.flatnonzero(named.mask()).tolist() == [special]
    spelled = make_constraint(Grammar.from_choices(["<|endoftext|>"]))
    assert spelled.mask()[ord("<")] and not spelled.mask()[special]


class FewTokens:
    """A vocabulary of some letters: two ids have the same bytes, one has none, and one is special."""

    begin_token = None

    def __init__(self) -> None:
        self.size, self.special_ids, self.stop_ids = 5, {"</s>": 4}, frozenset([4])
        self.vocab = {0: b"a", 1: b"a", 3: b"aa", 4: b""}

    def encode(self, text: str, allowed_special: tuple[()]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError


def test_ids_with_equal_bytes_are_equal_and_those_without_bytes_never_come() -> None:
    constraint = ConstraintCompiler(FewTokens()).compile(Grammar.from_regex("aa"))
    assert constraint.mask([4]).tolist() == [True, True, False, True, False]
    constraint.advance(1)
    assert constraint.mask([4]).tolist() == [True, True, False, False, False]
    constraint.advance(0)
    assert constraint.mask([4]).tolist() == [False, False, False, False, True]


def test_a_vocabulary_without_a_token_that_fits_is_an_error_of_the_text() -> None:
    constraint = ConstraintCompiler(FewTokens()).compile(Grammar.from_regex("ab"))
    assert constraint.mask([4]).tolist() == [True, True, False, False, False]
    constraint.advance(0)
    assert constraint.mask([4]).tolist() == [True] * 4 + [False], "any id: the error comes with the next one"
    with pytest.raises(ConstraintError, match="no token fits"):
        constraint.advance(0)


def test_recent_grammars_are_compiled_once_and_old_ones_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = Grammar.compile

    def count(self: Grammar, tokenizer: Any) -> Any:
        compiled.append(self.source)
        return compile_grammar(self, tokenizer)

    monkeypatch.setattr(Grammar, "compile", count)
    monkeypatch.setattr("lm.inference.constraints._MAX_CACHED_LENGTH", 9000)
    compiler = ConstraintCompiler(FewTokens())
    for pattern in ("a", "a", "aa", "a", "aaa", "aa"):
        compiler.compile(Grammar.from_regex(pattern)).advance(0)
    assert [source.split("/")[1] for source in compiled] == ["a", "aa", "aaa", "aa"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "regular expression is invalid or not supported: unclosed group."),
        (r"\bfoo\b", "lookarounds not supported yet"),
        (r"(a)\1", "backreferences are not supported."),
        ("\ud800", "lone surrogate"),
        ("a" * 200_000, "at most 131,072"),
        ("a?" * 20_000 + "a" * 20_000, "The regular expression is"),
        ("(" * 1000 + ")" * 1000, "nested"),
    ],
    ids=lambda value: value[:8].encode("ascii", "replace").decode(),
)
def test_a_bad_regex_is_refused_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_constraint(Grammar.from_regex(text))
    assert message in str(error.value) and len(str(error.value)) < 300


DEEP = '{"items":' * 5000 + "{}" + "}" * 5000
HOSTILE_SCHEMAS: list[tuple[Any, str]] = [
    ("{", "is not JSON"),
    ("[]", "is not an object"),
    (DEEP, "nested too deeply"),
    ('{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
    ({"type": "strin"}, "Invalid type: strin."),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"$ref": "#"}, "no text fits it"),
    ({"$ref": "file:///etc/passwd"}, "retriev"),
    ({"const": float("nan")}, "not JSON"),
    ({"const": 10**5000}, "not JSON"),
    ({"const": "\ud800"}, "hex escape"),
    ({"enum": ["x" * 90] * 5000}, "at most 131,072"),
    ({"type": "integer", "multipleOf": 999_983}, "The JSON schema is"),
    ({"allOf": [{"type": "string", "pattern": f"a.*{i}.*b"} for i in range(100)]}, "The JSON schema is"),
    ({"allOf": [{"type": "integer", "multipleOf": n} for n in (999_983, 999_979)]}, "The JSON schema is"),
]


@pytest.mark.parametrize(("schema", "message"), HOSTILE_SCHEMAS, ids=lambda _: "")
def test_a_hostile_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_constraint(Grammar.from_json_schema(schema))
    assert message in str(error.value) and len(str(error.value)) < 300
    assert make_constraint(Grammar.from_regex("a")).mask()[97], "the next one compiles"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no start rule"),
        ("start: foo", 'unknown name: "foo"'),
        ('start: "a', "1("),
        ("root ::= (", "grammar is invalid"),
        ("root ::= " + "(" * 2000, "grammar is invalid"),
        ('root ::= "a"' + " " * 20_000, "at most 16,384"),
        ("start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "b"', "The grammar is"),
        ("start: start", "no text fits it"),
    ],
    ids=lambda value: value[:12],
)
def test_a_bad_grammar_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_constraint(Grammar.from_grammar(text))
    assert message in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("text", ['start: "a" start | "b"', 'root ::= "a" root | "b"'])
def test_both_dialects_of_grammars_are_read(text: str) -> None:
    constraint = make_constraint(Grammar.from_grammar(text))
    for byte in b"aab":
        assert constraint.mask()[byte]
        constraint.advance(byte)
    assert constraint.is_complete


def test_an_option_of_the_grammar_does_not_force_tokens() -> None:
    constraint = make_constraint(Grammar.from_grammar('%llguidance {"no_forcing": false}\nstart: "abab"'))
    mask = constraint.mask()
    assert mask[ord("a")] and mask.sum() > 1


def test_an_additional_property_cannot_take_the_name_of_a_declared_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text in ('{"a":1,"a"', '{"a":1,"\\u0061"'):
        constraint = make_constraint(Grammar.from_json_schema(json.dumps(schema)))
        allowed = []
        for byte in text.encode():
            allowed.append(bool(constraint.mask()[byte]))
            if not allowed[-1]:
                break
            constraint.advance(byte)
        assert not all(allowed)


def test_white_space_is_bounded() -> None:
    schema = {"type": "array", "items": {"type": "null"}}
    assert all(follow(schema, text) for text in ("[null, null]", "[\n    null,\n    null\n]", "[null,null]"))
    assert not any(follow(schema, text) for text in ("[  null]", "[null]\n\n", "[\n" + " " * 41))


def follow(schema: dict[str, Any], text: str) -> bool:
    constraint = make_constraint(Grammar.from_json_schema(schema))
    for byte in text.encode():
        if not constraint.mask([0])[byte]:
            return False
        constraint.advance(byte)
    return True


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    compiler = ConstraintCompiler(bytes_tokenizer())
    with pytest.raises(UserError, match=r"pip install 'textmill\[grammar\]'"):
        compiler.compile(Grammar.from_json_schema({}))
    with pytest.raises(UserError, match=r"pip install 'textmill\[grammar\]'"):
        Grammar.from_regex("a")


def test_an_empty_list_of_choices_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        Grammar.from_choices([])
