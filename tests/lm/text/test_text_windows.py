"""Text windows: the longest pretoken that they hold."""

import pytest

from lm.common.errors import UserError
from lm.kernels.bpe.pretokens import new_cursor
from lm.text import text_windows

KIB = 1024


@pytest.mark.parametrize("kib", [300, 510, 600, 1023, 1024])
def test_a_window_grows_up_to_the_maximum(monkeypatch: pytest.MonkeyPatch, kib: int) -> None:
    """The caller processes none of the text, as inside a pretoken."""
    monkeypatch.setattr(text_windows, "_MAX_WINDOW_BYTES", KIB * KIB)
    *_, (buffer, end, is_last) = text_windows.text_windows([b"x" * KIB] * kib, new_cursor(), 512)
    assert bytes(buffer[:end]) == b"x" * kib * KIB
    assert is_last


def test_a_longer_pretoken_raises_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_windows, "_MAX_WINDOW_BYTES", KIB * KIB)
    with pytest.raises(UserError, match="One pretoken is longer than"):
        list(text_windows.text_windows([b"x" * KIB] * 1025, new_cursor(), 512))
