"""The documents that ingest holds out for validation, and where a long document is cut."""

import gzip
import hashlib
import json
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.data.token_shards import write_shard
from lm.text.chunks import cut_chunks
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from lm.text.documents import DocumentHash, TextStatistics
from lm.text.held_out import valid_fraction
from lm.text.pretokenize import find_safe_cut
from lm.text.sources import Source, open_ranges
from lm.tokenizer.tokenizer import token_dtype
from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.helpers.examples import examples
from tests.helpers.ingesting import closed, ingest_sources, run, sources, written_files
from tests.helpers.tokenizers import make_tokenizer


def stories(count: int) -> list[str]:
    return [story.removesuffix(f"{EOT}\n") for story in demo_stories(count)]


def split_stories(tmp_path: Path, name: str, rows: list[str], **fields: Any) -> tuple[list[str], list[str]]:
    """Ingest the documents ``rows`` from one text file. Returns the (training, validation) documents."""
    path = write_text(tmp_path / f"{name}.txt", "".join(f"{row}{EOT}\n" for row in rows))
    _, texts = run(tmp_path / name, sources(path), **fields)
    train, valid = ([part.strip() for part in texts[key].split(EOT) if part.strip()] for key in ("train", "valid"))
    return train, valid


def test_a_fraction_of_the_documents_is_held_out(tmp_path: Path) -> None:
    rows = stories(1000)
    path = write_text(tmp_path / "a.txt", "".join(f"{row}{EOT}\n" for row in rows))
    result, texts = run(tmp_path / "out", sources(path), valid_fraction=0.1)
    train, valid = ([part.strip() for part in texts[key].split(EOT)[:-1]] for key in ("train", "valid"))
    assert sorted(train + valid) == sorted(row.strip() for row in rows)
    assert 60 < len(valid) < 140
    assert [result["statistics"][name]["documents"] for name in ("train", "valid")] == [len(train), len(valid)]
    assert [(text["file"], text["source"]) for text in result["train"] + result["valid"]] == [
        *[(None, 0), ("valid.txt", None)],
    ]
    assert written_files(tmp_path / "out") == ["0/held-out.txt", "valid.txt"], "the training text is not copied"


def test_the_fraction_does_not_depend_on_order_number_or_format(tmp_path: Path) -> None:
    rows = [row.strip() for row in stories(120)]
    train, valid = split_stories(tmp_path, "one", rows, valid_fraction=0.2)
    assert valid
    more_train, more_valid = split_stories(
        tmp_path, "more", rows + [row.strip() for row in stories(200)[120:]], valid_fraction=0.2
    )
    assert more_train[: len(train)] == train
    assert more_valid[: len(valid)] == valid
    # Each document is first once. The first document of a file lacks the newline with which the others begin.
    for first in range(0, 120, 10):
        rotated = rows[first:] + rows[:first]
        assert set(split_stories(tmp_path, f"rotated-{first}", rotated, valid_fraction=0.2)[1]) == set(valid)
    url = write_jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    _, texts = run(tmp_path / "jsonl", sources(url), valid_fraction=0.2)
    assert texts["valid"].split(EOT)[:-1] == valid


def naive_split(texts: list[str], fraction: float) -> dict[str, tuple[str, list[int]]]:
    """Return (text, lengths of its documents) of each split."""
    splits: dict[str, tuple[str, list[int]]] = {"train": ("", []), "valid": ("", [])}
    for text in texts:
        *whole, rest = text.split("||")
        for document in (*whole, rest) if rest.strip() else whole:
            words = document.strip()
            digest = hashlib.sha256(words.encode()).digest()
            name = "valid" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"
            splits[name] = (splits[name][0] + document + "||", [*splits[name][1], len(words)])
        if not rest.strip():
            splits["train"] = (splits["train"][0] + rest, splits["train"][1])
    return splits


def documents_of(text: str) -> list[str]:
    *whole, rest = text.split("||")
    return [*whole, rest] if rest.strip() else whole


def slice_texts(texts: list[str], start: int, stop: int | None) -> list[str]:
    """Return the parts of texts between two places in the bytes of all, one after the other."""
    parts, before = [], 0
    for text in texts:
        data = text.encode()
        if part := data[max(0, start - before) : None if stop is None else max(0, stop - before)]:
            parts.append(part.decode())
        before += len(data)
    return parts


def naive_cut_at_end(texts: list[str], fraction: float) -> int:
    """Return the place of the cut in the bytes of all texts, one after the other."""
    total = sum(len(text.encode()) for text in texts)

    def safe_cut(offset: int) -> int:
        before = 0
        for text in texts:
            data = text.encode()
            if offset < before + len(data):
                start = data[: offset - before].decode(errors="replace")
                return before + len(start[: find_safe_cut(start, ["||"])].encode())
            before += len(data)
        raise AssertionError

    borders, before = [], 0
    for text in texts:
        end = before
        for document in documents_of(text):
            end = min(end + len(f"{document}||".encode()), before + len(text.encode()))
            borders.append(end)
        before += len(text.encode())
    offset = int(total * (1 - fraction))
    tail = safe_cut(max(0, int(total * (1 - 2 * fraction))))
    borders = [border for border in borders[:-1] if border > tail]
    return min(borders, key=lambda border: abs(border - offset)) if borders else safe_cut(offset)


@examples(200)
@given(
    st.lists(st.text("ab|é \n", min_size=1, max_size=60), min_size=1, max_size=3),
    st.floats(0.05, 0.95),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_the_split_equals_the_naive_reference(
    texts: list[str], fraction: float, block: int, group_sources: int
) -> None:
    expected = naive_split(texts, fraction)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        given_sources = sources(*(write_text(Path(place, f"{number}.txt"), text) for number, text in enumerate(texts)))
        patch.setattr("lm.files.compression.BLOCK_BYTES", block)
        patch.setattr("lm.text.ingest._MAX_GROUP_SOURCES", group_sources)
        config: dict[str, Any] = {"separator": "||", "valid_fraction": fraction}
        if expected["train"][1] and expected["valid"][1]:
            result, parts = run(Path(place, "out"), given_sources, **config)
            assert parts == {name: text for name, (text, _) in expected.items()}
            for name, (_, lengths) in expected.items():
                statistics = TextStatistics()
                for length in lengths:
                    statistics.add_document(length)
                assert result["statistics"][name]["lengths"] == statistics.lengths
            return
        cut = naive_cut_at_end(texts, fraction)
        expected_lengths = {}
        for name, pieces in (("train", slice_texts(texts, 0, cut)), ("valid", slice_texts(texts, cut, None))):
            expected_lengths[name] = [len(document.strip()) for piece in pieces for document in documents_of(piece)]
        if not expected_lengths["train"] or not expected_lengths["valid"]:
            with pytest.raises(UserError, match=r"too short|no place|only white space"):
                run(Path(place, "out"), given_sources, **config)
            return
        result, parts = run(Path(place, "out"), given_sources, **config)
        assert parts["train"] == "".join(closed(piece, "||") for piece in slice_texts(texts, 0, cut))
        assert parts["valid"] == "".join(closed(piece, "||") for piece in slice_texts(texts, cut, None))
        for name, lengths in expected_lengths.items():
            assert result["statistics"][name]["documents"] == len(lengths)


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """Split one plain text document by document. Returns the (training, validation) text."""
    splits = {"train": "", "valid": ""}
    *whole, rest = text.split(EOT)
    for document in (*whole, rest) if rest.strip() else whole:
        digest = hashlib.sha256(document.strip().encode()).digest()
        splits["valid" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"] += document + EOT
    return splits["train"] + ("" if rest.strip() else rest), splits["valid"]


def encode_chunks(
    texts: list[dict[str, Any]], out: Path, inputs: list[Source], target: int
) -> tuple[list[int], list[int]]:
    """Cut the entries of texts.json into chunks and encode them like the stages. Returns (ids, document ends)."""
    paths = [str(out / text["file"]) if text["file"] else inputs[text["source"]].url for text in texts]
    ids: list[int] = []
    ends: list[int] = []
    for chunk in cut_chunks(paths, [EOT], target, ranges=[text["ranges"] for text in texts]):
        with ExitStack() as stack:
            parts = [
                (stack.enter_context(open_ranges(paths[part.text], [(part.start, part.end)])), part) for part in chunk
            ]
            write_shard(((blocks, part.last, part.separator) for blocks, part in parts), TOKENIZER, EOT, out)
        ends += [len(ids) + int(end) for end in np.load(out / "documents.npy")]
        ids += np.fromfile(out / "tokens.bin", token_dtype(TOKENIZER.size)).tolist()
    return ids, ends


parts = st.sampled_from([EOT, EOT, f"{EOT}\n", "one", " two", "don't", "日本", " ", "\n", "x" * 30, "<|endof"])
TOKENIZER = make_tokenizer(special_tokens=[EOT])


@example([(" ", True), (f"one{EOT}don't", True)], 0.5, 1)
@examples(150)
@given(
    st.lists(st.tuples(st.lists(parts, min_size=1, max_size=25).map("".join), st.booleans()), min_size=1, max_size=4),
    st.floats(0.05, 0.95),
    st.integers(1, 60),
)
def test_referenced_ranges_have_the_same_ids_as_copied_texts(
    files: list[tuple[str, bool]], fraction: float, target: int
) -> None:
    """Plain files are referenced by range, compressed files are copied, and so are validation documents."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out")
        expected: list[str] = []
        valid, was_compressed = "", False
        for number, (text, is_compressed) in enumerate(files):
            path = Path(place, f"{number}.txt.gz" if is_compressed else f"{number}.txt")
            path.write_bytes(gzip.compress(text.encode()) if is_compressed else text.encode())
            if not (is_compressed and was_compressed):
                expected.append("")
            # Blank text at the end of a compressed file belongs to the first document of the next one.
            expected[-1], end, blank = expected[-1].rpartition(EOT)
            train, chosen = split_text(blank + text, fraction)
            expected[-1] += end + train
            valid, was_compressed = valid + chosen, is_compressed
        given_sources = sources(*sorted(Path(place).glob("*.txt*"), key=lambda path: path.name))
        assume(valid and any(text.strip() for text in expected))
        result = ingest_sources(given_sources, [], DataConfig(valid_fraction=fraction), out)
        assert result["valid"][0]["file"] == "valid.txt"
        for name, texts in (("train", expected), ("valid", [valid])):
            ids, ends = encode_chunks(result[name], out, given_sources, target)
            assert ids == [token_id for text in texts for token_id in TOKENIZER.encode(text)]
            end_of_text = TOKENIZER.special_ids[EOT]
            assert ends == [place + 1 for place, token_id in enumerate(ids) if token_id == end_of_text]


@pytest.mark.parametrize("has_words", [True, False])
def test_the_cut_of_a_long_document_is_searched_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_words: bool
) -> None:
    """Only the text before the cut is read again, in a window that grows until it has a safe cut."""
    text = "naïve 日本語🙂 word\n" * 400 if has_words else "one two" + "語🙂é" * 1000
    given_sources = sources(write_text(tmp_path / "a.txt", text))
    for window in (16, 17, 18, 19, 64, 1000, 1 << 16):
        monkeypatch.setattr("lm.text.held_out._WINDOW_BYTES", window)
        for fraction in (0.05, 0.33, 0.5, 0.951):
            before = text.encode()[: int(len(text.encode()) * (1 - fraction))].decode(errors="replace")
            _, texts = run(tmp_path / f"{window}-{fraction}", given_sources, valid_fraction=fraction)
            assert texts["train"] == text[: find_safe_cut(before, [EOT])] + EOT


def test_the_validation_text_of_a_large_corpus_is_capped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = stories(1000)
    whole = len("".join(f"{row}{EOT}\n" for row in rows))
    caps = {"whole": whole, "half": int(0.2 * whole), "fifth": int(0.08 * whole), "none": 0}
    splits = {
        name: split_stories(tmp_path, name, rows, valid_fraction=0.4, valid_max_bytes=cap) for name, cap in caps.items()
    }
    assert splits["whole"] == splits["none"] == split_stories(tmp_path, "again", rows, valid_fraction=0.4)
    assert splits["half"] == split_stories(tmp_path, "by-hand", rows, valid_fraction=0.2)
    assert splits["fifth"] == split_stories(tmp_path, "by-hand-too", rows, valid_fraction=0.05)
    chosen = [set(splits[name][1]) for name in ("fifth", "half", "whole")]
    assert chosen[0] < chosen[1] < chosen[2]
    assert "Validation text: 20 % of the documents, because of data.valid_max_bytes." in caplog.text


def test_the_capped_fraction_changes_only_when_the_corpus_doubles() -> None:
    config = DataConfig(valid_fraction=0.1, valid_max_bytes=1000)
    shares = [valid_fraction(config, size) for size in (5000, 10_000, 10_001, 20_000, 20_001, 40_000, 10**15)]
    assert shares[:6] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert 0 < shares[6] * 10**15 <= 1000
    assert valid_fraction(DataConfig(valid_max_bytes=0), 10**15) == 0.05


def test_the_cap_does_not_apply_to_given_validation_text(tmp_path: Path) -> None:
    a, b = (write_text(tmp_path / f"{name}.txt", f"{name * 50}{EOT}" * 20) for name in "ab")
    _, texts = run(tmp_path / "out", sources(a), sources(b), valid_max_bytes=10)
    assert texts["valid"] == b.read_text()


def test_the_cap_applies_to_a_few_large_documents(tmp_path: Path) -> None:
    """There are too few documents to choose from: the end of the last file is the validation text."""
    books = [write_text(tmp_path / f"{number}.txt", f"word{number} " * 5000) for number in range(5)]
    result, texts = run(tmp_path / "out", sources(*books), valid_max_bytes=2000)
    assert 1000 <= len(texts["valid"]) <= 2000 + 10 + len(EOT)
    assert [text["source"] for text in result["train"]] == [0, 1, 2, 3, 4]
    assert [text["source"] for text in result["valid"]] == [4]


def test_whole_documents_are_held_out_if_no_hash_chooses_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = [f"document {number} of all" for number in range(20)]
    path = write_text(tmp_path / "a.txt", "".join(f"{row}{EOT}\n" for row in rows))
    result, texts = run(tmp_path / "out", sources(path), valid_fraction=0.08)
    assert [text["file"] for text in result["valid"]] == [None], "no hash chooses a document"
    assert texts["valid"] == "".join(f"\n{row}{EOT}" for row in rows[18:]) + "\n"
    assert [result["statistics"][name]["documents"] for name in ("train", "valid")] == [18, 2]
    assert sum(result["statistics"]["train"]["lengths"]) == 18
    assert "So the last 10.3 % of the text are the validation text: 2 of 20 documents." in caplog.text


def test_white_space_around_a_document_is_not_part_of_its_hash() -> None:
    for pieces in (["  \n", " one", "   ", " \n", "two", " ", "  "], ["one   ", "", " \ntwo"]):
        document = DocumentHash()
        for piece in pieces:
            document.update(piece)
        digest = hashlib.sha256(b"one    \ntwo").digest()
        assert (document.value, document.length) == (int.from_bytes(digest[:8], "big"), 11)


@pytest.mark.parametrize("ending", ["", "\n", EOT, f"{EOT}\n"])
@pytest.mark.parametrize("word", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_a_single_document_is_split_near_its_end(tmp_path: Path, ending: str, word: str, fraction: float) -> None:
    """Regardless of the document's hash."""
    text = f"{word} " * 400 + "end" + ending
    result, texts = run(tmp_path / "out", sources(write_text(tmp_path / "a.txt", text)), valid_fraction=fraction)
    train, valid = texts["train"], texts["valid"]
    assert train.endswith(EOT)
    assert train.removesuffix(EOT) + valid in (text, text + EOT)
    assert [text["source"] for text in result["train"] + result["valid"]] == [0, 0]
    assert abs(len(valid) / len(text) - fraction) < 0.03
    assert result["statistics"]["valid"]["documents"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("word", r"no place .* separator '<\|endoftext\|>' inside, .* set data.valid_fraction to 0"),
        ("a" * 300_000, "no place where its last 5 % can be set aside"),
        ("日" * 100_000, "no place where its last 5 % can be set aside"),
        ("\n" * 300_000, "hold only white space"),
    ],
)
def test_a_text_that_cannot_be_split_raises_a_user_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", sources(write_text(tmp_path / "a.txt", text)))
