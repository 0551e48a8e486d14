"""A directory that is filled in place has its last file only when it has all others."""

from pathlib import Path

import pytest

from lm.files.atomic_dir import fill_directory


def test_the_last_file_is_moved_after_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed export then leaves no directory that looks complete."""
    moved: list[str] = []
    replace = Path.replace

    def note_and_replace(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", note_and_replace)
    names = ["a.json", "config.json", "model.safetensors"]
    with fill_directory(tmp_path, "config.json") as temporary:
        for name in names:
            (temporary / name).write_text(name)
        assert not any((tmp_path / name).exists() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert moved[-1] == "config.json"
