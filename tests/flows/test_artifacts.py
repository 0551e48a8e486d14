"""Publishing artifacts while Prefect's server fails."""

import httpx
import pytest

from flows.prefect_support.artifacts import ArtifactPublisher


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (httpx.ConnectError("refused"), ["x-ingest"]),
        (ValueError("this artifact is invalid"), ["x-ingest", "x-chunk", "x-count"]),
    ],
    ids=["server-gone", "refused"],
)
def test_no_more_artifacts_are_published_once_the_server_is_gone(
    error: Exception, attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def fail(markdown: str, key: str, description: str) -> None:
        keys.append(key)
        raise error

    monkeypatch.setattr("prefect.artifacts.create_markdown_artifact", fail)
    publisher = ArtifactPublisher("x")
    for name in ("ingest", "chunk", "count"):
        publisher.publish(name, "", "")
    assert keys == attempts
    ArtifactPublisher("later").publish("ingest", "", "")
    assert keys[-1] == "later-ingest", "another run in this process tries again"
