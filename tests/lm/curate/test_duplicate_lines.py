import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import StorageError, UserError
from lm.curate import (
    deduplicate_lines,
    digest_lines_to_runs,
    drop_repeated_lines,
    duplicate_lines,
    find_repeated_lines,
    pack_documents,
    sorted_runs,
)
from lm.curate.config import Unit

pieces = st.sampled_from(["a", "b", "é", "\n", "\n\n", " ", "\r\n", "long line " * 8, "x" * 64, "\n" * 70])
texts = st.lists(pieces, max_size=12).map("".join)
_PATTERNS = {"line": r"[^\n]*\n|[^\n]+", "paragraph": r"\n*(?:[^\n]|\n(?!\n|$))+\n*|\n+"}


def plain_lines(text: str, unit: Unit) -> list[tuple[str, str]]:
    """Return (text, text with line feeds) of each line or paragraph."""
    lines = re.findall(_PATTERNS[unit], text)
    assert "".join(lines) == text
    return [(line.removesuffix("\n") if unit == "line" else line.strip("\n"), line) for line in lines]


def plain_deduplicated(texts: Sequence[str], unit: Unit) -> list[str]:
    counts = Counter(line for text in texts for line, _ in plain_lines(text, unit))
    return ["".join(whole for line, whole in plain_lines(text, unit) if counts[line] == 1) for text in texts]


def deduplicated(texts: Sequence[str], unit: Unit, folder: Path, cuts: Sequence[int] = ()) -> list[str]:
    bounds = [0, *cuts, len(texts)]
    batches = [pack_documents(texts[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]
    runs = []
    for number, batch in enumerate(batches):
        (folder / f"{number}").mkdir()
        runs += digest_lines_to_runs([batch], folder / f"{number}", unit)
    kept = []
    for data, offsets in drop_repeated_lines(batches, find_repeated_lines(runs, unit), unit):
        kept += [data[begin:end].tobytes().decode() for begin, end in zip(offsets, offsets[1:], strict=False)]
    return kept


@given(texts=st.lists(texts, max_size=6), unit=st.sampled_from(["line", "paragraph"]), cuts=st.sets(st.integers(0, 6)))
def test_lines_that_occur_once_stay(
    texts: list[str], unit: Unit, cuts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ascending = sorted(cut for cut in cuts if cut <= len(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "_MAX_RUN_RECORDS", 3)
        assert deduplicated(texts, unit, tmp_path_factory.mktemp("lines"), ascending) == plain_deduplicated(texts, unit)


@given(texts=st.lists(texts, min_size=1, max_size=4), block_bytes=st.sampled_from([1, 7, 1 << 20]))
def test_files_keep_their_names_and_the_lines_that_occur_once(
    texts: list[str], block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicate_lines, "_BLOCK_BYTES", block_bytes)
        deduplicate_lines(paths, folder / "out" / "deep")
    assert sorted(path.name for path in (folder / "out" / "deep").iterdir()) == [path.name for path in paths]
    kept = [(folder / "out" / "deep" / path.name).read_bytes().decode() for path in paths]
    assert kept == plain_deduplicated(texts, "line")


def test_files_need_not_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\n\xfe\nx")
    (tmp_path / "b").write_bytes(b"\xfe")
    deduplicate_lines([tmp_path / "a", str(tmp_path / "b")], str(tmp_path / "out"))
    assert [(tmp_path / "out" / name).read_bytes() for name in "ab"] == [b"\xff\nx", b""]


def test_mistakes_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("x")
    first, second = tmp_path / "a" / "text", tmp_path / "b" / "text"
    with pytest.raises(UserError, match="missing is not a file; name existing files"):
        deduplicate_lines([tmp_path / "missing"], tmp_path / "out")
    with pytest.raises(UserError, match=f"{first} and {second} have the same name; rename one"):
        deduplicate_lines([first, second], tmp_path / "out")
    with pytest.raises(UserError, match=f"{first} would be replaced; choose another output directory"):
        deduplicate_lines([first], tmp_path / "a")
    with pytest.raises(StorageError, match=f"{first} cannot be made: "):
        deduplicate_lines([second], first)


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    [run] = digest_lines_to_runs([pack_documents(["a\nb\na"])], tmp_path, "line")
    assert np.unpackbits(find_repeated_lines([run], "line")).tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    run.write_bytes(b"x" + run.read_bytes()[1:])
    with pytest.raises(StorageError, match=f"{run} is damaged: the checksum of block 1 of 1 is wrong"):
        find_repeated_lines([run], "line")
