"""Progress artifacts follow the work, end at 100 percent, and never delay the work."""

import threading
from functools import partial
from operator import contains
from typing import Any

import pytest
from prefect import flow

from tasks.runtime import run_context
from tests.helpers.limits import wait_for

pytestmark = pytest.mark.usefixtures("prefect_server")


class Artifacts:
    """Replaces Prefect's artifacts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.created: list[str] = []
        self.percents: list[float] = []
        monkeypatch.setattr(run_context, "_UPDATE_SECONDS", 0.01)
        monkeypatch.setattr("prefect.artifacts.create_progress_artifact", self.create)
        monkeypatch.setattr("prefect.artifacts.update_progress_artifact", self.update)

    def create(self, percent: float, key: str, description: str) -> str:
        self.created.append(f"{key}: {description}")
        return key

    def update(self, artifact: str, percent: float) -> None:
        self.percents.append(percent)


def test_the_percentage_follows_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)

    @flow
    def work() -> None:
        with run_context.show_progress("sort", 4, "card", "demo") as show:
            for number in (1, 2, 3):
                show(number)
                wait_for(partial(contains, artifacts.percents, 25.0 * number), 10, "an update")
            show(4)

    work()
    wait_for(lambda: artifacts.percents == [25.0, 50.0, 75.0, 100.0], 10, "the last update")
    assert artifacts.created == ["demo-sort-progress: sort, 4 × card"]


def test_zero_units_are_100_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)

    @flow
    def work() -> None:
        with run_context.show_progress("sort", 0, "card", "demo"):
            pass

    work()
    wait_for(lambda: artifacts.percents == [100.0], 10, "the update")


def test_pages_follow_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    shown: list[str] = []
    monkeypatch.setattr(run_context, "_PAGE_SECONDS", 0)

    def create(text: str, key: str, _: str) -> str:
        shown.append(text)
        return key

    def update(_: Any, artifact: str, changed: Any) -> None:
        shown.append(f"{artifact} {changed.data}")

    monkeypatch.setattr("prefect.artifacts.create_markdown_artifact", create)
    monkeypatch.setattr("prefect.client.orchestration.SyncPrefectClient.update_artifact", update)
    texts = [""]

    def is_last(text: str) -> bool:
        return shown[-1:] == [text if text == "a" else f"demo-sort-so-far {text}"]

    @flow
    def work() -> None:
        with run_context.show_progress("sort", 2, "card", "demo", lambda: texts[-1]):
            wait_for(lambda: bool(artifacts.created), 10, "the progress artifact")
            for text in ("a", "b", "c"):
                texts.append(text)
                wait_for(partial(is_last, text), 10, "a page")

    work()
    assert shown == ["a", "demo-sort-so-far b", "demo-sort-so-far c"], "one artifact, each page once, no empty page"


def test_a_hanging_or_failing_server_does_not_delay_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    hang = threading.Event()

    def create(*arguments: Any, **options: Any) -> None:
        hang.wait(30)
        raise ConnectionError

    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", create)
    done: list[int] = []

    @flow
    def work() -> None:
        with run_context.show_progress("sort", 2, "card", "demo") as show:
            show(1)
            done.append(1)

    work()
    assert done == [1]  # the thread of the artifact still hangs
    hang.set()
    assert artifacts.percents == []


def test_without_a_run_there_is_no_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(monkeypatch)
    with run_context.show_progress("sort", 2, "card", "demo") as show:
        show(2)
    assert artifacts.created == []
