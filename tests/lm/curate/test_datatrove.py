"""The rules decide as datatrove's filters do on made-up pages, but for the differences that docs/curation.md names."""

import pytest

from benchmarks.made_up_pages import make_pages
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT

DIFFERENT_KINDS = {"empty", "Windows lines", "Chinese", "Japanese", "code", "text with code"}


@pytest.mark.slow
def test_each_rule_removes_the_documents_that_datatrove_removes() -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    pytest.importorskip("spacy", reason="spacy, which divides words for datatrove, is not installed")
    from benchmarks.curate_decisions import our_decisions
    from benchmarks.datatrove_filters import decide

    stories = [story.replace(END_OF_TEXT, "").strip() for story in demo_stories(200)]
    pages = [(kind, text) for kind, text in make_pages(stories, 250) if kind not in DIFFERENT_KINDS]
    texts = [text for _, text in pages]
    ours, theirs = our_decisions(texts), decide(texts)
    assert len(texts) > 150 and len(theirs) > 20, "most rules remove some page"
    assert {rule: sorted(places) for rule, places in ours.items() if places} == theirs
