"""The public names of the rooms of ``lm``: users import them from the rooms, without the modules in them."""

import ast
import importlib
from pathlib import Path

import pytest

import lm

ROOMS = sorted(path.parent.name for path in Path(lm.__path__[0]).glob("*/__init__.pyi"))

STABLE = {
    "lm.tokenizer.bpe": ["train_bpe"],
    "lm.tokenizer": ["Tokenizer"],
    "lm.model": [
        *("Linear", "Embedding", "RMSNorm", "SwiGLU", "RotaryEmbedding", "MultiHeadSelfAttention", "TransformerBlock"),
        *("TransformerLM", "ModelConfig", "softmax", "silu", "scaled_dot_product_attention", "cross_entropy"),
        *("FlashAttentionTorch", "FlashAttentionTriton"),
    ],
    "lm.optim": ["AdamW", "Muon", "lr_cosine_schedule", "clip_grad_norm"],
    "lm.data": ["get_batch"],
    "lm.checkpoint": ["save_checkpoint", "load_checkpoint"],
    "lm.distributed": ["DDP", "FSDP", "ShardedOptimizer"],
    "lm.posttrain": [
        *("tokenize_prompt_and_output", "get_response_log_probs", "compute_entropy", "masked_mean", "masked_normalize"),
        *("sft_microbatch_train_step", "PackedSFTDataset", "iterate_batches", "compute_per_instance_dpo_loss"),
        *("compute_rollout_rewards", "compute_group_normalized_rewards", "compute_policy_gradient_loss"),
        *("aggregate_loss_across_microbatch", "grpo_train_step"),
    ],
    "lm.curate": [
        *("TextClassifier", "extract_text"),
        *("gopher_quality_filter", "identify_language", "mask_emails", "mask_ips", "mask_phone_numbers"),
        *("TextClassifier", "deduplicate_documents", "deduplicate_lines", "extract_text"),
    ],
    "lm.eval": ["parse_mmlu_response", "parse_gsm8k_response"],
}


@pytest.mark.parametrize("module", STABLE)
def test_names_that_other_projects_use_are_there(module: str) -> None:
    assert [name for name in STABLE[module] if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_name_of_a_room_can_be_imported(room: str) -> None:
    module = importlib.import_module(f"lm.{room}")
    stub = Path(str(module.__file__)).with_suffix(".pyi")
    names = [
        alias.name
        for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert names and sorted(names) == sorted(module.__all__)
    for name in names:
        getattr(module, name)
