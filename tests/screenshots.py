"""Makes the pictures of the README: ``python -m tests.screenshots [STEPS]`` runs the demo and photographs the UI."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page

from tests.browser import browse, look_up
from tests.deployed import PROJECT, deployed, wait_for

IMAGES = PROJECT / "docs" / "images"
LEFT = 256  # where the UI's own menu ends
WHOLE, ARTICLE = 1024, 616  # widths of what is beside it, and of an artifact without its metadata
MARGIN = 16
ROWS = {"count": ("count", 6), "merge": ("tokenizer", 6), "train": ("training", 5)}  # as far as this row of its tables


def take_pictures(steps: int) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, deployed(Path(home)) as found:
        config = {"train": {"steps": steps}}
        run_id = found.start("full", root=f"{home}/root", config=config)

        def is_over() -> bool:
            state = found.flow_run(run_id).state
            return state is not None and state.is_final()

        wait_for(is_over, 1800, "the run")
        made = look_up(found, run_id)
        with browse(found.url, scale=1.5) as ui:
            page = ui.open_run(made.run, "Artifacts")
            ui.graph()
            _save(page, "run-graph", (LEFT, 0, WHOLE, _bottom(page.get_by_role("tablist"))))
            ui.open_form(made.deployment)
            first, last = (page.get_by_text(f"{title} (Optional)") for title in ("ModelConfig", "Rope Theta"))
            _save(page, "form", (LEFT, _top(first), WHOLE, _top(last)))
            for key, (name, row) in ROWS.items():
                ui.open_artifact(made.artifacts[key])
                _save(page, name, (LEFT, _top(page.locator("h1").last), ARTICLE, _bottom(page.locator("tr").nth(row))))


def _top(found: Locator) -> float:
    box = found.bounding_box()
    assert box
    return box["y"] - MARGIN / 2


def _bottom(found: Locator) -> float:
    box = found.bounding_box()
    assert box
    return box["y"] + box["height"] + MARGIN / 2


def _save(page: Page, name: str, area: tuple[float, float, float, float]) -> None:
    """The page from left and top, so wide, to the bottom; in few colours, since the README shall be quick to load."""
    left, top, width, bottom = area
    path = IMAGES / f"{name}.png"
    png = page.screenshot(full_page=True, clip={"x": left, "y": top, "width": width, "height": bottom - top})
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"{path.relative_to(PROJECT)}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    take_pictures(int(sys.argv[1]) if sys.argv[1:] else 300)
