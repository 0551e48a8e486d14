"""A checkpoint as a single file: exact round trips, nothing lost to a crash, no code run, damage told apart."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lm.checkpoint import (
    load_checkpoint,
    save_checkpoint,
)
from lm.errors import UserError
from lm.model import ModelConfig, TransformerLM
from lm.optim import SGD, AdamW
from tests.checkpoints import CONFIG, Payload, make, states_equal, train


@pytest.mark.parametrize("kind", ["str", "path", "file"])
def test_single_file_round_trip(tmp_path: Path, kind: str) -> None:
    model, (optimizer, _) = make(0)
    optimizer = AdamW(model.parameters())
    train(model, [optimizer], range(3))
    place: Any = {"str": str(tmp_path / "c.pt"), "path": tmp_path / "c.pt", "file": io.BytesIO()}[kind]
    save_checkpoint(model, optimizer, 1234, place)
    if kind == "file":
        place.seek(0)
    other, _ = make(1)
    restored = AdamW(other.parameters(), lr=5.0)
    assert load_checkpoint(place, other, restored) == 1234
    assert states_equal(other.state_dict(), model.state_dict())
    assert states_equal(restored.state_dict(), optimizer.state_dict())
    train(model, [optimizer], range(3, 6))
    train(other, [restored], range(3, 6))
    assert states_equal(other.state_dict(), model.state_dict())


def test_single_file_works_with_any_module_and_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, 7, tmp_path / "c.pt")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    restored = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(tmp_path / "c.pt", other, restored) == 7
    assert states_equal(other.state_dict(), model.state_dict())
    assert states_equal(restored.state_dict(), optimizer.state_dict())


def test_single_file_without_optimizer(tmp_path: Path) -> None:
    model, _ = make(0)
    save_checkpoint(model, SGD(model.parameters()), 3, tmp_path / "c.pt")
    other, _ = make(1)
    assert load_checkpoint(tmp_path / "c.pt", other) == 3
    assert states_equal(other.state_dict(), model.state_dict())


def test_single_file_replaces_the_older(tmp_path: Path) -> None:
    model, _ = make(0)
    for iteration in (1, 2):
        save_checkpoint(model, SGD(model.parameters()), iteration, tmp_path / "c.pt")
    assert load_checkpoint(tmp_path / "c.pt", model) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make(0)
    optimizer = AdamW(model.parameters())
    save_checkpoint(model, optimizer, 1, tmp_path / "c.pt")
    before = (tmp_path / "c.pt").read_bytes()

    def fail(state: Any, file: Any) -> None:
        file.write(b"half a checkpoint")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(model, optimizer, 2, tmp_path / "c.pt")
    assert (tmp_path / "c.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"], "no temporary file stays"


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    model, _ = make(0)
    victim = tmp_path / "victim"
    payload = {"model": model.state_dict(), "optimizer": {}, "iteration": 1, "extra": Payload(victim)}
    if form == "torch":
        torch.save(payload, tmp_path / "c.pt")
    else:
        (tmp_path / "c.pt").write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(UserError, match=r"c\.pt"):
        load_checkpoint(tmp_path / "c.pt", model)
    assert not victim.exists()
    if form == "torch":
        torch.load(tmp_path / "c.pt", weights_only=False)
    else:
        pickle.loads((tmp_path / "c.pt").read_bytes())
    assert victim.exists(), "the payload works where nothing guards against it"


@settings(deadline=None, max_examples=25)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_a_user_error(share: float) -> None:
    model, _ = make(0)
    whole = io.BytesIO()
    save_checkpoint(model, SGD(model.parameters()), 1, whole)
    data = whole.getvalue()
    with pytest.raises(UserError, match="damaged or not a checkpoint"):
        load_checkpoint(io.BytesIO(data[: int(share * len(data))]), model)


@settings(deadline=None, max_examples=25)
@given(data=st.binary(max_size=200))
def test_any_other_file_is_a_user_error(data: bytes) -> None:
    with pytest.raises(UserError):
        load_checkpoint(io.BytesIO(data), nn.Linear(2, 2))


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing.pt", nn.Linear(2, 2))


@pytest.mark.parametrize("state", [[1, 2], {"model": {}}, 5])
def test_file_of_another_kind_is_a_user_error(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(UserError, match="is not a checkpoint"):
        load_checkpoint(tmp_path / "c.pt", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"d_ff": 16}, r"layers\.0\.ffn\.w1\.weight is \(12, 8\).*\(16, 8\)"),
        ({"vocab_size": 30}, r"token_embeddings\.weight is \(31, 8\).*\(30, 8\)"),
        ({"num_layers": 3}, r"has no layers\.2\."),
        ({"num_layers": 1}, r"has layers\.1\."),
    ],
    ids=["width", "vocabulary", "more layers", "fewer layers"],
)
def test_wrong_model_is_a_user_error_that_names_the_parameter(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    model, _ = make(0)
    save_checkpoint(model, SGD(model.parameters()), 1, tmp_path / "c.pt")
    wrong = TransformerLM(ModelConfig(**{**vars(CONFIG), **other}))
    before = {key: tensor.clone() for key, tensor in wrong.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path / "c.pt", wrong)
    assert states_equal(wrong.state_dict(), before), "nothing is loaded by halves"


def test_wrong_optimizer_is_a_user_error(tmp_path: Path) -> None:
    model, (muon, _) = make(0)
    save_checkpoint(model, muon, 1, tmp_path / "c.pt")
    with pytest.raises(UserError, match="optimizer"):
        load_checkpoint(tmp_path / "c.pt", model, AdamW(model.parameters()))


# Checkpoint directories
