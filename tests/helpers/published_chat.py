"""A random model of transformers with a published chat template of its own, and transformers' answers in it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.llamas import make_dialog
from tests.helpers.tokenizers import make_tokenizer

TEMPLATE_FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
TEMPLATE = (TEMPLATE_FOLDER / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text(encoding="utf-8")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|object_ref_start|>"]
DIALOGS = [make_dialog("Once upon a time"), make_dialog("Hi", "Ho", "déjà <|im_end|> 🙂", system="Be kind.")]


def save_qwen(directory: Path) -> None:
    """Write a random Qwen2 of transformers whose ``<|im_end|>`` ends an answer and is not special."""
    transformers = pytest.importorskip("transformers", reason="makes the model")
    directory.mkdir(exist_ok=True)
    ours = make_tokenizer(special_tokens=SPECIALS)
    ours.save_tokenizer_json(directory / "tokenizer.json")
    content = json.loads((directory / "tokenizer.json").read_text())
    end_id = ours.size
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({"id": end_id, "content": "<|im_end|>", "special": False, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=end_id + 8, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=end_id,
        )
    ).eval()  # fmt: skip
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>"
    )
    theirs.chat_template = TEMPLATE
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        ids = theirs.apply_chat_template(DIALOGS[0], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        model.lm_head.weight[end_id:] = 0
        answer = model.generate(**ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -5:]
        model.lm_head.weight[end_id] = 1.001 * model.lm_head.weight[answer[-1]]  # the fifth token is the end
    model.generation_config.update(temperature=0.7, top_p=0.8, do_sample=True, eos_token_id=[end_id, 0])
    model.save_pretrained(directory)
    theirs.save_pretrained(directory)


def answer_by_transformers(directory: Path, dialog: Any) -> list[str]:
    """Return the greedy answer, and the text of its last token."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer.apply_chat_template(dialog, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=0)[0]
    new = answer[inputs["input_ids"].shape[1] :].tolist()
    return [tokenizer.decode(new, skip_special_tokens=True), tokenizer.decode(new[-1:])]
