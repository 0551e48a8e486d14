"""Hugging Face's directories in and out: equal to transformers' own Llama, exact round trips, every mistake told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.convert import load_hugging_face, load_meta, save_hugging_face
from lm.errors import UserError
from lm.generate import Generation, generate
from lm.model import ModelConfig, TransformerLM
from lm.pretokens import END_OF_TEXT
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tests.llamas import (
    CONTEXT,
    GROUPED,
    UNGROUPED,
    llama,
    meta_weights,
    same_logits,
    same_weights,
    without,
    write_meta,
)
from tests.tokenizers_made import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "files"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_a_saved_llama_is_read(tmp_path: Path, params: dict[str, Any], tied: bool, size: str) -> None:
    theirs = llama(params, tied)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (size == "20KB")
    ours = load_hugging_face(tmp_path)
    assert (ours.config.context_length, ours.config.tied_embeddings) == (CONTEXT, tied)
    same_logits(ours, theirs)
    assert load_hugging_face(tmp_path, 9, dtype=torch.bfloat16).config.context_length == 9


def make(directory: Path, **options: Any) -> tuple[TransformerLM, Tokenizer]:
    """A model of ours, its tokenizer, and both exported to ``directory``."""
    tokenizer = make_tokenizer()
    config = ModelConfig(
        **{"vocab_size": tokenizer.size, "context_length": 64, "d_model": 40, "num_layers": 2, "num_heads": 4}
        | {"num_kv_heads": 2, "d_ff": 56, "rope_theta": 777.0, "norm_eps": 1e-4}
        | options
    )
    torch.manual_seed(3)
    model = TransformerLM(config).eval()
    save_hugging_face(model, tokenizer, directory)
    return model, tokenizer


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": None}, {"tied_embeddings": True}, {"norm_eps": 0.0, "num_kv_heads": 1}, {"vocab_size": 999}],
)
def test_round_trip_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    model, _ = make(tmp_path / "out", **options)
    back = load_hugging_face(tmp_path / "out")
    same_weights(back, model)
    assert back.config == replace(model.config, num_kv_heads=model.config.kv_heads)
    half = model.to(torch.bfloat16)
    save_hugging_face(half, make_tokenizer(), tmp_path / "half")
    same_weights(load_hugging_face(tmp_path / "half"), half)


def test_metas_weights_go_on_to_hugging_face(tmp_path: Path) -> None:
    model = load_meta(write_meta(tmp_path / "meta", GROUPED | {"vocab_size": -1}, meta_weights(GROUPED), 4), 16)
    with pytest.raises(UserError, match="tokenizer has 256 ids, the model 36"):
        save_hugging_face(model, bytes_tokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_goes_on_as_ours_does(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    ours, tokenizer = make(tmp_path / "out", tied_embeddings=tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    same_logits(load_hugging_face(tmp_path / "out"), theirs)
    text = f"Once upon a time,  there wasn't\n\n déjà 日本語 🙂 aaaa<|a b|>{END_OF_TEXT}"
    ids = tokenizer.encode(text)
    assert words(text)["input_ids"] == ids
    assert words("é!" + text)["input_ids"] == [tokenizer.special_ids["é!"], *ids]
    assert words.decode(ids) == text
    assert words.eos_token == words.bos_token == END_OF_TEXT
    prompt = tokenizer.encode("Once upon")
    stop_ids = list(tokenizer.special_ids.values())
    assert theirs.generation_config.eos_token_id == stop_ids
    continued = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    greedy = SampleConfig(temperature=0)
    whole = Generation(prompt, 50, greedy)
    first = int(continued[0, len(prompt) + 3])  # as if it were a special token, both stop there
    stopped = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, eos_token_id=first, pad_token_id=0)
    ended = Generation(prompt, 50, greedy, frozenset([first]))
    generate(ours, [whole, ended])
    assert continued[0].tolist() == prompt + whole.ids
    assert stopped[0].tolist() == [*prompt, *ended.ids, first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_takes_the_dtype_and_no_ids_of_its_own(tmp_path: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    model, _ = make(tmp_path / "with")
    tokenizer = make_tokenizer(CUSTOM_PATTERN, [])
    save_hugging_face(model.to(dtype), tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert theirs.dtype == dtype
    assert theirs.config.eos_token_id is theirs.config.bos_token_id is theirs.generation_config.eos_token_id is None
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("Once upon")["input_ids"] == tokenizer.encode("Once upon")
    assert words.eos_token is None


def test_a_directory_is_refused_unless_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    model, tokenizer = make(Path())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    (tmp_path / "file").touch()
    for name in ("out", "file"):
        with pytest.raises(UserError, match=f"{name} is there already"):
            save_hugging_face(model, tokenizer, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"], "nothing temporary stays"


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make(tmp_path / "out")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(tokenizer, "save_tokenizer_json", fail)
    with pytest.raises(OSError, match="No space"):
        save_hugging_face(model, tokenizer, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("qk_norm", True),
        ("norm", "post"),
        ("norm", "none"),
        ("feed_forward", "silu"),
        ("feed_forward", "relu2"),
        ("logit_softcap", 30.0),
        ("positions", "none"),
    ],
)
def test_what_llama_cannot_express_is_not_exported(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"model\.{option} {value!r} cannot be exported"):
        make(tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists()


def test_older_files_are_read(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta as a field, tied weights under both names, and some versions the frequencies."""
    model, _ = make(tmp_path, tied_embeddings=True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["rope_parameters"]
    for name in ("num_key_value_heads", "head_dim", "rope_scaling", "generation_config"):
        content.setdefault(name, None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    back = load_hugging_face(tmp_path)
    same_weights(back, model)
    assert back.config.rope_theta == 777.0
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load_hugging_face(tmp_path)


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text()) | changes
        content = {name: value for name, value in content.items() if value != "absent"}
        (directory / "config.json").write_text(json.dumps(content))

    return change


def changed_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return write


def indexed(index: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), r"config\.json cannot be read"),
        (
            changed_config(model_type="mistral"),
            "model_type 'mistral' is not supported; use a model whose model_type is 'llama'",
        ),
        (changed_config(model_type="absent"), "model_type 'unknown'"),
        (changed_config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (changed_config(attention_bias=True), "attention_bias True"),
        (changed_config(mlp_bias=True), "mlp_bias True"),
        (changed_config(head_dim=16), "head_dim 16 is not supported; use a model whose head_dim is 10"),
        (changed_config(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "rope_type 'llama3'"),
        (changed_config(rope_scaling={"type": "linear", "factor": 2.0}), "type 'linear'"),
        (changed_config(rope_scaling="linear"), "rope_scaling is 'linear'"),
        (changed_config(partial_rotary_factor=0.5), r"partial_rotary_factor 0\.5"),
        (changed_config(hidden_size="absent"), r"config\.json: hidden_size is missing"),
        (changed_config(num_attention_heads=None), "num_attention_heads is missing"),
        (changed_config(vocab_size=0), "vocab_size is 0; it must be a whole number of at least 1"),
        (changed_config(num_hidden_layers=2.0), r"num_hidden_layers is 2\.0"),
        (changed_config(rms_norm_eps=-1), "rms_norm_eps is -1"),
        (changed_config(tie_word_embeddings="no"), "tie_word_embeddings is 'no'; it must be true or false"),
        (changed_config(num_key_value_heads=3), r"model\.num_heads 4 must be a multiple of num_kv_heads 3"),
        (changed_config(intermediate_size=60), r"layers\.0\.mlp\.gate_proj\.weight.*\(56, 40\).*wants \(60, 40\)"),
        (changed_config(tie_word_embeddings=True), "tie_word_embeddings"),
        (without("model.safetensors"), r"model\.safetensors cannot be read.*safetensors"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"PK"), r"model\.safetensors cannot be read"),
        (changed_tensors(lambda tensors: tensors.pop(Q)), r"q_proj\.weight in 0 of 1 files"),
        (changed_tensors(lambda tensors: tensors.update(bias=torch.ones(1))), "has bias, which"),
        (changed_tensors(lambda tensors: tensors.update({"ln_final.weight": torch.ones(40)})), r"has ln_final\.weight"),
        (changed_tensors(lambda tensors: tensors.update({Q: tensors[Q].char()})), r"q_proj\.weight is torch\.int8"),
        (changed_tensors(lambda tensors: tensors.update({Q: torch.ones(3)})), r"q_proj\.weight.*\(3,\).*\(40, 40\)"),
        (indexed({"weight_map": {Q: "model-00001-of-00002.safetensors"}}), r"model-00001-of-00002\.safetensors cannot"),
        (indexed({"weight_map": {Q: "../model.safetensors"}}), r"each file must lie in"),
        (indexed({"weight_map": [Q]}), r"index\.json has no weight_map"),
        (indexed({}), r"index\.json has no weight_map"),
    ],
)
def test_a_mistake_in_hugging_faces_files_is_told(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    make(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hugging_face(tmp_path)
    assert str(tmp_path) in str(caught.value)
