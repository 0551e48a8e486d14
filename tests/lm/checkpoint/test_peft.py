"""Adapters in peft's files, in and out, against peft: equal logits, gradients, and weights after twenty steps."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.checkpoint.external import load_any_model, load_external, read_context_length
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.peft import StoredAdapter, digest_of_files, save_peft
from lm.common.errors import UserError
from lm.files.checksum import file_checksum
from lm.model.adapter import LowRank, adapted_layers, add_adapter, trained_parameters
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from tests.helpers.examples import examples
from tests.helpers.tokenizers import bytes_tokenizer

LLAMA = ModelConfig(257, 24, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
CONFIGS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=12),
}
IDS = torch.randint(257, (3, 24), generator=torch.Generator().manual_seed(0))
ADAPTER = AdapterConfig(rank=3, alpha=12)
STEPS, LR = 20, 3e-3


def write_base(directory: Path, config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model in Hugging Face's files."""
    torch.manual_seed(7)
    save_hugging_face(TransformerLM(config).to(dtype), bytes_tokenizer(["<|endoftext|>"]), directory)
    return directory


def adapt(base: Path, config: AdapterConfig = ADAPTER, seed: int = 1) -> TransformerLM:
    """Return the model of a directory with a random adapter."""
    torch.manual_seed(seed)
    model = add_adapter(load_hugging_face(base), config).train()
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.1)
    return model


def stored(model: TransformerLM) -> StoredAdapter:
    """Return the adapter of a model as one that was read from a checkpoint."""
    layers = {
        name: LowRank(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)
        for name, layer in adapted_layers(model).items()
    }
    return StoredAdapter(layers, Path(), model.config, 0.0)


def base_digest(base: Path) -> str:
    return digest_of_files(file_checksum(path.open("rb")) for path in base.glob("*.safetensors"))


def write_adapter(directory: Path, model: TransformerLM, base: Path) -> Path:
    directory.mkdir()
    save_peft(stored(model), directory, base, base_digest(base))
    return directory


def load_in_peft(base: Path, adapter: Path, is_trainable: bool = False) -> Any:
    """Return the model with its adapter as peft reads it."""
    peft = pytest.importorskip("peft", reason="the reference")
    transformers = pytest.importorskip("transformers", reason="the reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)


def assert_same_logits(ours: TransformerLM, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs(IDS).logits
        torch.testing.assert_close(ours(IDS), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_reads_our_files(tmp_path: Path, name: str) -> None:
    base = write_base(tmp_path / "base", CONFIGS[name])
    model = adapt(base)
    directory = write_adapter(tmp_path / "adapter", model, base)
    theirs = load_in_peft(base, directory)
    assert_same_logits(model, theirs)
    assert not torch.allclose(load_hugging_face(base)(IDS), model(IDS), atol=1e-2)
    assert_same_logits(load_any_model(directory), theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("qwen2", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
        ("qwen3", {"target_modules": ["k_proj", "down_proj", "gate_proj"], "alpha_pattern": {"k_proj": 7}}),
        ("llama", {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 5}}),
        ("llama", {"target_modules": ["up_proj", "lm_head"], "layers_to_transform": None}),
    ],
)
def test_we_read_files_of_peft(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="the reference")
    transformers = pytest.importorskip("transformers", reason="the reference")
    base = write_base(tmp_path / "base", CONFIGS[name])
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(5)
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)).eval()
    for parameter_name, parameter in theirs.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    model, tokenizer = load_external(tmp_path / "adapter")
    assert_same_logits(model, theirs)
    assert tokenizer.size == 257 and read_context_length(tmp_path / "adapter") == 24


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_and_steps_are_those_of_peft(tmp_path: Path, name: str) -> None:
    base = write_base(tmp_path / "base", CONFIGS[name])
    model = adapt(base)
    theirs = load_in_peft(base, write_adapter(tmp_path / "adapter", model, base), is_trainable=True)
    params = [p for p in theirs.parameters() if p.requires_grad]
    ours = trained_parameters(model)
    assert sum(p.numel() for p in params) == sum(p.numel() for p in ours.values())
    optimizer = AdamW(ours.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    reference = torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        ids = torch.randint(257, (3, 17), generator=generator)
        loss, expected = model.loss(ids[:, :-1], ids[:, 1:]), theirs(ids, labels=ids).loss
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        loss.backward()
        expected.backward()
        if step == 0:
            compare(tmp_path / "gradients", model, theirs, base, is_gradient=True)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    compare(tmp_path / "weights", model, theirs, base, is_gradient=False)


def compare(directory: Path, model: TransformerLM, theirs: Any, base: Path, is_gradient: bool) -> None:
    """Assert that the matrices, or their gradients, are equal to 1e-5: ours are written in peft's order for it."""
    layers = adapted_layers(model)

    def pick(parameter: Tensor) -> Tensor:
        value = parameter.grad if is_gradient else parameter.detach()
        assert value is not None
        return value

    adapter = replace(
        stored(model), layers={n: LowRank(pick(layer.lora_A), pick(layer.lora_B), 1.0) for n, layer in layers.items()}
    )
    directory.mkdir()
    save_peft(adapter, directory, base, "")
    ours = load_file(directory / "adapter_model.safetensors")
    named = {n.replace(".default", ""): pick(p) for n, p in theirs.named_parameters() if p.requires_grad}
    assert ours.keys() == named.keys()
    for name, tensor in named.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5)


@given(
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    targets=st.lists(st.sampled_from(["q_proj", "k_proj", "output_proj", "w1", "w2"]), unique=True, max_size=3),
    alpha=st.floats(0.5, 40),
    name=st.sampled_from(sorted(CONFIGS)),
)
@examples(8)
def test_out_and_in_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, ranks: tuple[int, int], targets: list[str], alpha: float, name: str
) -> None:
    directory = tmp_path_factory.mktemp("round")
    base = write_base(directory / "base", CONFIGS[name])
    model = adapt(base, AdapterConfig(rank=ranks[0], alpha=alpha, targets=targets))
    again = load_any_model(write_adapter(directory / "adapter", model, base))
    with torch.no_grad():
        torch.testing.assert_close(again(IDS), model(IDS), atol=1e-4, rtol=1e-4)


def test_a_bfloat16_base_stays_bfloat16(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    directory = write_adapter(tmp_path / "adapter", adapt(base), base)
    model = load_any_model(directory)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_any_model(directory, dtype=torch.float32).parameters()} == {torch.float32}


def test_a_moved_base_is_found_beside_the_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    base = write_base(tmp_path / "adapter" / "base")
    save_peft(stored(adapt(base)), tmp_path / "adapter", base, base_digest(base))
    load_any_model((tmp_path / "adapter").rename(tmp_path / "moved"))


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory: Path, change: Any) -> None:
    path = directory / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def rename_first(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {name if key == Q else key: tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: edit_config(d, peft_type="IA3"), "peft_type 'IA3' is not supported, only 'LORA'; merge"),
        (lambda d: edit_config(d, use_dora=True), "use_dora True is not supported"),
        (lambda d: edit_config(d, bias="all"), "bias 'all' is not supported"),
        (lambda d: edit_config(d, modules_to_save=["embed_tokens"]), "modules_to_save is not supported; merge"),
        (lambda d: edit_config(d, lora_alpha="x"), "lora_alpha is 'x'; it must be a number above 0"),
        (lambda d: edit_config(d, lora_alpha=10**400), "lora_alpha is 1000.*; it must be a number above 0, at most"),
        (lambda d: edit_tensors(d, lambda t: {n: x[:0] if "_A" in n else x[:, :0] for n, x in t.items()}), r"A \(0, "),
        (lambda d: edit_config(d, alpha_pattern={"(a+)+": 1}), "alpha_pattern is supported with names of layers alone"),
        (lambda d: edit_config(d, base_model_name_or_path=None), "names no base_model_name_or_path"),
        (
            lambda d: edit_config(d, base_model_name_or_path="org/no"),
            "of the model 'org/no', and there is no",
        ),
        (lambda d: edit_config(d, base_model_name_or_path=str(d)), "and there is no such directory"),
        (lambda d: edit_config(d, base_model_name_or_path="a" * 3000), "of the model 'a{200}', and there is no"),
        (lambda d: edit_tensors(d, lambda t: t | {Q: t[Q].int()}), "q_proj.lora_A.weight, which is no low-rank"),
        (
            lambda d: edit_tensors(d, lambda t: rename_first(t, Q.replace("q_p", "p"))),
            "which is no low-rank matrix",
        ),
        (lambda d: edit_tensors(d, lambda t: rename_first(t, "x")), "has x, which is no low-rank matrix"),
        (
            lambda d: edit_tensors(d, lambda t: {k: t[k] for k in t if k != Q}),
            r"are B \(32, 3\), and its base has",
        ),
        (lambda d: edit_tensors(d, lambda t: t | {Q: torch.ones(3, 31)}), r"A \(3, 31\) and B \(32, 3\), and its base"),
        (lambda d: edit_tensors(d, lambda t: t | {Q: torch.ones(2, 32)}), r"A \(2, 32\) and B \(32, 3\), and its base"),
        (
            lambda d: edit_tensors(d, lambda t: t | {Q: torch.full((3, 32), torch.nan)}),
            "numbers that are not finite",
        ),
        (lambda d: (d / "adapter_model.safetensors").write_text("x"), r"adapter_model.safetensors cannot be read"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), r"adapter_model.safetensors cannot be read"),
    ],
)
def test_each_cause_has_its_message(tmp_path: Path, change: Any, message: str) -> None:
    base = write_base(tmp_path / "base")
    directory = write_adapter(tmp_path / "adapter", adapt(base), base)
    load_any_model(directory)
    change(directory)
    with pytest.raises(UserError, match=message):
        load_any_model(directory)


def test_an_adapter_of_another_base_is_refused_by_its_digest(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    directory = write_adapter(tmp_path / "adapter", adapt(base), base)
    shutil.rmtree(base)
    torch.manual_seed(8)
    save_hugging_face(TransformerLM(LLAMA), bytes_tokenizer(["<|endoftext|>"]), base)
    with pytest.raises(UserError, match=r"holds an adapter of another model than .*base: the digest"):
        load_any_model(directory)


def test_an_adapter_of_fused_matrices_is_not_written(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", replace(LLAMA, rotary_fraction=0.5))  # a Phi-3
    with pytest.raises(UserError, match=r"Phi3 holds several matrices as one.*--fuse_adapter"):
        write_adapter(tmp_path / "adapter", adapt(base), base)


def test_an_adapter_on_an_adapter_of_peft_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    first, second = (write_adapter(tmp_path / name, adapt(base), base) for name in ("first", "second"))
    edit_config(second, base_model_name_or_path=str(first))
    with pytest.raises(UserError, match="is an adapter too; merge it first"):
        load_any_model(second)
