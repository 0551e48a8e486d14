"""The scanner of JSON against Python's reader."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.json_scanner import JsonScanner
from tests.helpers.examples import examples

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)
containers = st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3)


def scan(text: str) -> tuple[bool, bool]:
    """Return whether the text can still become JSON, and whether it is complete."""
    scanner = JsonScanner()
    can_go_on = all(map(scanner.feed, text))
    return can_go_on, can_go_on and scanner.expects == "nothing"


def is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), (list, dict))
    except ValueError:
        return False


@given(containers, st.sampled_from([None, 1]), st.booleans())
@examples(200)
def test_every_beginning_of_json_is_accepted(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    for end in range(len(text)):
        assert scan(text[:end]) == (True, False), text[:end]
    assert scan(text) == scan(f"\n {text}\t ") == (True, True)


@given(containers, st.data())
@examples(150)
def test_changed_json_is_complete_only_if_python_reads_it(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    for _ in range(data.draw(st.integers(1, 3))):
        place, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 2))
        inserted = data.draw(st.text('{}[],:"\\/ \n\x00eEtu+-.019aé', max_size=2))
        text = text[:place] + inserted + text[place + size :]
    assert scan(text)[1] == is_json(text), text


@pytest.mark.parametrize("text", ["{}x", "[1,]", "[01]", "[1.]", "[-]", "[1e]", '["\t"]', '["\\x"]', "[NaN]", "{1:2}"])
def test_a_text_that_cannot_become_json_is_refused_at_once(text: str) -> None:
    assert not scan(text)[0]
    assert [scan(text[:end])[0] for end in range(len(text) + 1)].index(False) > 1


def test_very_deep_json_is_refused() -> None:
    assert scan("[" * 200 + "]" * 200) == (True, True)
    assert scan("[" * 201) == (False, False)
