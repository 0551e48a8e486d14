"""textmill profile: the files, the page and the summary of a small configuration."""

import json
import re
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from flows.config import PipelineConfig
from flows.profile import profile_training
from lm.common.errors import UserError
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from tasks.pages.charts import embed_image
from tasks.runtime.execution import Execution
from textmill.cli.main import main

TINY = """\
name: tiny
data: {{train: ["{corpus}"], valid_fraction: 0.1}}
chunk: {{target_bytes: 16000}}
tokenizer: {{vocab_size: 300}}
model: {{context_length: 16, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32}}
train: {{steps: 2, batch_size: 2, warmup_steps: 1}}
execution: {{max_trainings: 0, device: cpu}}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Return the options of a small configuration."""
    corpus, config = tmp_path / "corpus.txt", tmp_path / "tiny.yaml"
    corpus.write_text("".join(demo_stories(100)), encoding="utf-8")
    config.write_text(TINY.format(corpus=corpus), encoding="utf-8")
    return ["--config", str(config), "--root", str(tmp_path / "root")]


def pictures(page: str) -> int:
    return page.count(embed_image(b"\x89PNG\r\n", "image/png", "").partition("(")[2][:25])


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_command(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call runs the stages before the training; the second, with more steps than the training, nothing."""
    for number in (1, 2):
        out = tmp_path / f"out-{number}"
        assert main(["profile", *tiny, "--steps", str(number), "--out", str(out)]) == 0
        shown, log = capsys.readouterr()
        assert ("encode finished" in log) == (number == 1)
        assert {path.name for path in out.iterdir()} == {"job.json", "profile.json", "profile.md", "trace.json.gz"}
        profile = json.loads((out / "profile.json").read_text())
        assert profile["steps"] == number and profile["processes"] == 1
        for name in ("data", "forward", "backward", "communication", "optimizer", "other", "step"):
            assert re.search(rf"^  {name} +[\d,.]+ +[\d.]+ %$", shown, re.MULTILINE), name
        for name in ("weights", "gradients", "optimizer state", "activations", "peak"):
            assert re.search(rf"^  {name} +[\d,.]+ +[\d,.]+$", shown, re.MULTILINE), name
        assert re.search(rf"^page +{re.escape(str(out))}/profile\.md$", shown, re.MULTILINE)
        page = (out / "profile.md").read_text()
        assert pictures(page) == 2 and "`aten::" in page and "MFU" in page
    root = Path(tiny[-1])
    assert not (root / "train").exists(), "no model is kept"
    with get_client(sync_client=True) as client:
        of_profiles = ArtifactFilter(key=ArtifactFilterKey(like_="%-profile"))
        artifact = client.read_artifacts(artifact_filter=of_profiles, sort=ArtifactSort.CREATED_DESC)[0]
    assert pictures(str(artifact.data)) == 2


def test_mistakes_have_messages(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(demo_stories(20)), encoding="utf-8")
    config = PipelineConfig(
        data=DataConfig(train=[str(tmp_path / "corpus.txt")]), execution=Execution(max_trainings=0, device="cpu")
    )
    with pytest.raises(UserError, match=r"corpus\.txt of the profile cannot be made: File exists\."):
        profile_training(config, str(tmp_path / "root"), "profile", 1, str(tmp_path / "corpus.txt"))
    with pytest.raises(UserError, match=r"stages before train are not finished under .*root"):
        profile_training(config, str(tmp_path / "root"), "profile", 1, str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps"),
        (["--until", "encode"], "until"),
        (["--train.batch_size", "many"], r"train\.batch_size"),
    ],
)
def test_a_user_error_prints_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["profile", *arguments, "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("textmill: ") and re.search(message, error) and "Traceback" not in error
