"""Small Llamas as Meta's checkpoints and as transformers' models, a SentencePiece tokenizer, and dialogs."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import make_tokenizer

# params.json without and with grouped-query attention.
UNGROUPED = {"dim": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 52, "multiple_of": 4, "norm_eps": 1e-5}
GROUPED = {"dim": 48, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 36, "norm_eps": 1e-3}
GROUPED |= {"multiple_of": 12, "ffn_dim_multiplier": 1.3, "rope_theta": 500.0}
FEED_FORWARD_WIDTHS = {24: 64, 48: 168}  # int(8/3 · 24) = 64; int(1.3 · 128) = 166, to a multiple of 12
CONTEXT = 256
COLUMN_PARALLEL, ROW_PARALLEL = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2")


def meta_weights(params: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights under Meta's names, with norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    dim, width = params["dim"], FEED_FORWARD_WIDTHS[params["dim"]]
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
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + t / 10 if t.ndim == 1 else t * t.shape[1] ** -0.5 for name, t in tensors.items()}


def write_meta(
    directory: Path, params: dict[str, Any], weights: dict[str, Tensor], shards: int = 1, embedding_dim: int = 1
) -> Path:
    """Write a checkpoint in ``shards`` files, split as in Meta's model-parallel training."""
    directory.mkdir(exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    for number in range(shards):
        shard = {"rope.freqs": torch.ones(3)}
        for name, tensor in weights.items():
            matrix = name.split(".")[-2]
            dim = embedding_dim if matrix == "tok_embeddings" else 0 if matrix in COLUMN_PARALLEL else 1
            is_split = matrix in (*COLUMN_PARALLEL, *ROW_PARALLEL, "tok_embeddings")
            shard[name] = tensor.chunk(shards, dim)[number].clone() if is_split else tensor
        torch.save(shard, directory / f"consolidated.{number:02}.pth")
    return directory


def make_transformers_llama(params: dict[str, Any], tied: bool = False) -> Any:
    """Return transformers' Llama with the weights of ``meta_weights``."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    heads, theta = params["n_heads"], params.get("rope_theta", 10000.0)
    config = transformers.LlamaConfig(
        vocab_size=params["vocab_size"],
        hidden_size=params["dim"],
        intermediate_size=FEED_FORWARD_WIDTHS[params["dim"]],
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


def assert_same_logits(ours: TransformerLM, theirs: Any) -> None:
    """Check that a model and one of transformers compute the same logits, to 1e-4 of the largest."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(theirs.config.vocab_size, (3, ours.config.context_length), generator=generator)
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def assert_same_weights(a: TransformerLM, b: TransformerLM) -> None:
    """Check that all weights are equal bit for bit."""
    assert a.state_dict().keys() == b.state_dict().keys()
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


def make_exported(directory: Path, **options: Any) -> tuple[TransformerLM, Tokenizer]:
    """Return a model and its tokenizer, exported to ``directory``."""
    tokenizer = make_tokenizer()
    config = ModelConfig(
        **{"vocab_size": tokenizer.size, "context_length": 64, "d_model": 40, "num_layers": 2, "num_heads": 4}
        | {"num_kv_heads": 2, "d_ff": 56, "rope_theta": 777.0, "norm_eps": 1e-4}
        | options
    )
    torch.manual_seed(3)
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norm gains are 1, and some matrices 0, in a new model
    save_hugging_face(model, tokenizer, directory)
    return model, tokenizer


def removed_file(name: str) -> Callable[[Path], None]:
    """Return a function that deletes a file of a directory."""
    return lambda directory: (directory / name).unlink()


def changed_config(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes fields of a directory's ``config.json``."""

    def change(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text()) | changes
        content = {name: value for name, value in content.items() if value != "absent"}
        (directory / "config.json").write_text(json.dumps(content))

    return change


def train_sentencepiece(path: Path, sentences: list[str], vocab_size: int, **options: Any) -> Path:
    """Train a SentencePiece model like Llama 2's, write it to ``path``, and return ``path``."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="trains the tokenizer")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


def make_dialog(*contents: str, system: str | None = None) -> list[Any]:
    """Return a dialog of alternating user and assistant messages, after an optional system message."""
    dialog = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return dialog if system is None else [{"role": "system", "content": system}, *dialog]


def train_small_llama_tokenizer(path: Path) -> Path:
    """Train a SentencePiece model of 320 pieces with the options of Llama 2's tokenizer."""
    sentences = ["the cat sat on the mat and the hat", "hello world  two spaces", "[INST] <<SYS>> /"] * 9
    return train_sentencepiece(
        path,
        sentences,
        320,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
    )
