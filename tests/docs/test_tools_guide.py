"""The Python of the guide to tools runs, with a model whose answers are scripted where it decides."""

import re
from pathlib import Path

import pytest

from tests.helpers.generating import make_model
from tests.helpers.serving import serve_app
from tests.helpers.tool_models import scripted_answers, tool_tokenizer
from textmill.server.app import build_app

GUIDE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 3}}\n</tool_call>'


def test_the_session_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="OpenAI's client is not installed")
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 4
    tokenizer = tool_tokenizer("qwen")
    names: dict[str, object] = {}
    with serve_app(build_app(make_model(tokenizer.size, 2048).eval(), tokenizer, "tiny", 2)) as url:
        for number, block in enumerate(blocks):
            code = compile(block.replace("http://127.0.0.1:8000", url), "tools.md", "exec")
            if number == 2:  # the constraint decides
                exec(code, names)
            else:
                with scripted_answers(tokenizer, CALL, "No, it is sunny."):
                    exec(code, names)
    answer, forced, *stream = capsys.readouterr().out.splitlines()
    assert answer == "No, it is sunny."
    assert re.match(r"weather \{'place': ", forced)
    assert stream[0] == "Let me see.0 weather " and stream[1:] == ['0  {"place": "Rome", "days": 3}']
