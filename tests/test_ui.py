"""What Prefect's UI shows of a run, in a real browser."""

import io
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from flows.config import PipelineConfig, load_preset
from tests.deployed import TINY, Deployed

pytest.importorskip("playwright", reason="playwright, which drives a browser, is not installed")
from PIL import Image
from playwright.sync_api import expect

from tests.browser import SECONDS, Made, Ui, browse, find_browser, look_up

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.skipif(not find_browser(), reason="neither Chromium nor Chrome is installed")
expect.set_options(timeout=1000 * SECONDS)

TEXTS = {
    "ingest": ["documents", "separators removed"],
    "chunk": ["chunks", "smallest"],
    "count": ["different ones", "Commonest", "Longest"],
    "merge": ["token ids", "A sentence in", "Longest tokens"],
    "encode": ["bytes a token", "MB/s"],
    "train": ["bits per byte", "parameters", "Samples over time", "Configuration"],
    "sample": ["goes on", "token by token"],
    "report": ["seconds", "separators removed", "Commonest", "A sentence in", "bits per byte", "token by token"],
}
IMAGES = 'img[src^="data:"]'


@pytest.fixture(scope="module")
def made(prefect_deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of the whole chain."""
    done = prefect_deployed.run("full", root=str(tmp_path_factory.mktemp("ui")), config=TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    return look_up(prefect_deployed, prefect_deployed.latest().id)


@pytest.fixture(scope="module")
def ui(prefect_deployed: Deployed, made: Made) -> Iterator[Ui]:
    with browse(prefect_deployed.url) as opened:
        yield opened


def test_the_page_of_a_run_names_its_state_log_tasks_and_artifacts(ui: Ui, made: Made) -> None:
    page = ui.open_run(made.run)
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    expect(page.get_by_text("ingest is made")).to_be_visible()
    page.get_by_role("tab", name="Task Runs").click()
    for name in made.tasks.values():
        expect(page.get_by_text(name, exact=True).last).to_be_visible()
    assert "count chunk 3/5" in made.tasks.values()
    page.get_by_role("tab", name="Artifacts").click()
    for key in TEXTS:
        expect(page.get_by_text(key, exact=True).last).to_be_visible()


def test_the_graph_of_a_run_has_a_bar_for_each_task_that_tells_of_it(ui: Ui, made: Made) -> None:
    page = ui.open_run(made.run)
    bars = ui.graph()
    assert 7 <= len(bars) <= len(made.tasks)  # one a stage at least; bars that touch are seen as one
    ui.click_graph(max(bars, key=lambda bar: bar.right - bar.left))
    expect(page.get_by_text("Task Run ID")).to_be_visible()
    found = re.search(r"Task Run ID\s+([0-9a-f-]{36})", page.inner_text("body"))
    assert found
    expect(page.get_by_text(made.tasks[found[1]], exact=True).first).to_be_visible()


@pytest.mark.parametrize("key", TEXTS)
def test_the_page_of_an_artifact_shows_text_and_pictures(ui: Ui, made: Made, key: str) -> None:
    page = ui.open_artifact(made.artifacts[key])
    for text in TEXTS[key]:
        expect(page.get_by_text(text).first).to_be_visible()
    images = page.locator(IMAGES)
    assert images.count() >= (7 if key == "report" else 1)
    for image in images.all():
        what = image.get_attribute("alt")
        assert image.evaluate("image => image.naturalWidth") > 100, what
        colours = Image.open(io.BytesIO(image.screenshot())).convert("RGB").getcolors(1 << 24)
        assert colours and len(colours) > 3, what


@pytest.mark.parametrize("key", TEXTS)
def test_the_page_of_an_artifact_shows_no_markup(ui: Ui, made: Made, key: str) -> None:
    text = ui.open_artifact(made.artifacts[key]).inner_text("body")
    assert not [markup for markup in ("data:image", "&#", "| --- |", "**", "](") if markup in text]


@pytest.mark.parametrize("key", TEXTS)
def test_nothing_sticks_out_of_the_page_of_an_artifact(ui: Ui, made: Made, key: str) -> None:
    """Long paths and words would lie over what is beside the page."""
    wide = """heading => {
      const right = heading.getBoundingClientRect().right + 1
      return [...heading.parentElement.querySelectorAll('a, code:not(pre code), pre, img, table, p')]
        .filter(found => [...found.getClientRects()].some(box => box.right > right))
        .map(found => found.textContent || found.alt)
    }"""
    page = ui.open_artifact(made.artifacts[key])
    assert page.locator("h1").last.evaluate(wide) == []


@pytest.mark.parametrize("key", ["count-train-progress", "encode-train-progress", "merge-progress", "train-progress"])
def test_the_progress_of_finished_work_is_100_percent(ui: Ui, made: Made, key: str) -> None:
    assert made.artifacts[key].data == 100
    expect(ui.open_artifact(made.artifacts[key]).get_by_text("Progress: 100%")).to_be_visible()


def test_the_form_has_every_field_with_its_explanation_and_the_value_of_the_demo(ui: Ui, made: Made) -> None:
    shown = _read_form(ui.open_form(made.deployment))
    schema, demo = made.deployment.parameter_openapi_schema, load_preset("demo")
    assert schema
    expected: list[tuple[str, str, Any]] = []
    for section in fields(PipelineConfig):
        part = getattr(demo, section.name)
        for field in fields(part):
            doc = schema["definitions"][type(part).__name__]["properties"][field.name]["description"]
            title = field.name.replace("_", " ").title()
            expected.append((f"{title} (Optional)", doc[:30], getattr(part, field.name)))
    places, place = [], 0
    for title, doc, _ in expected:  # in order, since several sections have a seed
        here = (i for i in range(place, len(shown) - 1) if shown[i] == title and shown[i + 1].startswith(doc))
        place = next(here, -1) + 1
        assert place, f"{title}: {doc}"
        places.append(place)
    assert len(expected) > 40
    for (start, end), (title, _, value) in zip(pairwise([*places, len(shown)]), expected, strict=True):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            assert any(_is(item, text) for text in shown[start + 1 : end]), f"{title} is not {item!r}"


def _read_form(page: "Page") -> list[str]:
    """The texts and the values of the page in their order."""
    texts: list[str] = page.evaluate(
        """() => {
          const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT)
          const texts = []
          while (walker.nextNode()) {
            const node = walker.currentNode
            if (node.nodeType === Node.TEXT_NODE) texts.push(node.textContent)
            else if (node.role === 'switch') texts.push(node.ariaChecked)
            else if (node.matches('input, textarea')) texts.push(String(node.value))
          }
          return texts.map(text => text.trim()).filter(text => text)
        }"""
    )
    return texts


def _is(value: Any, text: str) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None and float(text) == value
    return bool(text == {None: "None", True: "true", False: "false"}.get(value, value))
