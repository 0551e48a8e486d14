"""The artifacts and logs of a run in Prefect's UI, in a real browser."""

import io
from collections.abc import Iterator

import pytest
from prefect.client.schemas.objects import FlowRun

from tests.helpers.deployed import Deployed

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")
from PIL import Image
from playwright.sync_api import expect

from tests.helpers.browser import UI_TIMEOUT_MS, RunInfo, Ui, find_browser, open_ui, read_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not find_browser(), reason="neither Chromium nor Chrome is installed"),
]
expect.set_options(timeout=UI_TIMEOUT_MS)

TEXTS = {
    "ingest": ["documents", "separators removed"],
    "chunk": ["chunks", "smallest"],
    "count": ["different ones", "Most common", "Longest"],
    "merge": ["token ids", "A sentence in", "Longest tokens"],
    "encode": ["bytes per token", "MB/s"],
    "train": ["bits per byte", "parameters", "Samples over time", "Configuration"],
    "sample": ["Prompt:", "Tokens of the first sample"],
    "report": ["seconds", "made by", "pretokens", "vocab size", "valid bits per byte"],
}
IMAGES = 'img[src^="data:"]'
MARKUP = ("data:image", "&#", "| --- |", "**", "](")


@pytest.fixture(scope="module")
def run_info(prefect_deployed: Deployed, deployed_run: FlowRun) -> RunInfo:
    """A run of the whole pipeline."""
    return read_run(prefect_deployed, deployed_run.id)


@pytest.fixture(scope="module")
def ui(prefect_deployed: Deployed, run_info: RunInfo) -> Iterator[Ui]:
    with open_ui(prefect_deployed.url) as opened:
        yield opened


def test_the_page_of_a_run_shows_its_state_and_log(ui: Ui, run_info: RunInfo) -> None:
    page = ui.open_run(run_info.run)
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    expect(page.get_by_text("ingest finished in")).to_be_visible()
    assert "count 3/5" in run_info.tasks.values()


@pytest.mark.parametrize("key", TEXTS)
def test_an_artifact_shows_text_and_images(ui: Ui, run_info: RunInfo, key: str) -> None:
    page = ui.open_artifact(run_info.artifacts[key])
    for text in TEXTS[key]:
        expect(page.get_by_text(text).first).to_be_visible()
    images = page.locator(IMAGES)
    assert images.count() >= (0 if key == "report" else 1)
    for image in images.all():
        title = image.get_attribute("alt")
        assert image.evaluate("image => image.naturalWidth") > 100, title
        colors = Image.open(io.BytesIO(image.screenshot())).convert("RGB").getcolors(1 << 24)
        assert colors and len(colors) > 3, title
    body = page.inner_text("body")
    assert not [markup for markup in MARKUP if markup in body]


@pytest.mark.parametrize("key", ["count-progress", "encode-train-progress", "merge-progress", "train-progress"])
def test_the_progress_of_finished_work_is_100_percent(ui: Ui, run_info: RunInfo, key: str) -> None:
    assert run_info.artifacts[key].data == 100
    expect(ui.open_artifact(run_info.artifacts[key]).get_by_text("Progress: 100%")).to_be_visible()
