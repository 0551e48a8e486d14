"""Import and export of Hugging Face's files: equal to transformers' Llama, exact round trips, bad files refused."""

import json
from collections.abc import Callable
from dataclasses import asdict, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.checkpoint.external import load_external
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.meta import load_meta
from lm.common.errors import UserError
from lm.inference.completion import encode_prompt
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.model.config import ModelConfig, MoEConfig
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.full_disk import full_disk
from tests.helpers.generating import make_model
from tests.helpers.llamas import (
    CONTEXT,
    GROUPED,
    UNGROUPED,
    assert_same_logits,
    assert_same_weights,
    changed_config,
    make_exported,
    make_transformers_llama,
    meta_weights,
    removed_file,
    write_meta,
)
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer


@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "files"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_files_of_transformers_are_loaded(tmp_path: Path, params: dict[str, Any], tied: bool, size: str) -> None:
    theirs = make_transformers_llama(params, tied)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (size == "20KB")
    ours = load_hugging_face(tmp_path)
    assert (ours.config.context_length, ours.config.tied_embeddings) == (CONTEXT, tied)
    assert_same_logits(ours, theirs)
    assert load_hugging_face(tmp_path, 9, dtype=torch.bfloat16).config.context_length == 9


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": None},
        {"tied_embeddings": True},
        {"norm_eps": 0.0, "num_kv_heads": 1},
        {"vocab_size": 999},
        {"qk_norm": True},
        {"qkv_bias": True},
    ],
)
def test_round_trip_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    model, _ = make_exported(tmp_path / "out", **options)
    loaded = load_hugging_face(tmp_path / "out")
    assert_same_weights(loaded, model)
    assert loaded.config == replace(model.config, num_kv_heads=model.config.kv_heads)
    half = model.to(torch.bfloat16)
    save_hugging_face(half, make_tokenizer(), tmp_path / "half")
    assert_same_weights(load_hugging_face(tmp_path / "half"), half)


def test_all_files_of_an_export_have_the_mode_of_new_files(tmp_path: Path) -> None:
    make_exported(tmp_path / "out")
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    model = load_meta(write_meta(tmp_path / "meta", GROUPED | {"vocab_size": -1}, meta_weights(GROUPED), 4), 16)
    with pytest.raises(UserError, match="tokenizer has 256 ids, the model 36"):
        save_hugging_face(model, bytes_tokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{}, {"tied_embeddings": True}, {"qk_norm": True}], ids=["untied", "tied", "QK-norm"]
)
def test_transformers_generates_the_same_ids(tmp_path: Path, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    ours, tokenizer = make_exported(tmp_path / "out", **options)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert_same_logits(load_hugging_face(tmp_path / "out"), theirs)
    text = f"Once upon a time,  there wasn't\n\n déjà 日本語 🙂 aaaa<|a b|>{END_OF_TEXT}"
    ids = tokenizer.encode(text)
    assert theirs_tokenizer(text)["input_ids"] == ids
    assert theirs_tokenizer("é!" + text)["input_ids"] == [tokenizer.special_ids["é!"], *ids]
    assert theirs_tokenizer.decode(ids) == text
    assert theirs_tokenizer.eos_token == theirs_tokenizer.bos_token == END_OF_TEXT
    prompt = tokenizer.encode("Once upon")
    stop_ids = list(tokenizer.special_ids.values())
    assert theirs.generation_config.eos_token_id == stop_ids
    continued = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    greedy = SampleConfig(temperature=0)
    whole = Generation(prompt, 50, greedy)
    first = int(continued[0, len(prompt) + 3])  # used as a stop id
    stopped = theirs.generate(torch.tensor([prompt]), max_new_tokens=50, eos_token_id=first, pad_token_id=0)
    ended = Generation(prompt, 50, greedy, frozenset([first]))
    generate(ours, [whole, ended])
    assert continued[0].tolist() == prompt + whole.ids
    assert stopped[0].tolist() == [*prompt, *ended.ids, first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_dtype_and_no_default_ids(tmp_path: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    model, _ = make_exported(tmp_path / "with")
    tokenizer = make_tokenizer(CUSTOM_PATTERN, [])
    save_hugging_face(model.to(dtype), tokenizer, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert theirs.dtype == dtype
    assert theirs.config.eos_token_id is theirs.config.bos_token_id is theirs.generation_config.eos_token_id is None
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs_tokenizer("Once upon")["input_ids"] == tokenizer.encode("Once upon")
    assert theirs_tokenizer.eos_token is None


def test_transformers_begins_a_text_with_the_begin_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    parts = make_tokenizer(CUSTOM_PATTERN, ["<|end_of_text|>", "<|begin_of_text|>"]).parts
    tokenizer = Tokenizer(*parts._replace(begin_token="<|begin_of_text|>"))
    save_hugging_face(make_model(tokenizer.size, 16), tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert theirs("Once upon")["input_ids"] == encode_prompt(tokenizer, "Once upon")
    _, loaded = load_external(tmp_path / "out")
    assert encode_prompt(loaded, "Once upon") == encode_prompt(tokenizer, "Once upon")


def test_export_refuses_an_existing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    (tmp_path / "out").chmod(0o700)
    model, tokenizer = make_exported(Path())
    assert Path.cwd().samefile(tmp_path / "out") and (tmp_path / "out").stat().st_mode & 0o777 == 0o700, "not replaced"
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == [
        *(
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ]
    (tmp_path / "file").touch()
    for name in ("out", "file"):
        with pytest.raises(UserError, match=f"{name} already exists"):
            save_hugging_face(model, tokenizer, tmp_path / name)
    with pytest.raises(UserError, match=r"out cannot be written: (Not a directory|File exists)"):
        save_hugging_face(model, tokenizer, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"], "no temporary file is left"


def test_export_to_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    """The writer of safetensors has an exception of its own."""
    model, tokenizer = make_exported(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for name in ("out", "empty"):
        with pytest.raises(UserError, match=rf"{name} cannot be written: .*File too large"), full_disk(100):
            save_hugging_face(model, tokenizer, tmp_path / name)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["empty", "other"] and not [*(tmp_path / "empty").iterdir()], "no temporary file is left"


def test_the_model_card_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its header is YAML, and its Python writes text with the exported model."""
    pytest.importorskip("transformers", reason="the card's Python needs it")
    model, tokenizer = make_exported(tmp_path / "first", qkv_bias=True)
    save_hugging_face(model, tokenizer, tmp_path / "my model", "## Results\n\n- loss 1.5\n")
    card = (tmp_path / "my model" / "README.md").read_text(encoding="utf-8")
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    parameters = sum(p.numel() for p in model.parameters())
    assert f"# my model\n\nA language model of {parameters:,} parameters, a `Qwen2ForCausalLM`" in body
    assert body.endswith("```\n\n## Results\n\n- loss 1.5\n")
    monkeypatch.chdir(tmp_path)
    exec(compile(body.partition("```python\n")[2].partition("```")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make_exported(tmp_path / "out")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(tokenizer, "save_tokenizer_json", fail)
    with pytest.raises(UserError, match="other cannot be written: No space"):
        save_hugging_face(model, tokenizer, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("norm_placement", "post"),
        ("norm_placement", "none"),
        ("feed_forward", "silu"),
        ("feed_forward", "relu2"),
        ("logit_softcap", 30.0),
        ("position_encoding", "none"),
    ],
)
def test_export_refuses_options_that_llama_lacks(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"model\.{option} {value!r} cannot be exported"):
        make_exported(tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists()


def test_export_refuses_unknown_options(tmp_path: Path) -> None:
    """A field that is added to ModelConfig later must not be ignored silently."""
    newer = make_dataclass("NewerConfig", [("window", int, field(default=0))], bases=(ModelConfig,), frozen=True)
    model, tokenizer = make_exported(tmp_path / "out")
    options = asdict(model.config)
    model.config = newer(**options, window=8)
    with pytest.raises(UserError, match=r"model\.window 8 cannot be exported: Hugging Face's Llama supports only 0"):
        save_hugging_face(model, tokenizer, tmp_path / "newer")
    assert not (tmp_path / "newer").exists()
    model.config = newer(**options)
    save_hugging_face(model, tokenizer, tmp_path / "newer")
    assert_same_weights(load_hugging_face(tmp_path / "newer"), model)


def test_export_accepts_initialization_options(tmp_path: Path) -> None:
    model, _ = make_exported(tmp_path / "out", zero_init_residual=True)
    assert_same_weights(load_hugging_face(tmp_path / "out"), model)


def test_older_files_are_loaded(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta as a field and tied weights twice; some versions also wrote inv_freq."""
    model, _ = make_exported(tmp_path, tied_embeddings=True)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["rope_parameters"]
    for name in ("num_key_value_heads", "head_dim", "rope_scaling", "generation_config"):
        content.setdefault(name, None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_hugging_face(tmp_path)
    assert_same_weights(loaded, model)
    assert loaded.config.rope_theta == 777.0
    tensors["lm_head.weight"][0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load_hugging_face(tmp_path)


def changed_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return write


def with_index(index: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed_file("config.json"), r"config\.json cannot be read"),
        (
            changed_config(model_type="gemma"),
            "model_type 'gemma' is not supported; use a llama or a mistral or a qwen2 or a qwen3",
        ),
        (changed_config(model_type="absent"), "model_type None is not supported"),
        (changed_config(model_type=["llama"]), r"model_type \['llama'\] is not supported"),
        (changed_config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (changed_config(attention_bias=True), "attention_bias True"),
        (changed_config(mlp_bias=True), "mlp_bias True"),
        (changed_config(head_dim=15), "model.head_dim 15, must be an even whole number"),
        (changed_config(head_dim="16"), "head_dim is '16'; it must be a whole number"),
        (changed_config(rope_parameters={"rope_type": "proportional"}), "rope_type 'proportional'"),
        (changed_config(rope_parameters="absent", rope_scaling={"type": "ntk"}), "type 'ntk'"),
        (changed_config(rope_parameters={"rope_type": "linear"}), "factor is missing; rope_type 'linear' needs it"),
        (
            changed_config(rope_parameters={"rope_type": "llama3", "factor": 8.0}),
            "low_freq_factor is missing; rope_type 'llama3' needs it",
        ),
        (changed_config(rope_parameters={"rope_type": "linear", "factor": "2"}), "factor is '2'"),
        (changed_config(model_type="qwen2", use_sliding_window=True), "use_sliding_window True is not supported"),
        (
            changed_config(model_type="qwen2"),
            r"has no .*self_attn\.q_proj\.bias; use all files of one model, with its own config",
        ),
        (changed_config(rope_scaling="linear"), "rope_scaling is 'linear'"),
        (changed_config(partial_rotary_factor=0.5), r"partial_rotary_factor 0\.5"),
        (changed_config(hidden_size="absent"), r"config\.json: hidden_size is missing"),
        (changed_config(num_attention_heads=None), "num_attention_heads is missing"),
        (changed_config(vocab_size=0), "vocab_size is 0; it must be a whole number of at least 1"),
        (changed_config(num_hidden_layers=2.0), r"num_hidden_layers is 2\.0"),
        (changed_config(rms_norm_eps=-1), "rms_norm_eps is -1"),
        (changed_config(tie_word_embeddings="no"), "tie_word_embeddings is 'no'; it must be true or false"),
        (changed_config(num_key_value_heads=3), r"model\.num_heads 4 must be a multiple of num_kv_heads 3"),
        (changed_config(intermediate_size=60), r"layers\.0\.mlp\.gate_proj\.weight.*\(56, 40\).*requires \(60, 40\)"),
        (changed_config(tie_word_embeddings=True), "tie_word_embeddings"),
        (removed_file("model.safetensors"), r"model\.safetensors cannot be read.*safetensors"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"PK"), r"model\.safetensors cannot be read"),
        (changed_tensors(lambda tensors: tensors.pop(Q)), r"has no .*q_proj\.weight; use all files"),
        (changed_tensors(lambda tensors: tensors.update(bias=torch.ones(1))), "has bias, which"),
        (changed_tensors(lambda tensors: tensors.update({"ln_final.weight": torch.ones(40)})), r"has ln_final\.weight"),
        (changed_tensors(lambda tensors: tensors.update({Q: tensors[Q].char()})), r"q_proj\.weight is torch\.int8"),
        (changed_tensors(lambda tensors: tensors.update({Q: torch.ones(3)})), r"q_proj\.weight.*\(3,\).*\(40, 40\)"),
        (
            with_index({"weight_map": {Q: "model-00001-of-00002.safetensors"}}),
            r"model-00001-of-00002\.safetensors cannot",
        ),
        (with_index({"weight_map": {Q: "../model.safetensors"}}), r"each file must lie in"),
        (with_index({"weight_map": [Q]}), r"index\.json has no weight_map"),
        (with_index({}), r"index\.json has no weight_map"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    make_exported(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hugging_face(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("other", [{"qk_norm": True}, {"moe": MoEConfig(num_experts=2)}], ids=["QK-norm", "experts"])
def test_biases_that_no_architecture_has_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"model\.qkv_bias cannot be exported with model\.{next(iter(other))}"):
        make_exported(tmp_path / "out", qkv_bias=True, **other)
