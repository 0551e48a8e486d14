"""Export to GGUF: every tensor equals the model's, the tokenizer is complete, unsupported options are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.checkpoint.gguf.writer import GGUFType, save_gguf
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, add_chat_tokens, make_jinja_template
from lm.model.config import ModelConfig, MoEConfig, Multipliers, RopeScaling
from lm.model.transformer import TransformerLM
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.formats.vocab_merges import unicode_to_bytes
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.full_disk import full_disk
from tests.helpers.tokenizers import CUSTOM_PATTERN, bytes_tokenizer, make_tokenizer

gguf = pytest.importorskip("gguf")
TOKENIZER = make_tokenizer(special_tokens=[END_OF_TEXT, "<|a b|>"])
HF_NAMES = {  # of a block: GGUF's → Hugging Face's
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_up": "mlp.up_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
HF_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def with_added_token(token: AddedToken) -> Tokenizer:
    return Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END_OF_TEXT], added_tokens=[token])


def make_model(seed: int = 0, **options: Any) -> TransformerLM:
    sizes = {"vocab_size": TOKENIZER.size, "context_length": 64, "d_model": 64, "num_layers": 2, "num_heads": 4}
    config = ModelConfig(**sizes | {"num_kv_heads": 2, "d_ff": 96, "rope_theta": 777.0, "norm_eps": 1e-4} | options)
    torch.manual_seed(seed)
    model = TransformerLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # gains are 1 in a new model
    return model


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file as float32, read and dequantized by the library."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        tensors[tensor.name] = torch.from_numpy(values.reshape([int(size) for size in reversed(tensor.shape)]))
    return tensors


def read_fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def expected_tensors(model: TransformerLM, directory: Path) -> dict[str, torch.Tensor]:
    """Return GGUF's tensors by a longer way: qwen2 and qwen3 as the files for transformers, llama as our model."""
    from safetensors.torch import load_file

    save_hugging_face(model, TOKENIZER, directory)
    theirs = load_file(directory / "model.safetensors")
    names = {f"{theirs_name}.weight": f"{name}.weight" for name, theirs_name in HF_TOP_NAMES.items()}
    for layer in range(model.config.num_layers):
        for name, theirs_name in HF_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"model.layers.{layer}.{theirs_name}.{kind}"] = f"blk.{layer}.{name}.{kind}"
    tensors = {names[name]: tensor.float() for name, tensor in theirs.items()}
    if not (model.config.qk_norm or model.config.qkv_bias):
        for layer, block in enumerate(model.layers):
            for name, values in block.get_submodule("attn").named_parameters():
                if name[0] in "qk":
                    tensors[f"blk.{layer}.attn_{name[0]}.{name.rpartition('.')[2]}"] = values.detach().float()
    return tensors


@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "head_dim": 24},
        {"tied_embeddings": True, "qkv_bias": True},
        {"num_kv_heads": None, "vocab_size": 999},
    ],
)
def test_every_tensor_is_read_back(tmp_path: Path, options: dict[str, Any], weight_type: GGUFType) -> None:
    model = make_model(**options)
    save_gguf(model, TOKENIZER, tmp_path / "new" / "model.gguf", weight_type)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.gguf"]
    tensors, expected = read_tensors(tmp_path / "new" / "model.gguf"), expected_tensors(model, tmp_path / "hf")
    assert tensors.keys() == expected.keys()
    assert ("output.weight" in tensors) == (not model.config.tied_embeddings)
    for name, tensor in tensors.items():
        exact = expected[name]
        if weight_type == "float32" or exact.ndim == 1:
            assert tensor.equal(exact)
        elif weight_type == "bfloat16":
            assert tensor.equal(exact.bfloat16().float())
        else:  # half a step of int8, and the rounding of the scale to float16
            largest = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            error = (tensor - exact).unflatten(-1, (-1, 32)).abs()
            assert bool((error <= largest * (0.5 / 127 + 2**-11) + 1e-7).all())


def test_bfloat16_weights_are_kept(tmp_path: Path) -> None:
    model = make_model(qk_norm=True).to(torch.bfloat16)
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf")
    tensors = read_tensors(tmp_path / "model.gguf")
    for name, tensor in expected_tensors(model, tmp_path / "hf").items():
        assert tensors[name].equal(tensor)


def test_scaled_rotary_positions(tmp_path: Path) -> None:
    linear = make_model(rope_scaling=RopeScaling(kind="linear", factor=4.0))
    save_gguf(linear, TOKENIZER, tmp_path / "linear.gguf")
    content = read_fields(tmp_path / "linear.gguf")
    assert (content["llama.rope.scaling.type"], content["llama.rope.scaling.factor"]) == ("linear", 4.0)
    scaling = RopeScaling(factor=8.0, original_context_length=128)
    save_gguf(make_model(rope_scaling=scaling, head_dim=32), TOKENIZER, tmp_path / "llama3.gguf")
    divisors = read_tensors(tmp_path / "llama3.gguf")["rope_freqs.weight"]
    assert divisors.shape == (16,)
    assert divisors[[0, -1]].tolist() == [1, 8], "high frequencies are kept, low ones divided"
    assert len(set(divisors.tolist())) > 2


@pytest.mark.parametrize(
    ("pattern", "pre"),
    [("gpt2", "gpt-2"), ("llama3", "smaug-bpe"), ("qwen2", "qwen2"), ("deepseek", "deepseek-v3")],
)
def test_metadata_describe_model_and_tokenizer(tmp_path: Path, pattern: str, pre: str) -> None:
    tokenizer = add_chat_tokens(make_tokenizer(pattern, [END_OF_TEXT]))
    model = make_model(vocab_size=tokenizer.size + 3)
    save_gguf(model, tokenizer, tmp_path / "model.gguf")
    content = read_fields(tmp_path / "model.gguf")
    assert content["general.architecture"] == "llama"
    assert content["llama.context_length"] == 64
    assert content["llama.rope.freq_base"] == 777.0
    assert (content["llama.attention.head_count"], content["llama.attention.head_count_kv"]) == (4, 2)
    assert content["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    assert content["tokenizer.ggml.pre"] == pre
    assert content["tokenizer.chat_template"] == make_jinja_template(tokenizer)
    assert content["tokenizer.ggml.eos_token_id"] == tokenizer.special_ids[END_TOKEN]
    assert content["tokenizer.ggml.bos_token_id"] == tokenizer.special_ids[END_OF_TEXT]
    assert not content["tokenizer.ggml.add_bos_token"]
    types, texts = content["tokenizer.ggml.token_type"], content["tokenizer.ggml.tokens"]
    assert len(texts) == tokenizer.size + 3 == len(set(texts))
    specials = {i: token.encode() for token, i in tokenizer.special_ids.items()}
    vocab = {i: specials[i] if types[i] == 3 else unicode_to_bytes(texts[i]) for i in range(tokenizer.size)}
    assert vocab == tokenizer.vocab
    assert types[tokenizer.size :] == [5] * 3
    merges = [tuple(unicode_to_bytes(part) for part in merge.split(" ")) for merge in content["tokenizer.ggml.merges"]]
    assert merges == tokenizer.merges


def test_a_prompt_begins_with_the_begin_token(tmp_path: Path) -> None:
    parts = make_tokenizer("llama3", ["<|end_of_text|>", "<|begin_of_text|>"]).parts
    tokenizer = Tokenizer(*parts._replace(begin_token="<|begin_of_text|>"))
    save_gguf(make_model(vocab_size=tokenizer.size), tokenizer, tmp_path / "model.gguf")
    content = read_fields(tmp_path / "model.gguf")
    assert content["tokenizer.ggml.add_bos_token"]
    ids = [content[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos")]
    assert ids == [tokenizer.special_ids[token] for token in ("<|begin_of_text|>", "<|end_of_text|>")]
    chat = add_chat_tokens(tokenizer)
    save_gguf(make_model(vocab_size=chat.size), chat, tmp_path / "chat.gguf")
    assert not read_fields(tmp_path / "chat.gguf")["tokenizer.ggml.add_bos_token"], "dialogs do not begin with it"


@pytest.mark.parametrize(
    ("options", "weight_type", "message"),
    [
        ({"logit_softcap": 30.0}, "float32", "model.logit_softcap 30.0 cannot be exported: llama.cpp"),
        ({"norm_placement": "post"}, "float32", "model.norm_placement 'post' .* supports only 'pre'"),
        ({"norm_placement": "none"}, "bfloat16", "model.norm_placement 'none' .* supports only 'pre'"),
        ({"position_encoding": "none"}, "q8_0", "model.position_encoding 'none' .* supports only 'rope'"),
        ({"feed_forward": "relu2"}, "float32", "model.feed_forward 'relu2' .* supports only 'swiglu'"),
        ({"moe": MoEConfig()}, "float32", r"experts \(model.moe\) cannot be exported to GGUF.*without --gguf"),
        ({"vocab_size": 300}, "float32", "do not belong together"),
        ({"d_model": 72}, "q8_0", "model.d_model 72 is not a multiple of 32"),
        ({"d_ff": 100}, "q8_0", "model.d_ff 100 is not a multiple of 32"),
        ({"head_dim": 10}, "q8_0", "model.head_dim · num_heads 40 is not a multiple of 32"),
        ({"head_dim": 10, "qkv_bias": True}, "float32", "model.qkv_bias and model.head_dim cannot be exported"),
        ({"qk_norm": True, "qkv_bias": True}, "float32", "model.qk_norm and model.qkv_bias cannot be exported"),
        (
            {"qk_norm": True, "rope_scaling": RopeScaling()},
            "float32",
            "model.qk_norm and model.rope_scaling llama3 cannot be exported",
        ),
        ({"rope_scaling": RopeScaling("yarn")}, "float32", "model.rope_scaling yarn cannot be exported"),
        *(
            (options, "float32", rf"model\.{next(iter(options))} .* cannot be exported: llama\.cpp supports only")
            for options in (
                {"rotary_fraction": 0.5},
                {"sliding_window": 8},
                {"global_interval": 2, "global_rope": False},
                {"qk_norm_per_head": False, "qk_norm": True},
                {"zero_centered_norm": True},
                {"attention_softcap": 5.0},
                {"multipliers": Multipliers(2.0)},
                {"feed_forward": "geglu"},
                {"norm_placement": "sandwich"},
            )
        ),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, options: dict[str, Any], weight_type: GGUFType, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        save_gguf(make_model(**options), TOKENIZER, tmp_path / "model.gguf", weight_type)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (make_tokenizer(CUSTOM_PATTERN, [END_OF_TEXT], 9), "tokenizer.pattern .* cannot be exported"),
        (make_tokenizer(PATTERNS["cl100k"], [END_OF_TEXT], 9), "tokenizer.pattern 'cl100k' cannot be exported"),
        (Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END_OF_TEXT], ignore_merges=True), "ignore_merges cannot be"),
        (Tokenizer(TOKENIZER.vocab, TOKENIZER.merges, [END_OF_TEXT], normalizer="NFKC"), "normalizer NFKC cannot be"),
        (with_added_token(AddedToken("<|a b|>", lstrip=True)), r"the flag lstrip of '<\|a b\|>' cannot be"),
        (make_tokenizer(special_tokens=[], merges=9), "requires a special token that ends a text"),
        (bytes_tokenizer([END_OF_TEXT]), "no merges"),
    ],
)
def test_unsupported_tokenizers_are_refused(tmp_path: Path, tokenizer: Tokenizer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        save_gguf(make_model(), tokenizer, tmp_path / "model.gguf")


def test_existing_file_is_refused_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        save_gguf(make_model(), TOKENIZER, path)
    assert path.read_text() == "mine"
    path.unlink()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
        with pytest.raises(UserError, match=r"model\.gguf cannot be written: disk full"):
            save_gguf(make_model(), TOKENIZER, path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match=r"model\.gguf cannot be written: File too large"), full_disk(3000):
        save_gguf(make_model(), TOKENIZER, path)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: (Not a directory|File exists)"):
        save_gguf(make_model(), TOKENIZER, tmp_path / "file" / "model.gguf")
