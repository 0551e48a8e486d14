"""Models with their tokenizers from directories of all formats."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.checkpoint.external import load_any_model, load_any_tokenizer, load_external
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.training_checkpoint import save_training
from lm.common.errors import UserError
from lm.inference.completion import complete, encode_prompt
from lm.inference.config import SampleConfig
from lm.inference.llama import Llama, LlamaTokenizer
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import make_model
from tests.helpers.llamas import (
    GROUPED,
    assert_same_weights,
    meta_weights,
    removed_file,
    train_small_llama_tokenizer,
    write_meta,
)
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer

PIECES = 320  # of the small SentencePiece tokenizer


def write_hugging_face(directory: Path, vocab_size: int = 257) -> Path:
    save_hugging_face(make_model(vocab_size, 16), bytes_tokenizer([END_OF_TEXT]), directory)
    return directory


@pytest.mark.parametrize("vocab_size", [257, 320], ids=["exact", "padded"])
def test_hugging_face(tmp_path: Path, vocab_size: int) -> None:
    model, tokenizer = load_external(write_hugging_face(tmp_path / "model", vocab_size))
    assert isinstance(tokenizer, Tokenizer) and tokenizer.special_tokens == [END_OF_TEXT]
    assert (model.config.vocab_size, model.config.context_length, model.training) == (257, 16, False)
    original = make_model(vocab_size, 16)
    torch.testing.assert_close(model(torch.arange(9)[None]), original(torch.arange(9)[None])[..., :257])


@pytest.mark.parametrize("vocab_size", [PIECES, PIECES + 4], ids=["exact", "padded"])
def test_meta_with_sentencepiece(tmp_path: Path, vocab_size: int) -> None:
    params = GROUPED | {"vocab_size": vocab_size}
    write_meta(tmp_path, params, meta_weights(params))
    train_small_llama_tokenizer(tmp_path / "tokenizer.model")
    model, tokenizer = load_external(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (model.config.vocab_size, model.config.context_length, model.training) == (PIECES, 2048, False)
    config = SampleConfig(prompts=["the cat", ""], temperature=0, max_new_tokens=9)
    llama = Llama.build(tmp_path, tmp_path, 64, 2)
    ids, _ = llama.generate([llama.tokenizer.encode(prompt, True, False) for prompt in config.prompts], 9, 0)
    assert [completion.text for completion in complete(model, tokenizer, config)] == [*map(tokenizer.decode, ids)]


def test_a_warning_names_tokens_that_are_added_to_sentencepiece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = GROUPED | {"vocab_size": PIECES + 4}
    write_meta(tmp_path, params, meta_weights(params))
    train_small_llama_tokenizer(tmp_path / "tokenizer.model")
    decoder = {
        "1": {"content": "<s>"},
        str(PIECES + 1): {"content": "<|im_end|>"},
        "9" * 5000: {"content": "x"},
        "2": 5,
    }
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": PIECES, "<unk>": 0, "odd": "a"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    model, _ = load_external(tmp_path)
    assert model.config.vocab_size == PIECES
    assert "the model neither reads nor writes <pad>, <|im_end|>." in caplog.text
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    caplog.clear()
    load_external(tmp_path)
    assert not caplog.text, "padding needs no warning"


def test_a_checkpoint_of_this_project_beside_its_tokenizer(tmp_path: Path) -> None:
    original = make_model(257, 16)
    save_training(tmp_path, original, [], 1, {})
    bytes_tokenizer([END_OF_TEXT]).save_tokenizer_json(tmp_path / "tokenizer.json")
    model, tokenizer = load_external(tmp_path)
    assert_same_weights(model, original)
    assert tokenizer.size == 257


def with_tokenizer(tokenizer: Tokenizer) -> Callable[[Path], None]:
    return lambda directory: tokenizer.save_tokenizer_json(directory / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed_file("config.json"), "neither params.json .*config.json .*checkpoint.json"),
        (removed_file("tokenizer.json"), r"tokenizer\.json cannot be read"),
        (removed_file("model.safetensors"), r"model\.safetensors cannot be read"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"\0" * 99), r"model\.safetensors cannot be"),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), r"tokenizer\.json is not a JSON file"),
        (with_tokenizer(make_tokenizer()), "257 token ids, its tokenizer [0-9]+; they do not"),
    ],
)
def test_bad_directories_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    directory = write_hugging_face(tmp_path / "model")
    damage(directory)
    with pytest.raises(UserError, match=message):
        load_external(directory)


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.bfloat16), (math.inf, torch.float16)]
)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    directory = write_hugging_face(tmp_path / "model")
    weights = {name: weight.to(dtype) for name, weight in load_file(directory / "model.safetensors").items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        load_external(directory)


def test_a_weight_of_metas_files_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = meta_weights(GROUPED)
    weights["layers.2.ffn_norm.weight"][0] = math.nan
    write_meta(tmp_path, GROUPED, weights, shards=2)
    with pytest.raises(UserError, match=r"layers\.2\.ffn_norm\.weight holds numbers that are not finite"):
        load_any_model(tmp_path)


def test_params_json_beside_a_config_is_of_meta_only_with_its_weights(tmp_path: Path) -> None:
    """Mistral's repositories have both."""
    directory = write_hugging_face(tmp_path / "model")
    (directory / "params.json").write_text('{"dim": 16, "hidden_dim": 64, "sliding_window": 4096}')
    expected = load_hugging_face(directory).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in load_any_model(directory).state_dict().items())
    (directory / "consolidated.00.pth").touch()
    with pytest.raises(UserError, match=r"params\.json: .* is not supported; use Llama 1, 2 or 3"):
        load_any_model(directory)


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no checkpoint"):
        load_any_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot be read"):
        load_any_tokenizer(tmp_path / "nowhere.json")


@pytest.mark.parametrize(("name", "pattern"), [("cl100k_base", "cl100k"), ("mine", "gpt2")])
def test_ranks_have_the_pattern_of_their_name(
    tmp_path: Path, name: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    bytes_tokenizer().save_tiktoken(tmp_path / f"{name}.tiktoken")
    tokenizer: Any = load_any_tokenizer(tmp_path / f"{name}.tiktoken")
    assert tokenizer.pattern == PATTERNS[pattern]
    assert ("GPT-2's pattern is assumed" in caplog.text) == (name == "mine")


def test_ranks_in_metas_directory_are_those_of_llama_3(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PATTERNS["llama3"], special_tokens=[])
    tokenizer.save_tiktoken(tmp_path / "tokenizer.model")
    loaded: Any = load_any_tokenizer(tmp_path)
    size = 256 + len(tokenizer.merges)
    names = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{number}" for number in range(4))]
    names += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id", "reserved_special_token_5"]
    expected = {f"<|{name}|>": size + index for index, name in enumerate(names)}
    assert list(loaded.special_ids.items())[: len(expected)] == list(expected.items())
    assert loaded.special_ids["<|reserved_special_token_250|>"] == size + 255 == loaded.size - 1
    assert loaded.pattern == PATTERNS["llama3"]
    assert encode_prompt(loaded, "the <|eot_id|>") == [size, *tokenizer.encode("the <|eot_id|>")]
    llama = LlamaTokenizer.load(tmp_path)
    assert llama.encode("the <|eot_id|>", bos=True, eos=True) == [size, *tokenizer.encode("the <|eot_id|>"), size + 1]
    assert llama.decode([size, *tokenizer.encode("the thin"), size + 1]) == "the thin"


def test_a_saved_tokenizer_keeps_a_pattern_that_tokenizer_json_cannot_express(tmp_path: Path) -> None:
    Tokenizer({i: bytes([i]) for i in range(256)}, [], pattern="jieba").save(tmp_path)
    tokenizer: Any = load_any_tokenizer(tmp_path)
    assert tokenizer.pattern == "jieba"
