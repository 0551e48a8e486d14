"""Texts of special tokens are counted across blocks, and ranges split where only the separator is a token."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lm.text.chunks import cut_chunks
from lm.text.special_texts import SpecialTextCounter, join_adjacent, rows_of_copy, split_ranges
from tests.helpers.corpora import EOT
from tests.helpers.examples import examples


@examples(200)
@given(st.lists(st.text("abé", max_size=6), max_size=6), st.sampled_from([["ab"], ["a", "aba"], ["éa", "aé", "b"], []]))
def test_the_count_does_not_depend_on_the_blocks(blocks: list[str], tokens: list[str]) -> None:
    counter = SpecialTextCounter(tokens)
    for block in blocks:
        counter.update(block.encode())
    search = "|".join(sorted(tokens, key=len, reverse=True))
    assert counter.total == (len(re.findall(search, "".join(blocks))) if tokens else 0)


def test_ranges_are_split_at_rows() -> None:
    assert [*split_ranges([(0, 10), (15, 30)], [(3, 5), (8, 20), (20, 22)])] == [
        (0, 3, False),
        (3, 5, True),
        (5, 8, False),
        (8, 10, True),
        (15, 20, True),
        (20, 22, True),
        (22, 30, False),
    ]
    assert [*split_ranges([(2, 5)], [])] == [(2, 5, False)]
    assert join_adjacent([(0, 2), (2, 3), (4, 5)]) == [(0, 3), (4, 5)]
    assert rows_of_copy([(0, 10), (15, 30)], [(3, 5), (8, 22)], 100) == [(103, 105), (108, 117)]


def test_rows_are_cut_at_separators_only(tmp_path: Path) -> None:
    documents = [f"{'word' * 10}<|user|>{'text' * 5}{EOT}", f"no token {'x' * 40}{EOT}"] * 3
    (tmp_path / "a.txt").write_text("".join(documents))
    size = len("".join(documents))
    tokens = [EOT, "<|user|>"]
    arguments = [str(tmp_path / "a.txt")], tokens, 20
    chunks = list(cut_chunks(*arguments, rows=[[(0, size)]], separator=EOT))
    assert [part.end - part.start for chunk in chunks for part in chunk] == [*map(len, documents)]
    assert [(part.separator, part.special_texts) for chunk in chunks for part in chunk] == [(EOT, 1), ("", 0)] * 3
    assert any(len(chunk) == 1 and chunk[0].end == 48 for chunk in cut_chunks(*arguments)), "else at the token"
