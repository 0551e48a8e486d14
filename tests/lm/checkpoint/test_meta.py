"""Meta's checkpoints: equal to transformers' Llama, no code run, bad files refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.meta import load_meta
from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from tests.helpers.checkpoints import Payload
from tests.helpers.llamas import (
    CONTEXT,
    GROUPED,
    UNGROUPED,
    assert_same_logits,
    make_transformers_llama,
    meta_weights,
    removed_file,
    write_meta,
)


@pytest.mark.parametrize(("shards", "embedding_dim"), [(1, 1), (4, 1), (4, 0)])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_logits_equal_transformers(tmp_path: Path, params: dict[str, Any], shards: int, embedding_dim: int) -> None:
    directory = write_meta(tmp_path / "llama", params, meta_weights(params), shards, embedding_dim)
    assert_same_logits(load_meta(directory, CONTEXT), make_transformers_llama(params))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("params", [UNGROUPED, GROUPED], ids=["ungrouped", "grouped"])
def test_generation_equals_transformers(tmp_path: Path, params: dict[str, Any], shards: int) -> None:
    """200 tokens of a ragged batch, by the model that is prepared for inference."""
    theirs = make_transformers_llama(params)
    directory = write_meta(tmp_path / "llama", params, meta_weights(params), shards)
    ours = prepare_for_inference(load_meta(directory, CONTEXT))
    greedy = SampleConfig(temperature=0)
    generations = [Generation(prompt, 200, greedy, wants_logprobs=True) for prompt in ([3, 1, 4], [15])]
    generate(ours, generations)
    for generation in generations:
        prompt = torch.tensor([generation.prompt])
        expected = theirs.generate(prompt, max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert [*generation.prompt, *generation.ids] == expected[0].tolist()
        with torch.no_grad():
            scores = theirs(expected).logits.log_softmax(-1)[0, len(generation.prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(generation.logprobs), scores.amax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("shards", "embedding_dim"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("stated", [{"vocab_size": -1}, {}])
def test_vocabulary_size_follows_from_the_embedding(
    tmp_path: Path, stated: dict[str, int], shards: int, embedding_dim: int
) -> None:
    params = {name: value for name, value in UNGROUPED.items() if name != "vocab_size"} | stated
    write_meta(tmp_path, params, meta_weights(UNGROUPED), shards, embedding_dim)
    model = load_meta(tmp_path, 40)
    assert model.config.vocab_size == 52
    assert torch.equal(model.token_embeddings.weight, meta_weights(UNGROUPED)["tok_embeddings.weight"])


def test_loaded_model_is_trainable_and_independent_of_the_files(tmp_path: Path) -> None:
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


def test_dtype_is_kept_or_converted(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in meta_weights(UNGROUPED).items()}
    write_meta(tmp_path, UNGROUPED, weights, 2)
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = load_meta(tmp_path, 8, dtype=dtype)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {expected}
        assert model.lm_head is not None
        assert torch.equal(model.lm_head.weight, weights["output.weight"].to(expected))
        assert torch.isfinite(model(torch.arange(8)[None])).all()


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    directory = write_meta(tmp_path / "llama", UNGROUPED, meta_weights(UNGROUPED), 2)
    victim = tmp_path / "victim"
    torch.save(meta_weights(UNGROUPED) | {"extra": Payload(victim)}, directory / "consolidated.01.pth")
    with pytest.raises(UserError, match=r"consolidated\.01\.pth is damaged.*could run code") as caught:
        load_meta(directory, 8)
    assert "weights_only" not in str(caught.value)
    assert not victim.exists()
    torch.load(directory / "consolidated.01.pth", weights_only=False)
    assert victim.exists(), "the payload must work when it is unpickled removed_file restrictions"


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


WQ = "layers.1.attention.wq.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed_file("params.json"), r"params\.json cannot be read"),
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
        (changed_params(multiple_of=128), r"layers\.0\.feed_forward\.w1\.weight.*\(32, 24\).*requires \(128, 24\)"),
        (changed_params(n_kv_heads=2), r"layers\.0\.attention\.wk\.weight.*requires \(12, 24\)"),
        (changed_params(n_layers=3), r"has no layers\.2\..*; use all files"),
        (changed_params(n_layers=1), r"has layers\.1\..*, which no Llama of its config has"),
        (removed_file("consolidated.00.pth"), r"has no consolidated\.00\.pth"),
        (removed_file("consolidated.01.pth"), r"tok_embeddings\.weight.*\(52, 12\).*requires \(52, 24\)"),
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
def test_bad_files_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    write_meta(tmp_path, UNGROUPED, meta_weights(UNGROUPED), 2)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_meta(tmp_path, 8)
    assert str(tmp_path) in str(caught.value)


def test_context_length_0_is_refused(tmp_path: Path) -> None:
    write_meta(tmp_path, UNGROUPED, meta_weights(UNGROUPED))
    with pytest.raises(UserError, match=r"model\.context_length is 0"):
        load_meta(tmp_path, 0)
