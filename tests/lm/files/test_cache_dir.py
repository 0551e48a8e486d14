"""The directory of the user's cache."""

from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.files.cache_dir import cache_directory


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # not in /etc/passwd
    with pytest.raises(UserError, match="set HOME or XDG_CACHE_HOME"):
        cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_directory() == Path("/cache/textmill")
