"""Llama's weights in and out: equal to transformers' own Llama, exact round trips, every mistake told."""

import json
import os
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
from lm.inference import prepare
from lm.model import ModelConfig, TransformerLM
from lm.pretokens import END_OF_TEXT
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tests.tokenizers_made import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer

# Meta's params.json of models with odd shapes; the width of the feed-forward network follows from it.
UNGROUPED = {"dim": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 52, "multiple_of": 4, "norm_eps": 1e-5}
GROUPED = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 36, "norm_eps": 1e-3}
GROUPED |= {"multiple_of": 12, "ffn_dim_multiplier": 1.3, "rope_theta": 500.0}
WIDTHS = {24: 64, 48: 168}  # int(8/3 · 24) = 64; int(1.3 · 128) = 166, to a multiple of 12
CONTEXT = 256
COLUMNS, ROWS = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2")


def meta_weights(params: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Meta's names, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    dim, width = params["dim"], WIDTHS[params["dim"]]
    kv = dim // params["n_heads"] * params.get("n_kv_heads", params["n_heads"])
    shapes = {"tok_embeddings.weight": (params["vocab_size"], dim), "norm.weight": (dim,)}
    shapes["output.weight"] = (params["vocab_size"], dim)
    for number in range(params["n_layers"]):
        for name, shape in {
            "attention.wq": (dim, dim),
            "attention.wk": (kv, dim),
            "attention.wv": (kv, dim),
            "attention.wo": (dim, dim),
            "feed_forward.w1": (width, dim),
            "feed_forward.w2": (dim, width),
            "feed_forward.w3": (width, dim),
            "attention_norm": (dim,),
            "ffn_norm": (dim,),
        }.items():
            shapes[f"layers.{number}.{name}.weight"] = shape
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + t / 10 if t.ndim == 1 else t * t.shape[1] ** -0.5 for name, t in drawn.items()}


def write_meta(
    directory: Path, params: dict[str, Any], weights: dict[str, Tensor], shards: int = 1, embedding_dim: int = 1
) -> Path:
    """Write a checkpoint as Meta's model-parallel training leaves it."""
    directory.mkdir(exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    for number in range(shards):
        shard = {"rope.freqs": torch.ones(3)}
        for name, tensor in weights.items():
            matrix = name.split(".")[-2]
            dim = embedding_dim if matrix == "tok_embeddings" else 0 if matrix in COLUMNS else 1
            is_split = matrix in (*COLUMNS, *ROWS, "tok_embeddings")
            shard[name] = tensor.chunk(shards, dim)[number].clone() if is_split else tensor
        torch.save(shard, directory / f"consolidated.{number:02}.pth")
    return directory


def llama(params: dict[str, Any], tied: bool = False) -> Any:
    """transformers' Llama with the weights of ``meta_weights``, whose q and k have their rows in its order."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    heads, theta = params["n_heads"], params.get("rope_theta", 10000.0)
    config = transformers.LlamaConfig(
        vocab_size=params["vocab_size"],
        hidden_size=params["dim"],
        intermediate_size=WIDTHS[params["dim"]],
        num_hidden_layers=params["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=params.get("n_kv_heads", heads),
        max_position_embeddings=CONTEXT,
        rms_norm_eps=params["norm_eps"],
        rope_theta=theta,
        rope_parameters={"rope_type": "default", "rope_theta": theta},  # transformers 5 reads this, 4 the line above
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = {"tok_embeddings": "embed_tokens", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj"}
    names |= {"attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj"}
    names |= {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
    names |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    weights = {}
    for name, tensor in meta_weights(params).items():
        if name.endswith(("wq.weight", "wk.weight")):
            pairs = tensor.reshape(-1, params["dim"] // heads // 2, 2, params["dim"])
            tensor = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), dim=1).reshape(tensor.shape)
        for theirs, other in names.items():
            name = name.replace(f"{theirs}.weight", f"{other}.weight")
        weights["lm_head.weight" if name == "output.weight" else f"model.{name}"] = tensor
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def same_logits(ours: TransformerLM, theirs: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(theirs.config.vocab_size, (3, ours.config.context_length), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def same_weights(a: TransformerLM, b: TransformerLM) -> None:
    """Bit for bit."""
    assert a.state_dict().keys() == b.state_dict().keys()
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


# Meta's checkpoints


@pytest.mark.parametrize(("shards", "embedding_dim"), [(1, 1), (4, 1), (4, 0)])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_metas_checkpoint_is_transformers_llama(
    tmp_path: Path, params: dict[str, Any], shards: int, embedding_dim: int
) -> None:
    directory = write_meta(tmp_path / "llama", params, meta_weights(params), shards, embedding_dim)
    same_logits(load_meta(directory, CONTEXT), llama(params))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_two_hundred_tokens_are_transformers(tmp_path: Path, params: dict[str, Any], shards: int) -> None:
    """A ragged batch by the model as it generates, with a cache and joined weights; logits by their differences."""
    theirs = llama(params)
    ours = prepare(load_meta(write_meta(tmp_path / "llama", params, meta_weights(params), shards), CONTEXT))
    found = [Generation(prompt, 200, SampleConfig(temperature=0), wants_logprobs=True) for prompt in ([3, 1, 4], [15])]
    generate(ours, found)
    for one in found:
        prompt = torch.tensor([one.prompt])
        expected = theirs.generate(prompt, max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert [*one.prompt, *one.ids] == expected[0].tolist()
        with torch.no_grad():
            scores = theirs(expected).logits.log_softmax(-1)[0, len(one.prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(one.logprobs), scores.amax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("shards", "embedding_dim"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("said", [{"vocab_size": -1}, {}])
def test_the_vocabulary_is_the_embeddings(
    tmp_path: Path, said: dict[str, int], shards: int, embedding_dim: int
) -> None:
    params = {name: value for name, value in UNGROUPED.items() if name != "vocab_size"} | said
    write_meta(tmp_path, params, meta_weights(UNGROUPED), shards, embedding_dim)
    model = load_meta(tmp_path, 40)
    assert model.config.vocab_size == 52
    assert torch.equal(model.token_embeddings.weight, meta_weights(UNGROUPED)["tok_embeddings.weight"])


def test_the_model_is_whole(tmp_path: Path) -> None:
    """Its parameters train, no file of the checkpoint is needed any more, and positions are turned."""
    write_meta(tmp_path, GROUPED, meta_weights(GROUPED))
    model = load_meta(tmp_path, 7)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    other = TransformerLM(model.config)
    other.load_state_dict(model.state_dict())
    ids = torch.randint(36, (2, 7), generator=torch.Generator().manual_seed(2))
    assert torch.equal(model(ids), other(ids))
    assert model.config.context_length == 7
    assert not model.training
    model.loss(ids, ids).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_dtype_is_kept_or_chosen(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in meta_weights(UNGROUPED).items()}
    write_meta(tmp_path, UNGROUPED, weights, 2)
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = load_meta(tmp_path, 8, dtype=dtype)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {expected}
        assert torch.equal(model.lm_head.weight, weights["output.weight"].to(expected))
        assert torch.isfinite(model(torch.arange(8)[None])).all()


class Payload:
    """Unpickled without restriction this would create a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    directory = write_meta(tmp_path / "llama", UNGROUPED, meta_weights(UNGROUPED), 2)
    victim = tmp_path / "victim"
    torch.save(meta_weights(UNGROUPED) | {"extra": Payload(victim)}, directory / "consolidated.01.pth")
    with pytest.raises(UserError, match=r"consolidated\.01\.pth is damaged.*could run code") as caught:
        load_meta(directory, 8)
    assert "weights_only" not in str(caught.value)
    assert not victim.exists()
    torch.load(directory / "consolidated.01.pth", weights_only=False)
    assert victim.exists(), "the payload works where nothing guards against it"


def changed_params(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        params = UNGROUPED | changes
        (directory / "params.json").write_text(
            json.dumps({name: value for name, value in params.items() if value != "absent"})
        )

    return change


def changed_shard(number: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        path = directory / f"consolidated.{number:02}.pth"
        torch.save(change(torch.load(path, weights_only=True)), path)

    return write


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


WQ = "layers.1.attention.wq.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("params.json"), r"params\.json cannot be read"),
        (lambda directory: (directory / "params.json").write_text("{"), r"params\.json is not a JSON file"),
        (lambda directory: (directory / "params.json").write_text("[]"), r"params\.json is not a model's config"),
        (changed_params(dim="absent"), r"params\.json: dim is missing"),
        (changed_params(n_layers="2"), r"params\.json: n_layers is '2'; it must be a whole number"),
        (changed_params(n_heads=True), "n_heads is True"),
        (changed_params(n_heads=5), r"params\.json.*model\.num_heads 5"),
        (changed_params(multiple_of=0), "multiple_of is 0"),
        (changed_params(ffn_dim_multiplier=float("nan")), "ffn_dim_multiplier is nan"),
        (changed_params(norm_eps="small"), "norm_eps is 'small'; it must be a number"),
        (changed_params(use_scaled_rope=True), "use_scaled_rope True is not supported"),
        (changed_params(multiple_of=128), r"layers\.0\.feed_forward\.w1\.weight.*\(32, 24\).*wants \(128, 24\)"),
        (changed_params(n_kv_heads=2), r"layers\.0\.attention\.wk\.weight.*wants \(12, 24\)"),
        (changed_params(n_layers=3), r"has layers\.2\..* in 0 of 2 files"),
        (changed_params(n_layers=1), r"has layers\.1\..*, which no Llama of its config has"),
        (without("consolidated.00.pth"), r"has no consolidated\.00\.pth"),
        (without("consolidated.01.pth"), r"tok_embeddings\.weight.*\(52, 12\).*wants \(52, 24\)"),
        (
            changed_shard(1, lambda shard: {name: tensor for name, tensor in shard.items() if name != WQ}),
            r"wq\.weight in 1 of 2 files",
        ),
        (changed_shard(1, lambda shard: [1]), r"consolidated\.01\.pth is not one of Meta's"),
        (changed_shard(1, lambda shard: shard | {"x": 1}), r"consolidated\.01\.pth is not one of Meta's"),
        (changed_shard(1, lambda shard: shard | {"lora.weight": shard[WQ]}), r"has lora\.weight, which"),
        (changed_shard(1, lambda shard: shard | {WQ: shard[WQ].half()}), r"wq\.weight is torch\.float16"),
        (changed_shard(0, lambda shard: shard | {WQ: shard[WQ].char()}), r"wq\.weight is torch\.int8"),
        (changed_shard(1, lambda shard: shard | {WQ: shard[WQ][1:]}), r"\(12, 24\) and \(11, 24\)"),
        (changed_shard(1, lambda shard: shard | {WQ: shard[WQ].sum()}), r"\(12, 24\) and \(\)"),
        (
            changed_shard(1, lambda shard: shard | {"norm.weight": shard["norm.weight"] * 2}),
            r"norm\.weight.*equal copies",
        ),
        (lambda directory: (directory / "consolidated.01.pth").write_bytes(b"PK"), r"consolidated\.01\.pth is damaged"),
    ],
)
def test_a_mistake_in_metas_files_is_told(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    write_meta(tmp_path, UNGROUPED, meta_weights(UNGROUPED), 2)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_meta(tmp_path, 8)
    assert str(tmp_path) in str(caught.value)


def test_a_context_that_is_none_is_told(tmp_path: Path) -> None:
    write_meta(tmp_path, UNGROUPED, meta_weights(UNGROUPED))
    with pytest.raises(UserError, match=r"model\.context_length is 0"):
        load_meta(tmp_path, 0)


# Hugging Face's directories


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
