"""Text without what it shares with protected text: each document is decided by itself, and the others stay whole."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from lm.curate import ProtectedTexts, cut_spans, pack_documents
from lm.curate.decontaminated_text import DecontaminatedText, decontaminate_texts
from lm.curate.text_parts import TextPart

PROTECTED = ProtectedTexts(
    [("first", ["one two three four"]), ("second", ["five six seven", "three four five"])], ngrams=3
)
TEXTS = [
    "x One, two THREE y",
    "two three four five six seven",
    "nothing here",
    "",
    "three four",
    "one two three, five six seven!",
]


def decontaminate(texts: list[str], is_cut: bool, folder: Path) -> tuple[list[str], DecontaminatedText]:
    data = "".join(text + "|" for text in texts).encode()
    (folder / "in.txt").write_bytes(data)
    part = TextPart(str(folder / "in.txt"), [(0, len(data))] if data else [], [], "in")
    result = decontaminate_texts([part], "|", PROTECTED, is_cut, folder)
    path = folder / "text.txt"
    return path.read_bytes().decode().split("|")[:-1] if path.exists() else [], result


@given(st.lists(st.sampled_from(TEXTS), max_size=8))
def test_documents_are_decided_as_by_themselves(texts: list[str]) -> None:
    found = {text: PROTECTED.find(pack_documents([text])) for text in texts}
    with TemporaryDirectory() as name:
        kept, result = decontaminate(texts, False, Path(name))
        rows = pq.read_table(Path(name) / "shared.parquet").to_pylist()
        cut, _ = decontaminate(texts, True, Path(name))
    assert kept == [text for text in texts if not len(found[text].documents)]
    expected = [PROTECTED.names[source] for text in texts for source in found[text].sources]
    assert [row["protected"] for row in rows] == expected
    assert result.figures.protected == {name: expected.count(name) for name in dict.fromkeys(expected)}
    assert result.figures.read.documents - result.figures.shared.documents == len(kept)
    batches = [cut_spans(pack_documents([text]), found[text]) for text in texts]
    assert cut == [batch.data[: batch.offsets[1]].tobytes().decode() for batch in batches]


def test_a_document_past_the_limit_stays(tmp_path: Path) -> None:
    long = "one two three " * (3 << 19)
    kept, result = decontaminate([long, TEXTS[0]], False, tmp_path)
    assert kept == [long] and result.figures.shared.documents == 1
    assert [(sample.protected, sample.text) for sample in result.samples] == [("first", "One, two THREE")]
