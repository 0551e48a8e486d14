"""A checkpoint as a single file: exact round trips, atomic saves, no code run, damage detected."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm.checkpoint.single_file import load_checkpoint, save_checkpoint
from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.optim.sgd import SGD
from tests.helpers.checkpoints import CONFIG, Payload, are_states_equal, make_training, train_steps
from tests.helpers.examples import examples


@pytest.mark.parametrize("kind", ["str", "path", "file"])
def test_round_trip(tmp_path: Path, kind: str) -> None:
    model, (optimizer, _) = make_training(0)
    optimizer = AdamW(model.parameters())
    train_steps(model, [optimizer], range(3))
    target: Any = {"str": str(tmp_path / "c.pt"), "path": tmp_path / "c.pt", "file": io.BytesIO()}[kind]
    save_checkpoint(model, optimizer, 1234, target)
    if kind == "file":
        target.seek(0)
    other, _ = make_training(1)
    restored = AdamW(other.parameters(), lr=5.0)
    assert load_checkpoint(target, other, restored) == 1234
    assert are_states_equal(other.state_dict(), model.state_dict())
    assert are_states_equal(restored.state_dict(), optimizer.state_dict())
    train_steps(model, [optimizer], range(3, 6))
    train_steps(other, [restored], range(3, 6))
    assert are_states_equal(other.state_dict(), model.state_dict())


def test_any_module_and_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, 7, tmp_path / "c.pt")
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    restored = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(tmp_path / "c.pt", other, restored) == 7
    assert are_states_equal(other.state_dict(), model.state_dict())
    assert are_states_equal(restored.state_dict(), optimizer.state_dict())


def test_load_without_optimizer(tmp_path: Path) -> None:
    model, _ = make_training(0)
    save_checkpoint(model, SGD(model.parameters()), 3, tmp_path / "c.pt")
    other, _ = make_training(1)
    assert load_checkpoint(tmp_path / "c.pt", other) == 3
    assert are_states_equal(other.state_dict(), model.state_dict())


def test_save_replaces_the_older_file(tmp_path: Path) -> None:
    model, _ = make_training(0)
    for iteration in (1, 2):
        save_checkpoint(model, SGD(model.parameters()), iteration, tmp_path / "c.pt")
    assert load_checkpoint(tmp_path / "c.pt", model) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_failed_save_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make_training(0)
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
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"], "no temporary file is left"


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, form: str) -> None:
    model, _ = make_training(0)
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
    assert victim.exists(), "the payload must work when it is unpickled without restrictions"


@examples(25)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_refused(share: float) -> None:
    model, _ = make_training(0)
    whole = io.BytesIO()
    save_checkpoint(model, SGD(model.parameters()), 1, whole)
    data = whole.getvalue()
    with pytest.raises(UserError, match="damaged or not a checkpoint"):
        load_checkpoint(io.BytesIO(data[: int(share * len(data))]), model)


@examples(25)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UserError):
        load_checkpoint(io.BytesIO(data), nn.Linear(2, 2))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_checkpoint(tmp_path / "nothing.pt", nn.Linear(2, 2))


@pytest.mark.parametrize("state", [[1, 2], {"model": {}}, 5])
def test_file_with_other_content_is_refused(tmp_path: Path, state: Any) -> None:
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
def test_wrong_model_is_refused_with_the_name_of_the_parameter(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    model, _ = make_training(0)
    save_checkpoint(model, SGD(model.parameters()), 1, tmp_path / "c.pt")
    wrong = TransformerLM(ModelConfig(**{**vars(CONFIG), **other}))
    before = {key: tensor.clone() for key, tensor in wrong.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path / "c.pt", wrong)
    assert are_states_equal(wrong.state_dict(), before), "nothing may be loaded partially"


def test_wrong_optimizer_is_refused(tmp_path: Path) -> None:
    model, (muon, _) = make_training(0)
    save_checkpoint(model, muon, 1, tmp_path / "c.pt")
    with pytest.raises(UserError, match="optimizer"):
        load_checkpoint(tmp_path / "c.pt", model, AdamW(model.parameters()))
