"""A model with the chat template, exported: transformers gives the same ids and the same answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.external import load_external
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.data.chat_template import add_chat_tokens, encode_chat_prompt, make_jinja_template
from lm.inference.completion import stream_text
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.llamas import assert_same_weights, make_dialog
from tests.helpers.tokenizers import SPECIALS, make_tokenizer

DIALOGS = [
    make_dialog("Once upon a time"),
    make_dialog("Hi", "Ho  \n", "déjà 日本語 🙂", system="Be kind."),
    make_dialog("a", "b", "c", "d", " e "),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return add_chat_tokens(make_tokenizer())


def make_chat_model(tokenizer: Tokenizer, **options: Any) -> TransformerLM:
    """Return a model whose greedy answer to the first dialog has four tokens, the end token after them."""
    torch.manual_seed(3)
    config = ModelConfig(tokenizer.size, 128, d_model=40, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=56, **options)
    model = TransformerLM(config).eval()
    end = tokenizer.special_ids["<|end|>"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norm gains are 1, and some matrices 0, in a new model
        ids = encode_chat_prompt(tokenizer, DIALOGS[0])
        model.head_weight[list(tokenizer.special_ids.values())] = 0.0
        for _ in range(5):
            ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
        *answer, fifth = ids[-5:]
        assert fifth not in answer, "otherwise the answer ends earlier"
        model.head_weight[end] = 1.001 * model.head_weight[fifth]
    return model


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["Llama", "Qwen3"])
def test_transformers_gives_the_same_ids_and_answers(
    tokenizer: Tokenizer, tmp_path: Path, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    ours = make_chat_model(tokenizer, **options)
    save_hugging_face(ours, tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    end = tokenizer.special_ids["<|end|>"]
    assert theirs_tokenizer.eos_token_id == end and end in theirs.generation_config.eos_token_id
    reasons = []
    for dialog in DIALOGS:
        prompt = encode_chat_prompt(tokenizer, dialog)
        inputs = theirs_tokenizer.apply_chat_template(
            dialog, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        assert inputs["input_ids"].tolist() == [prompt]
        config = SampleConfig(temperature=0, max_new_tokens=40)
        text = "".join(stream_text(ours, tokenizer, prompt, config))
        with torch.no_grad():
            continued = theirs.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=end)
        answer = continued[0, len(prompt) :].tolist()
        assert theirs_tokenizer.decode(answer, skip_special_tokens=True) == text
        reasons.append((answer[-1] == end, len(answer)))
    assert reasons[0] == (True, 5), "the end token ends the answer"


def test_the_exported_directory_has_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_chat_model(tokenizer)
    save_hugging_face(model, tokenizer, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert content["chat_template"] == make_jinja_template(tokenizer) and content["eos_token"] == "<|end|>"
    loaded, loaded_tokenizer = load_external(tmp_path / "out")
    assert_same_weights(loaded, model)
    assert isinstance(loaded_tokenizer, Tokenizer) and loaded_tokenizer.special_ids == tokenizer.special_ids
    assert [encode_chat_prompt(loaded_tokenizer, dialog) for dialog in DIALOGS] == [
        encode_chat_prompt(tokenizer, dialog) for dialog in DIALOGS
    ]


def test_a_model_without_the_tokens_has_no_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(special_tokens=SPECIALS)
    model = TransformerLM(ModelConfig(tokenizer.size, 16, d_model=8, num_layers=1, num_heads=2, d_ff=8))
    save_hugging_face(model, tokenizer, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "chat_template" not in content and content["eos_token"] == "<|endoftext|>"
