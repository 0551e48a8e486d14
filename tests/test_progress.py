"""Progress artifacts: they move while the work goes on, end at 100, and never hold it up."""

import threading
from typing import Any

import pytest
from prefect import flow

from tasks import progress
from tests.deployed import wait_for

pytestmark = pytest.mark.usefixtures("prefect_server")


class Artifacts:
    """Stands for Prefect's artifacts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[str] = []
        self.percents: list[float] = []
        monkeypatch.setattr(progress, "_INTERVAL", 0.01)
        monkeypatch.setattr(progress, "create_progress_artifact", self.create)
        monkeypatch.setattr(progress, "update_progress_artifact", self.update)

    def create(self, percent: float, key: str, description: str) -> str:
        self.created.append(f"{key}: {description}")
        return key

    def update(self, artifact: str, percent: float) -> None:
        self.percents.append(percent)


def test_it_moves_and_ends_at_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)

    @flow
    def work() -> None:
        with progress.show_progress("sort", 4, "card") as tell:
            for number in (1, 2, 3):
                tell(number)
                wait_for(lambda number=number: 25.0 * number in artifacts.percents, 10, "an update")
            tell(4)

    work()
    wait_for(lambda: artifacts.percents == [25.0, 50.0, 75.0, 100.0], 10, "the last update")
    assert artifacts.created == ["sort-progress: sort, 4 × card"]


def test_nothing_to_do_is_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)

    @flow
    def work() -> None:
        with progress.show_progress("sort", 0, "card"):
            pass

    work()
    wait_for(lambda: artifacts.percents == [100.0], 10, "the update")


def test_pages_follow_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    shown: list[str] = []
    monkeypatch.setattr(progress, "_PAGE_INTERVAL", 0)
    monkeypatch.setattr(progress, "create_markdown_artifact", lambda text, key, description: shown.append(key + text))
    texts = [""]

    @flow
    def work() -> None:
        with progress.show_progress("sort", 2, "card", lambda: texts[-1]):
            wait_for(lambda: bool(artifacts.created), 10, "the progress artifact")
            for text in ("a", "b"):
                texts.append(text)
                wait_for(lambda text=text: shown[-1:] == [f"sort-so-far{text}"], 10, "a page")

    work()
    assert shown == ["sort-so-fara", "sort-so-farb"], "each once, and none that is empty"


def test_a_server_that_hangs_or_fails_does_not_hold_the_work_up(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    hang = threading.Event()

    def create(*arguments: Any, **options: Any) -> None:
        hang.wait(30)
        raise ConnectionError

    monkeypatch.setattr(progress, "create_progress_artifact", create)
    done: list[int] = []

    @flow
    def work() -> None:
        with progress.show_progress("sort", 2, "card") as tell:
            tell(1)
            done.append(1)

    work()
    assert done == [1]  # while the thread of the artifact still hangs
    hang.set()
    assert artifacts.percents == []


def test_without_a_run_there_is_no_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    with progress.show_progress("sort", 2, "card") as tell:
        tell(2)
    assert artifacts.created == []
