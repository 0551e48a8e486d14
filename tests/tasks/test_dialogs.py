"""The stage ``dialogs``: sources that change while it runs."""

import json
from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.posttrain.config import DialogsConfig
from tasks.dialogs import dialogs
from tests.helpers.corpora import write_jsonl
from tests.helpers.ingesting import sources
from tests.helpers.roots import materialize, run_context


def test_a_source_that_changed_after_hashing_raises_a_user_error(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"question {number}", "response": "answer"}) for number in range(2)]
    url = write_jsonl(tmp_path / "a.jsonl", rows[0])
    given_sources = sources(url)
    write_jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(UserError, match=r"a\.jsonl changed while the pipeline ran; run it again"):
        materialize(dialogs, run_context(tmp_path / "root"), given_sources, [], [], [], DialogsConfig(train=[url]))
    assert materialize(dialogs, run_context(tmp_path / "root"), sources(url), [], [], [], DialogsConfig(train=[url]))
