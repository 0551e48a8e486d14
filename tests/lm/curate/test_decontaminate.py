import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import ProtectedTexts, cut_spans, normalize_words, pack_documents, task_texts
from lm.curate.decontaminate import Contamination
from lm.eval.problems import Problem, Task, load_task
from lm.kernels.curation.word_hashes import BLOCK_WORDS

pieces = st.sampled_from(["a", "b", "C", "é", "日", "Σ", " ", "\n", "\u3000", ",", "—", "a b", "“", "\u0301", "x" * 70])
dense = st.sampled_from(["щи да Каша, ", "한국어", " 国語で", "豈", "ё́", "ё" * 150, " ", "—", " x", "\u3000ы"])
texts = st.lists(pieces, max_size=20).map("".join) | st.lists(dense, min_size=5, max_size=40).map("".join)
PROVERB = "A journey of a thousand miles begins with a single step, and then one more and another."


def plain_words(text: str) -> list[tuple[str, int, int]]:
    """Return (normalized word, begin, end) of each word, a character at a time."""
    words: list[tuple[str, int, int]] = []
    is_open = False
    for position, character in enumerate(text):
        normalized = normalize_words(character)
        is_own_word = " " in normalize_words(f"a{character}")
        if character.isspace():
            is_open = False
        elif normalized and (is_own_word or not is_open):
            words.append((normalized, position, position + 1))
            is_open = not is_own_word
        elif normalized:
            word, begin, _ = words.pop()
            words.append((word + normalized, begin, position + 1))
    assert [word for word, _, _ in words] == normalize_words(text).split()
    return words


def plain_spans(text: str, protected: list[list[str]], n: int) -> list[tuple[int, int, int]]:
    """Return (begin, end, source) of what a text shares with the texts of each source, in characters."""
    sources: dict[tuple[str, ...], int] = {}
    for number, texts in enumerate(protected):
        for other in texts:
            others = normalize_words(other).split()
            for i in range(len(others) - n + 1):
                sources.setdefault(tuple(others[i : i + n]), number)
    spans: list[tuple[int, int, int]] = []
    words = plain_words(text)
    for i in range(len(words) - n + 1):
        ngram = tuple(word for word, _, _ in words[i : i + n])
        if ngram not in sources:
            continue
        begin, end, source = words[i][1], words[i + n - 1][2], sources[ngram]
        if spans and begin <= spans[-1][1]:
            begin, _, source = spans.pop()
        spans.append((begin, end, source))
    return spans


def found_spans(contamination: Contamination, documents: list[str]) -> list[list[tuple[int, int, int]]]:
    """Return (begin, end, source) of the spans of each document, in characters."""
    spans: list[list[tuple[int, int, int]]] = [[] for _ in documents]
    for document, begin, end, source in zip(*(column.tolist() for column in contamination), strict=True):
        begin, end = (len(documents[document].encode()[:at].decode()) for at in (begin, end))
        spans[document].append((begin, end, source))
    return spans


@given(st.lists(texts, max_size=4), st.lists(st.lists(texts, max_size=3), max_size=3), st.integers(1, 4))
def test_spans_equal_the_plain_form(documents: list[str], protected: list[list[str]], n: int) -> None:
    batch = pack_documents(documents)
    index = ProtectedTexts(((str(number), source) for number, source in enumerate(protected)), n)
    found = index.find(batch)
    expected = [plain_spans(document, protected, n) for document in documents]
    assert found_spans(found, documents) == expected
    data, offsets = cut_spans(batch, found)
    kept = [data[begin:end].tobytes().decode() for begin, end in zip(offsets, offsets[1:], strict=False)]
    for document, text, spans in zip(documents, kept, expected, strict=True):
        for begin, end, _ in reversed(spans):
            document = document[:begin] + document[end:]
        assert text == document
    assert len(data) == offsets[-1] + 64


def test_thirteen_words_are_found_and_twelve_are_not() -> None:
    index = ProtectedTexts([("proverbs", [PROVERB, "Too short to protect."])])
    words = PROVERB.split()
    thirteen, twelve = " ".join(words[2:15]).upper(), " ".join(words[:12])
    documents = ["", f"He said:\n“{thirteen}”!", f"{twelve} other {twelve}"]
    found = index.find(pack_documents(documents))
    assert found.documents.tolist() == [1]
    assert documents[1].encode()[found.begins[0] : found.ends[0]].decode() == thirteen.rstrip(".,")
    assert (index.names, index.num_texts, index.num_short) == (["proverbs"], [2], [1])


def test_spans_cross_the_blocks_of_a_long_document() -> None:
    words = [f"w{number}" for number in range(3 * BLOCK_WORDS)]
    shared = words[BLOCK_WORDS - 20 : BLOCK_WORDS + 20]
    index = ProtectedTexts([("middle", [" ".join(shared)])])
    document = " ".join(words)
    found = index.find(pack_documents(["x", document]))
    assert document[found.begins[0] : found.ends[0]] == " ".join(shared)
    assert len(found.documents) == 1


def test_the_problems_of_a_task_are_protected() -> None:
    problem = Problem(
        "What is the sum of all the prime numbers below ten?", "17", "Two, three, five and seven make 17."
    )
    task = Task("sums", [problem, Problem("no solution", None)], "exact")
    assert [*task_texts(task)] == [f"{problem.prompt}\n{problem.solution}", "no solution\n"]
    index = ProtectedTexts([("sums", task_texts(task)), ("addition", task_texts(load_task("addition", count=5)))])
    leaked = f"Homework! {problem.prompt} {problem.solution}"
    assert index.find(pack_documents([leaked, "What is the sum of two numbers?"])).documents.tolist() == [0]
    assert (index.num_texts, index.num_short) == ([2, 5], [1, 5])


def test_nothing_is_protected_without_texts() -> None:
    assert len(ProtectedTexts([]).find(pack_documents([PROVERB])).documents) == 0


def test_impossible_ngrams_are_refused() -> None:
    with pytest.raises(UserError, match="The n-grams have 0 words; choose from 1 to 1,024"):
        ProtectedTexts([], 0)
