"""Models as they are published, of transformers' classes, in llama.cpp: the same tokens, ends and greedy continuation.

Runs as ``test_llama_cpp`` does.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lm.checkpoint.external import load_external
from lm.checkpoint.gguf.tokenizer_metadata import ENDS
from lm.checkpoint.gguf.writer import save_gguf
from lm.data.chat_template import find_template
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.llamas import assert_same_weights
from tests.helpers.published_chat import TEMPLATE
from tests.helpers.tokenizers import make_tokenizer
from tests.lm.checkpoint.gguf.test_llama_cpp import TEXT, needs_llama_cpp, run_llama_cpp
from tests.lm.checkpoint.gguf.test_writer import make_model

pytestmark = [pytest.mark.slow, needs_llama_cpp]

NUM_GREEDY = 40
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64}


class Published(NamedTuple):
    """A family of models with their tokenizer, as the files of the hub have them."""

    class_name: str
    options: dict[str, Any]
    pattern: str
    special: list[str]
    end: str
    added: tuple[str, ...] = ()
    tokenizer: dict[str, Any] = {}  # noqa: RUF012 # fields of tokenizer.json
    model: dict[str, Any] = {}  # noqa: RUF012 # of its model


FAMILIES = {
    "Qwen2.5-Instruct": Published(
        "Qwen2",
        {"tie_word_embeddings": True, "rope_theta": 1e6},
        "qwen2",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        ("<tool_call>", "</tool_call>"),
        {"normalizer": {"type": "NFC"}},
    ),
    "Qwen3": Published(
        "Qwen3",
        {"head_dim": 24, "rope_theta": 1e6},
        "qwen2",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        ("<think>", "</think>"),
        {"normalizer": {"type": "NFC"}},
    ),
    "SmolLM2-Instruct": Published(
        "Llama",
        {"tie_word_embeddings": True},
        "gpt2",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        tokenizer={"pre_tokenizer": DIGITS},
    ),
    "Llama-3.2-Instruct": Published(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": True,
            "head_dim": 64,
        },
        "llama3",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        model={"ignore_merges": True},
    ),
}


def write_published(directory: Path, family: Published) -> None:
    """Write a random model of transformers, and a small tokenizer in the form of the family's."""
    transformers = pytest.importorskip("transformers", reason="makes the model")
    ours = make_tokenizer(family.pattern, family.special)
    path = directory / "tokenizer.json"
    ours.save_tokenizer_json(path)
    content = json.loads(path.read_text(encoding="utf-8")) | family.tokenizer
    content["model"] |= family.model
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": ours.size + index, "content": text, "special": False, **flags} for index, text in enumerate(family.added)
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.end, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    torch.manual_seed(0)
    ends = [ours.special_ids[family.end], ours.special_ids[family.special[0]]]
    options = SHAPE | family.options | {"vocab_size": ours.size + len(family.added) + 5, "eos_token_id": ends}
    config = getattr(transformers, f"{family.class_name}Config")(**options)
    model = getattr(transformers, f"{family.class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def continue_by_transformers(directory: Path, prompt: list[int]) -> list[int]:
    transformers = pytest.importorskip("transformers", reason="the reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_llama_cpp_knows_some_ends_by_their_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(special_tokens=["<x>", *sorted(ENDS), "<y>"])
    save_gguf(make_model(vocab_size=tokenizer.size), tokenizer, tmp_path / "model.gguf", "float32")
    output = run_llama_cpp(tmp_path, TEXT, [1], 1, tokenizer.size)
    assert {*output.end_ids} >= {tokenizer.special_ids[text] for text in ENDS}
    assert tokenizer.special_ids["<y>"] not in output.end_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_reads_a_published_model_as_transformers_does(tmp_path: Path, name: str) -> None:
    family, directory = FAMILIES[name], tmp_path / "published"
    directory.mkdir()
    write_published(directory, family)
    model, tokenizer = load_external(directory)
    assert isinstance(tokenizer, Tokenizer)
    save_gguf(model, tokenizer, tmp_path / "model.gguf", "float32")
    text = f"{TEXT} a zebra é日1234567 ½²³\r\n\r\n x!!!\n" + "".join(family.added) + "the end" + family.end
    text = unicodedata.normalize("NFC", text)
    prompt = tokenizer.encode("The little dog")
    output = run_llama_cpp(tmp_path, text, prompt, NUM_GREEDY, tokenizer.size)
    assert output.encoded == tokenizer.encode(text, allowed_special=())
    assert output.encoded_special == tokenizer.encode(text)
    assert {tokenizer.added_ids[token] for token in family.added} <= {*output.encoded}
    assert output.generated == continue_by_transformers(directory, prompt)
    assert {*output.end_ids} >= tokenizer.stop_ids and tokenizer.special_ids[family.end] in output.end_ids

    again, its_tokenizer = load_external(tmp_path / "model.gguf")
    assert isinstance(its_tokenizer, Tokenizer)
    assert again.config == model.config
    assert_same_weights(again, model)
    expected = tokenizer.parts
    assert its_tokenizer.parts._replace(chat=None) == expected._replace(chat=None)
    template = find_template(its_tokenizer)
    assert template and template.sources == {"default": TEMPLATE} and its_tokenizer.stop_ids >= tokenizer.stop_ids
