"""Filtering a text: kept and removed documents are all documents, and decisions are those of the rules."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import (
    RULES,
    FilterConfig,
    RulesConfig,
    compute_figures,
    first_failed_rule,
    mask_emails,
    mask_phone_numbers,
    pack_documents,
)
from lm.curate.document_filter import DocumentFilter
from lm.curate.document_reader import Document
from lm.curate.filtered_text import FilteredText, edges_of, filter_texts
from lm.curate.samples import MAX_SAMPLES
from lm.curate.text_parts import TextPart
from tests.helpers.corpora import EOT
from tests.lm.curate.test_rules import FAILING, GOOD

OFF_BUT_LENGTH: dict[str, Any] = {**dict.fromkeys(RULES), "min_characters": 10}
CONFIG = FilterConfig(RulesConfig(), keep_removed_text=True)
TEXTS = [GOOD, *FAILING.values(), GOOD + " More, with all of that.", "", " \n"]


def filter_documents(
    folder: Path, texts: list[str], config: FilterConfig = CONFIG
) -> tuple[str, list[dict[str, object]], FilteredText]:
    """Return the text kept, the rows of the documents removed, and the result."""
    folder.mkdir(exist_ok=True)
    data = "".join(text + EOT for text in texts).encode()
    (folder / "in.txt").write_bytes(data)
    part = TextPart(str(folder / "in.txt"), [(0, len(data))] if data else [], [], "in")
    result = filter_texts([part], EOT, config, folder)
    kept = folder / "text.txt"
    text = kept.read_bytes().decode() if kept.exists() else ""
    return text, pq.read_table(folder / "removed.parquet").to_pylist(), result


@given(st.lists(st.sampled_from(TEXTS), max_size=12), st.integers(1, 2000))
def test_kept_and_removed_documents_are_all_documents(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], batch_bytes: int
) -> None:
    with patch("lm.curate.document_reader._BATCH_BYTES", batch_bytes):
        text, rows, result = filter_documents(tmp_path_factory.mktemp("filter"), texts)
    assert CONFIG.rules
    failed = first_failed_rule(compute_figures(pack_documents(texts), CONFIG.rules), CONFIG.rules)
    assert text == "".join(text + EOT for text, place in zip(texts, failed, strict=True) if place < 0)
    expected = [(number, RULES[place], texts[number]) for number, place in enumerate(failed) if place >= 0]
    assert [(row["document"], row["reason"], row["text"]) for row in rows] == expected
    encoded = "".join(text + EOT for text in texts).encode()
    for row in rows:
        start, size = row["start"], row["bytes"]
        assert isinstance(start, int) and isinstance(size, int)
        assert encoded[start : start + size].decode() == row["text"]
    figures = result.figures
    assert (figures.read.documents, figures.kept.documents) == (len(texts), len(texts) - len(rows))
    assert figures.read.bytes == sum(len(text.encode()) for text in texts)
    removed_bytes = sum(total.bytes for total in figures.removed.values())
    assert figures.read.bytes == figures.kept.bytes + removed_bytes
    assert result.texts.kept_statistics.documents == figures.kept.documents
    assert all(counts.sum() == len(texts) for counts in figures.histograms.values())


def test_a_verdict_tells_the_value_and_the_limit_of_each_rule() -> None:
    judge = DocumentFilter(CONFIG)
    for rule, text in FAILING.items():
        document = Document(text.encode(), len(text.encode()), 0)
        verdicts = {verdict.rule: verdict for verdict in judge.explain(document)}
        assert [*verdicts] == [*judge.limits]
        assert not verdicts[rule].is_passed and verdicts[rule].limit == asdict(RulesConfig())[rule]
        first = next(verdict for verdict in verdicts.values() if not verdict.is_passed)
        decisions = judge.decide([document])
        assert judge.reasons[decisions.reasons[0]] == first.rule
        assert decisions.values[0] == first.value
    assert all(verdict.is_passed for verdict in judge.explain(Document(GOOD.encode(), len(GOOD.encode()), 0)))


def test_a_document_past_the_limit_is_removed_unread(tmp_path: Path) -> None:
    long = Document(b"x", 1 << 40, 0)
    [verdict] = DocumentFilter(CONFIG).explain(long)
    assert (verdict.rule, verdict.value, verdict.is_passed) == ("max_document_bytes", 1 << 40, False)
    decisions = DocumentFilter(CONFIG).decide([long, Document(GOOD.encode(), len(GOOD), 0)])
    assert decisions.reasons.tolist() == [0, -1]
    text, rows, _ = filter_documents(tmp_path, [GOOD, "word " * (4 << 20), GOOD])
    assert text == GOOD + EOT + GOOD + EOT
    assert [(row["reason"], row["bytes"]) for row in rows] == [("max_document_bytes", 5 * (4 << 20))]


def test_samples_are_chosen_by_hash_and_short(tmp_path: Path) -> None:
    texts = [f"Too short, number {number}. " + "é" * 400 for number in range(40)]
    orders = [texts, texts[::-1], [*texts, *texts]]
    chosen = [
        filter_documents(tmp_path / str(n), order)[2].samples["gopher_min_words"] for n, order in enumerate(orders)
    ]
    assert chosen[0] == chosen[1] == chosen[2]
    assert len(chosen[0]) == MAX_SAMPLES and [*chosen[0]] == sorted(chosen[0])
    assert all(len(sample.text) == 300 for sample in chosen[0])


def test_a_histogram_counts_values_past_its_edges_in_the_last_bins(tmp_path: Path) -> None:
    _, _, result = filter_documents(tmp_path, ["", "# " * 50])
    counts, edges = result.figures.histograms["gopher_words"], edges_of("gopher_words")
    assert counts[0] == 2 and edges[0] == 0.5
    assert result.figures.histograms["gopher_hashes"].tolist() == [1, *[0] * 38, 1]
    assert np.all(np.diff(edges) > 0)


def test_without_a_document_to_keep_there_is_no_text(tmp_path: Path) -> None:
    text, rows, result = filter_documents(tmp_path, ["short"])
    assert (text, len(rows), result.texts.kept) == ("", 1, [])
    assert not (tmp_path / "text.txt").exists()


GERMAN = "Der alte Mann ging jeden Morgen hinunter zum Hafen, um die Schiffe zu sehen, die aus dem Norden kamen. " * 3
MAILS = f"{GOOD}\nWrite to anna@example.com or call 212-555-0123."


def test_documents_of_other_languages_are_removed_after_the_rules(tmp_path: Path) -> None:
    pytest.importorskip("py3langid", reason="py3langid is not installed")
    config = FilterConfig(RulesConfig(**OFF_BUT_LENGTH), ["en", "ko"])
    korean = "고양이가 방석 위에 앉아 창밖을 바라보고 있었다. " * 3
    text, rows, result = filter_documents(tmp_path, [GOOD, GERMAN, korean, "the cat"], config)
    assert text == GOOD + EOT + korean + EOT
    shown = [(row["document"], row["reason"], row["language"]) for row in rows]
    assert shown == [(1, "languages", "de"), (3, "min_characters", None)]
    counts = {code: [total.documents for total in totals] for code, totals in result.figures.languages.items()}
    assert counts == {"en": [1, 1], "de": [1, 0], "ko": [1, 1]}
    unsure = filter_documents(tmp_path, [GOOD], FilterConfig(languages=["en"], min_language_score=1))
    assert [row["reason"] for row in unsure[1]] == ["min_language_score"]
    verdicts = DocumentFilter(config).explain(Document(GERMAN.encode(), len(GERMAN), 0))
    assert [(verdict.rule, verdict.is_passed) for verdict in verdicts[-2:]] == [
        ("languages", False),
        ("min_language_score", True),
    ]
    assert (verdicts[-2].value, verdicts[-2].limit) == ("de", "en, ko")


def test_personal_data_are_masked_in_what_is_kept_and_in_examples(tmp_path: Path) -> None:
    config = FilterConfig(RulesConfig(), masks=["email", "phone"], keep_removed_text=True)
    text, rows, result = filter_documents(tmp_path, [GOOD, MAILS, "short: bob@example.com", GOOD], config)
    masked = MAILS.replace("anna@example.com", "|||EMAIL_ADDRESS|||").replace("212-555-0123", "|||PHONE_NUMBER|||")
    assert text == "".join(part + EOT for part in (GOOD, masked, GOOD))
    assert result.figures.masked == {"email": 1, "phone": 1}
    assert [row["text"] for row in rows] == ["short: |||EMAIL_ADDRESS|||"]
    assert [sample.text for sample in result.samples["gopher_min_words"]] == ["short: |||EMAIL_ADDRESS|||"]
    assert result.figures.kept.bytes == 2 * len(GOOD) + len(MAILS), "as they were read"
    assert mask_phone_numbers(mask_emails(MAILS)[0])[0] == masked


@pytest.mark.parametrize("fields", [{"languages": ["english"]}, {"languages": ["EN"]}, {"masks": ["name"]}])
def test_a_bad_filter_is_named(fields: dict[str, list[str]]) -> None:
    with pytest.raises(UserError, match=rf"filter\.{next(iter(fields))} "):
        FilterConfig(**fields)  # type: ignore[arg-type]
