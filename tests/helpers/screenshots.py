"""Make the pictures of the documentation: ``python -m tests.helpers.screenshots [STEPS]`` runs the demo and takes
screenshots of Prefect's UI."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page
from prefect.events.filters import EventFilter, EventResourceFilter

from tests.helpers.browser import open_ui, read_run
from tests.helpers.deployed import deployed
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT

IMAGES = PROJECT / "docs" / "images"
LEFT = 256  # the width of the UI's menu, in pixels
PAGE_WIDTH, ARTICLE_WIDTH = 1024, 616  # the page beside the menu; an artifact without its metadata
EVENT_WIDTH = 440  # of the names of an event's resources
MARGIN = 16
ARTIFACT_ROWS = 480  # two rows of the list
LAST_ROWS = {"merge": ("tokenizer", 6), "train": ("training", 5)}  # file name, last table row


def take_pictures(steps: int) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, deployed(Path(home)) as stack:
        run_id = stack.start("full", root=f"{home}/root", config={"train": {"steps": steps}})
        wait_for(lambda: stack.is_final(run_id), 1800, "end of the run")
        info = read_run(stack, run_id)
        of_training = EventFilter(resource=EventResourceFilter.model_validate({"labels": {"textmill.stage": "train"}}))
        (event,) = wait_for(lambda: stack.client.read_events(of_training, limit=1).events, 60, "event of train")
        with open_ui(stack.url, scale=1.5) as ui:
            page = ui.open_run(info.run, "Artifacts")
            _wait_until_still(page.locator("canvas"))
            tabs = page.get_by_role("tablist")
            _save(page, "run-graph", (LEFT, 0, PAGE_WIDTH, _bottom(tabs)))
            _save(page, "artifact-list", (LEFT, _top(tabs), PAGE_WIDTH, _bottom(tabs) + ARTIFACT_ROWS))
            ui.open_event(event)
            card = page.get_by_text("Event", exact=True).last, page.get_by_text("Tags", exact=True)
            _save(page, "asset-event", (LEFT + 24, _top(card[0]), EVENT_WIDTH, _bottom(card[1])))
            ui.open_form(info.deployment)
            first, last = (page.get_by_text(f"{title} (Optional)") for title in ("ModelConfig", "Rope Theta"))
            _save(page, "form", (LEFT, _top(first), PAGE_WIDTH, _top(last)))
            for key, (name, row) in LAST_ROWS.items():
                ui.open_artifact(info.artifacts[key])
                bottom = _bottom(page.locator("tr").nth(row))
                _save(page, name, (LEFT, _top(page.locator("h1").last), ARTICLE_WIDTH, bottom))


def _wait_until_still(locator: Locator) -> None:
    """Wait for the end of an animation."""
    locator.wait_for()
    images = [b""]

    def is_still() -> bool:
        images.append(locator.screenshot())
        return images[-1] == images[-2]

    wait_for(is_still, 60, "still picture")


def _top(locator: Locator) -> float:
    box = locator.bounding_box()
    assert box
    return box["y"] - MARGIN / 2


def _bottom(locator: Locator) -> float:
    box = locator.bounding_box()
    assert box
    return box["y"] + box["height"] + MARGIN / 2


def _save(page: Page, name: str, area: tuple[float, float, float, float]) -> None:
    """Save the area (left, top, width, bottom) of a page, in few colors to keep the file small."""
    left, top, width, bottom = area
    path = IMAGES / f"{name}.png"
    png = page.screenshot(full_page=True, clip={"x": left, "y": top, "width": width, "height": bottom - top})
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"{path.relative_to(PROJECT)}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    take_pictures(int(sys.argv[1]) if sys.argv[1:] else 300)
