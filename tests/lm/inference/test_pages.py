"""Pages of the KV cache: each is free, kept by a prefix cache, or of rows, and rows get runs of pages."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.inference.kv_cache import KVCache
from lm.model.config import ModelConfig
from tests.helpers.examples import examples

_ROWS, _WIDTH, _PAGES = 3, 5, 11
_CONFIG = ModelConfig(10, 16 * _WIDTH, 4, 1, 1, d_ff=4)

operations = st.lists(
    st.tuples(st.sampled_from(["extend", "clear", "swap", "share", "keep", "drop", "take"]), *[st.integers(0, 9)] * 2),
    max_size=40,
)


def make_cache() -> KVCache:
    return KVCache(_CONFIG, _ROWS, 16 * _WIDTH, torch.device("cpu"), num_pages=_PAGES)


@examples(200)
@given(operations)
def test_pages_are_counted(changes: list[tuple[str, int, int]]) -> None:
    """Compare with lists of pages and a count of those that are kept."""
    cache = make_cache()
    rows: list[list[int]] = [[] for _ in range(_ROWS)]
    kept: list[int] = []

    def free() -> set[int]:
        return set(range(1, _PAGES + 1)) - {page for row in rows for page in row} - set(kept)

    for name, a, b in changes:
        row, other, count = a % _ROWS, b % _ROWS, b % (_WIDTH + 1)
        if name == "extend" and len(rows[row]) + count <= _WIDTH:
            if count > len(free()):
                with pytest.raises(ValueError, match="that are free"):
                    cache.extend(row, count)
            else:
                cache.extend(row, count)
                new = cache.pages(row)[len(rows[row]) :]
                assert len(set(new)) == count
                assert set(new) <= free()
                rows[row] = [*rows[row], *new]
        elif name == "clear":
            cache.clear(row)
            rows[row] = []
        elif name == "swap":
            cache.swap_rows(row, other)
            rows[row], rows[other] = rows[other], rows[row]
        elif name == "share":
            shared = rows[other][:count]
            cache.share(row, shared)
            rows[row] = [*shared, *rows[row][len(shared) :]]
        elif name == "keep" and rows[row]:
            page = rows[row][b % len(rows[row])]
            if page not in kept:
                cache.keep(page)
                kept.append(page)
        elif name == "drop" and kept:
            cache.drop(kept.pop(a % len(kept)))
        elif name == "take" and free():
            page = cache.take_kept()
            assert page in free()
            kept.append(page)
        used = {page for pages in rows for page in pages}
        assert cache.num_free == len(free())
        assert cache.num_idle == len(set(kept) - used)
        for number, pages in enumerate(rows):
            assert cache.pages(number) == pages
            assert cache.page_table[number].tolist() == [*pages, *[0] * (_WIDTH - len(pages))]


@examples(100)
@given(st.lists(st.booleans(), min_size=_PAGES, max_size=_PAGES), st.integers(1, _WIDTH))
def test_a_row_gets_a_run_of_pages(is_used: list[bool], count: int) -> None:
    """The shortest that is long enough, if there is one."""
    cache = KVCache(_CONFIG, _PAGES + 1, 16 * _WIDTH, torch.device("cpu"), num_pages=_PAGES)
    for row in range(_PAGES):
        cache.extend(row, 1)
    for row, used in enumerate(is_used):
        if not used:
            cache.clear(row)
    runs = "".join("u" if used else "f" for used in is_used).split("u")
    if sum(map(len, runs)) < count:
        return
    cache.extend(_PAGES, count)
    pages = cache.pages(_PAGES)
    num_runs = 1 + int((np.diff(pages) != 1).sum())
    long_enough = [len(run) for run in runs if len(run) >= count]
    assert num_runs == 1 if long_enough else num_runs > 1
    if long_enough:
        start = pages[0] - 1
        length = is_used[start:].index(True) if True in is_used[start:] else _PAGES - start
        assert length == min(long_enough)
