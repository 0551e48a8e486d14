"""The Python in docs/course.md runs and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

COURSE = Path(__file__).parents[2] / "docs" / "course.md"


def test_each_block_prints_the_output_below_it() -> None:
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", COURSE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 10
    names: dict[str, Any] = {}
    for code, expected in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, str(COURSE), "exec"), names)
        assert output.getvalue() == expected
