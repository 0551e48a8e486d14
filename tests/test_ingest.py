"""The ingest stage: the order of its sources, what it copies, and what it sets aside for validation."""

import gzip
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.corpus import DataConfig, Source, Tally, expand, fingerprint
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.ingest import ingest
from lm.pretokens import last_cut
from tests.corpora import EOT, jsonl, parquet, write


def sources(*urls: str | Path) -> list[Source]:
    return [fingerprint(url) for url in expand(map(str, urls))]


def run(
    out: Path, train: list[Source], valid: list[Source] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Ingest into a new folder: (texts.json, the text of train and of valid)."""
    out.mkdir()
    found = ingest(train, valid or [], DataConfig(**fields), out)
    everything = [*train, *(valid or [])]
    texts = {}
    for name in ("train", "valid"):
        data = []
        for text in found[name]:
            path = out / text["file"] if text["file"] else Path(everything[text["source"]].url)
            assert path.stat().st_size == text["bytes"]
            data.append(path.read_bytes())
        texts[name] = b"".join(data).decode()
        assert found["statistics"][name]["bytes"] == len(b"".join(data))
    return found, texts


def test_ingest_refers_to_plain_local_files(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{name}.txt", f"{name}{EOT}") for name in "abc")
    found, texts = run(tmp_path / "out", sources(a, b), sources(c))
    assert [text["source"] for text in found["train"]] == [0, 1]
    assert [text["source"] for text in found["valid"]] == [2]
    assert [text["file"] for text in found["train"] + found["valid"]] == [None] * 3
    assert list((tmp_path / "out").iterdir()) == []
    assert texts == {"train": f"a{EOT}b{EOT}", "valid": f"c{EOT}"}
    assert [found["statistics"][name]["documents"] for name in ("train", "valid")] == [2, 1]


def test_ingest_keeps_the_order_of_mixed_sources(tmp_path: Path) -> None:
    urls = [
        jsonl(tmp_path / "1.jsonl", '{"text": "1"}'),
        write(tmp_path / "2.txt", f"2{EOT}\n"),
        tmp_path / "3.txt.gz",
        parquet(tmp_path / "4.parquet", text=["4"]),
        write(tmp_path / "5.txt", "5"),
        jsonl(tmp_path / "6.jsonl", '{"text": "6"}'),
    ]
    Path(urls[2]).write_bytes(gzip.compress(b"3"))
    found, texts = run(tmp_path / "out", sources(*urls), valid_fraction=0)
    assert texts["train"] == f"1{EOT}2{EOT}\n3{EOT}4{EOT}56{EOT}"
    assert [(text["file"], text["source"]) for text in found["train"]] == [
        *[("train.txt", None), (None, 1), ("train-2.txt", None), (None, 4), ("train-3.txt", None)],
    ]
    assert found["valid"] == []
    assert found["statistics"]["train"]["documents"] == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train-2.txt", "train-3.txt", "train.txt"]


def test_ingest_copies_a_plain_file_with_bytes_to_replace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.txt").write_bytes(b"a\xffb")
    bad, good = sources(tmp_path / "bad.txt", write(tmp_path / "good.txt", "good"))
    found, texts = run(tmp_path / "out", [bad, good], valid_fraction=0, invalid_utf8="replace")
    assert [text["source"] for text in found["train"]] == [None, 1]
    assert texts["train"] == f"a\ufffdb{EOT}good"
    assert found["statistics"]["train"]["replaced"] == 1
    assert found["statistics"]["train"]["documents"] == 2
    assert "1 replaced" in caplog.text
    with pytest.raises(UserError, match="offset 1"):
        run(tmp_path / "again", [bad], valid_fraction=0)


def stories(count: int) -> list[str]:
    return [story.removesuffix(f"{EOT}\n") for story in demo_stories(count)]


def split_of(tmp_path: Path, name: str, rows: list[str], **fields: Any) -> tuple[list[str], list[str]]:
    """The stories that become (training, validation) text when these are the documents of one text file."""
    path = write(tmp_path / f"{name}.txt", "".join(f"{row}{EOT}\n" for row in rows))
    _, texts = run(tmp_path / name, sources(path), **fields)
    train, valid = ([part.strip() for part in texts[key].split(EOT) if part.strip()] for key in ("train", "valid"))
    return train, valid


def test_a_fraction_of_the_documents_is_set_aside(tmp_path: Path) -> None:
    rows = stories(1000)
    path = write(tmp_path / "a.txt", "".join(f"{row}{EOT}\n" for row in rows))
    found, texts = run(tmp_path / "out", sources(path), valid_fraction=0.1)
    train, valid = ([part.strip() for part in texts[key].split(EOT)[:-1]] for key in ("train", "valid"))
    assert sorted(train + valid) == sorted(row.strip() for row in rows)
    assert 60 < len(valid) < 140
    assert [found["statistics"][name]["documents"] for name in ("train", "valid")] == [len(train), len(valid)]
    assert [text["file"] for text in found["train"] + found["valid"]] == ["train.txt", "valid.txt"]


def test_the_fraction_does_not_depend_on_order_number_or_format(tmp_path: Path) -> None:
    rows = [row.strip() for row in stories(120)]
    train, valid = split_of(tmp_path, "one", rows, valid_fraction=0.2)
    assert valid
    more_train, more_valid = split_of(
        tmp_path, "more", rows + [row.strip() for row in stories(200)[120:]], valid_fraction=0.2
    )
    assert more_train[: len(train)] == train
    assert more_valid[: len(valid)] == valid
    # Each document leads once; the first of a file stands without the newline that the others begin with.
    for first in range(0, 120, 10):
        turned = rows[first:] + rows[:first]
        assert set(split_of(tmp_path, f"turned-{first}", turned, valid_fraction=0.2)[1]) == set(valid)
    url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": row}) for row in rows))
    _, texts = run(tmp_path / "jsonl", sources(url), valid_fraction=0.2)
    assert texts["valid"].split(EOT)[:-1] == valid


def naive_split(texts: list[str], fraction: float) -> dict[str, tuple[str, list[int]]]:
    """The training and the validation text, and the lengths of their documents."""
    found: dict[str, tuple[str, list[int]]] = {"train": ("", []), "valid": ("", [])}
    for text in texts:
        *whole, rest = text.split("||")
        for document in (*whole, rest) if rest.strip() else whole:
            words = document.strip()
            digest = hashlib.sha256(words.encode()).digest()
            name = "valid" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"
            found[name] = (found[name][0] + document + "||", [*found[name][1], len(words)])
        if not rest.strip():
            found["train"] = (found["train"][0] + rest, found["train"][1])
    return found


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.text("ab|é \n", min_size=1, max_size=60), min_size=1, max_size=3),
    st.floats(0.05, 0.95),
    st.integers(1, 9),
)
def test_a_split_in_pieces_equals_the_naive_reference(texts: list[str], fraction: float, block: int) -> None:
    expected = naive_split(texts, fraction)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        found = sources(*(write(Path(place, f"{number}.txt"), text) for number, text in enumerate(texts)))
        patch.setattr("lm.corpus.BLOCK", block)
        config: dict[str, Any] = {"separator": "||", "valid_fraction": fraction}
        if expected["train"][1] and expected["valid"][1]:
            split, parts = run(Path(place, "out"), found, **config)
            assert parts == {name: text for name, (text, _) in expected.items()}
            for name, (_, lengths) in expected.items():
                tally = Tally()
                for length in lengths:
                    tally.add(length)
                assert split["statistics"][name]["lengths"] == tally.lengths
            return
        whole = expected["valid"][0] + expected["train"][0]
        cut = last_cut(whole.encode()[: int(len(whole.encode()) * (1 - fraction))].decode(errors="replace"), ["||"])
        if not cut:
            with pytest.raises(UserError, match="too short"):
                run(Path(place, "out"), found, **config)
            return
        _, parts = run(Path(place, "out"), found, **config)
        assert parts["train"] == whole[:cut] + ("" if whole[:cut].endswith("||") else "||")
        assert parts["valid"] == whole[cut:]


@pytest.mark.parametrize("ending", ["", "\n", EOT, f"{EOT}\n"])
@pytest.mark.parametrize("word", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_a_single_document_is_split_at_its_tail(tmp_path: Path, ending: str, word: str, fraction: float) -> None:
    """Whichever side the document's own hash would put it on."""
    text = f"{word} " * 400 + "end" + ending
    found, texts = run(tmp_path / "out", sources(write(tmp_path / "a.txt", text)), valid_fraction=fraction)
    train, valid = texts["train"], texts["valid"]
    assert train.endswith(EOT)
    assert train.removesuffix(EOT) + valid in (text, text + EOT)
    assert abs(len(valid) / len(text) - fraction) < 0.03
    assert found["statistics"]["valid"]["documents"] == 1


def test_a_text_too_short_to_split_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"too short .* set data.valid_fraction to 0"):
        run(tmp_path / "out", sources(write(tmp_path / "a.txt", "word")))


def test_sources_without_a_document_are_a_users_mistake(tmp_path: Path) -> None:
    url = jsonl(tmp_path / "a.jsonl", "", "")
    with pytest.raises(UserError, match="no text"):
        run(tmp_path / "out", sources(url), valid_fraction=0)


def test_ingest_counts_removed_separators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = jsonl(tmp_path / "a.jsonl", *(json.dumps({"text": f"{row}{EOT}{row}"}) for row in "abcdefgh" * 5))
    for name, fraction in (("split", 0.4), ("whole", 0)):
        found, _ = run(tmp_path / name, sources(url), valid_fraction=fraction, separator_in_document="remove")
        assert found["statistics"]["train"]["separators_removed"] == 40
    assert "40 separators removed" in caplog.text


def test_bad_input_stops_ingest(tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", f"a{EOT}b{EOT}")
    bad = jsonl(tmp_path / "bad.jsonl", "{")
    for fraction in (0, 0.5):
        with pytest.raises(UserError, match="line 1: not JSON"):
            run(tmp_path / f"out-{fraction}", sources(good, bad), valid_fraction=fraction)
