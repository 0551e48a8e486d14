"""Models of the hub are found by name in the cache of its tools, wherever that is."""

from pathlib import Path

import pytest

from lm.checkpoint.hub_cache import find_in_hub_cache, hub_cache_directory, parse_hub_name
from lm.common.errors import UserError
from tests.helpers.hub import fill_hub_cache

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with ``org/name``, whose ``main`` is 0a1b2c and whose branch ``pr/1`` is ffff."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    fill_hub_cache(tmp_path / "hub", "org/name", tmp_path / "files")
    fill_hub_cache(tmp_path / "hub", "org/name", tmp_path / "files", "ffff", "pr/1")
    return tmp_path / "hub" / "models--org--name"


def find(name: str) -> Path | None:
    parsed = parse_hub_name(name)
    assert parsed is not None
    return find_in_hub_cache(parsed)


def test_a_model_is_found_by_its_name_and_revision(cache: Path) -> None:
    for name, commit in {"": "0a1b2c", "@main": "0a1b2c", "@pr/1": "ffff", "@ffff": "ffff"}.items():
        assert find(f"org/name{name}") == cache / "snapshots" / commit
    assert find("org/other") is None and find("other/name@main") is None


def test_another_revision_is_named(cache: Path) -> None:
    message = r"no revision v2 of org/name, but 0a1b2c, ffff\. Run hf download org/name --revision v2 first"
    with pytest.raises(UserError, match=message):
        find("org/name@v2")
    (cache / "refs" / "main").unlink()
    with pytest.raises(UserError, match=r"Run hf download org/name first, or name org/name@0a1b2c\."):
        find("org/name")


@pytest.mark.parametrize("commit", ["", "../../../files", "/etc", "missing", "a\nb"])
def test_a_damaged_reference_is_no_model(cache: Path, commit: str) -> None:
    (cache / "refs" / "main").write_text(commit)
    with pytest.raises(UserError, match="has no revision main of org/name"):
        find("org/name")
    (cache / "refs" / "main").write_bytes(b"\xff")
    with pytest.raises(UserError, match="The cache of the hub cannot be read"):
        find("org/name")


@pytest.mark.parametrize(
    "name", ["name", "/name", "org/", "org/..", "../name", "a/b/c", "org/name@", "org/n@../..", "org/n@a//b", "./a"]
)
def test_other_texts_are_no_names(name: str) -> None:
    assert parse_hub_name(name) is None


def test_the_cache_lies_where_the_tools_of_the_hub_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = [tmp_path / ".cache/huggingface/hub"]
    found = [hub_cache_directory()]
    for variable, value, place in (
        ("XDG_CACHE_HOME", "/x", "/x/huggingface/hub"),
        ("HF_HOME", "~/h", f"{tmp_path}/h/hub"),
        ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
        ("HF_HUB_CACHE", "$HOME/new", f"{tmp_path}/new"),
    ):
        monkeypatch.setenv(variable, value)
        expected.append(Path(place))
        found.append(hub_cache_directory())
    assert found == expected


def test_the_place_equals_that_of_huggingface_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    from huggingface_hub import constants

    assert hub_cache_directory() == Path(constants.HF_HUB_CACHE)
