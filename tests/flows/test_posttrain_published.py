"""Post-training of an imported model in its own chat template, from the data to an export that transformers reads."""

import json
from pathlib import Path

import pytest

from flows.posttrain import PosttrainConfig, posttrain
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.inference.chat_format import respond
from lm.inference.config import SampleConfig
from lm.posttrain.config import ComparisonConfig, DialogsConfig, DPOConfig, GRPOConfig
from lm.tokenizer.tokenizer import Tokenizer
from tasks.runs.models import resolve_model
from tasks.runtime.execution import Execution
from tests.helpers.posttraining import PAIRS, quick_config
from tests.helpers.published_chat import DIALOGS, answer_by_transformers, save_qwen

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.slow
def test_an_imported_model_is_trained_and_exported_in_its_template(tmp_path: Path) -> None:
    save_qwen(tmp_path / "qwen")
    rows = [{"prompt": p.prompt[0]["content"], "chosen": p.chosen, "rejected": p.rejected} for p in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = quick_config(steps=3, sample_prompts=["1 + 1 ="])
    config = PosttrainConfig(
        base=str(tmp_path / "qwen"),
        methods=["sft", "preference", "reinforce"],
        dialogs=DialogsConfig(
            train=[str(tmp_path / "pairs.jsonl")], task="addition:1-1", train_problems=40, test_problems=4
        ),
        sft=train,
        preference=DPOConfig(train=train),
        reinforce=GRPOConfig(train=train, group_size=2, max_new_tokens=3),
        evaluate=ComparisonConfig(prompts=["Hello"], max_new_tokens=3),
        execution=Execution(compile=False, device="cpu"),
    )
    posttrain(config, str(tmp_path / "root"))
    model, tokenizer = resolve_model("", str(tmp_path / "root")).load("cpu")
    assert isinstance(tokenizer, Tokenizer) and tokenizer.chat and "<|assistant|>" not in tokenizer.special_ids
    save_hugging_face(model, tokenizer, tmp_path / "out")
    answers = respond(model, tokenizer, [*enumerate(DIALOGS[:1])], SampleConfig(temperature=0, max_new_tokens=30))
    assert next(answers).text == answer_by_transformers(tmp_path / "out", DIALOGS[0])[0]
