"""The pages of the flow ``curate`` in Prefect's UI, in a real browser."""

import json
from pathlib import Path

import pytest

from lm.text.demo_corpus import demo_stories
from tests.helpers.deployed import Deployed

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")
from playwright.sync_api import Page, expect

from tests.end_to_end.test_ui import IMAGES, MARKUP
from tests.helpers.browser import UI_TIMEOUT_MS, find_browser, open_ui, read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not find_browser(), reason="neither Chromium nor Chrome is installed"),
]
expect.set_options(timeout=UI_TIMEOUT_MS)

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"> | **bold** "


def write_dirty_text(path: Path) -> None:
    """Write stories, a copy and a near-copy of one, and documents that rules remove: one with markup, one too long."""
    stories = [story.removesuffix("<|endoftext|>\n") for story in demo_stories(60)]
    near_copy = stories[0].replace("the", "a", 1) + " The end."
    dirty = [HOSTILE, "word " * 200, "Lorem ipsum dolor sit amet. " * 40]
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*stories, stories[0], near_copy, *dirty]),
        encoding="utf-8",
    )


def test_the_pages_show_what_each_rule_removed(prefect_deployed: Deployed, tmp_path: Path) -> None:
    write_dirty_text(tmp_path / "dirty.jsonl")
    config = {
        "data": {"train": [str(tmp_path / "dirty.jsonl")], "valid_fraction": 0},
        "filter": {"rules": {"gopher_min_alphabetic_words": 0.5}},
        "deduplicate": {"equal": True, "jaccard_threshold": 0.8},
    }
    parameters = {"root": str(tmp_path / "root"), "config": config}
    options = [word for name, value in parameters.items() for word in ("-p", f"{name}={json.dumps(value)}")]
    done = prefect_deployed.prefect("deployment", "run", "curate/full", *options, "--watch")
    assert done.returncode == 0, done.stdout + done.stderr
    info = read_run(prefect_deployed, prefect_deployed.latest().id)
    with open_ui(prefect_deployed.url) as ui:
        page = ui.open_artifact(info.artifacts["filter"])
        for text in ("What each rule removed", "gopher_min_words", "gopher_max_duplicate", "dirty.jsonl", "<script>"):
            expect(page.get_by_text(text).filter(visible=True).first).to_be_visible()
        assert page.locator(IMAGES).count() >= 2
        check_safe(page)
        page = ui.open_artifact(info.artifacts["deduplicate"])
        for text in ("equal to an earlier document", "Clusters of copies", "The largest cluster has 3 documents"):
            expect(page.get_by_text(text).filter(visible=True).first).to_be_visible()
        check_safe(page)


def check_safe(page: Page) -> None:
    """Check that a removed document is shown as its source, and that the page has no Markdown left."""
    assert page.title() != "taken" and not page.locator("img[src=x]").count()
    body = page.inner_text("body").replace(HOSTILE.strip(), "")
    assert not [markup for markup in MARKUP if markup in body]
