"""Checkpoints: exact round trips, nothing lost to a crash, nothing run from a file, damage told apart."""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lm.checkpoint import (
    _signed,
    load_checkpoint,
    load_model,
    load_training,
    newest_checkpoint,
    read_description,
    save_checkpoint,
    save_training,
)
from lm.errors import UserError
from lm.model import ModelConfig, TransformerLM, cross_entropy
from lm.optim import SGD, AdamW, Muon

CONFIG = ModelConfig(vocab_size=31, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=12, rope_theta=77.0)
FILES = ("model.safetensors", "optimizer.pt", "checkpoint.json")


def make(seed: int, config: ModelConfig = CONFIG) -> tuple[TransformerLM, list[torch.optim.Optimizer]]:
    """A model with Muon on its hidden matrices and AdamW on the rest, as training has them."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    hidden = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return model, [Muon(hidden, lr=0.01), AdamW(rest, lr=0.01)]


def train(model: TransformerLM, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """A few steps on batches that depend on the step alone."""
    for step in steps:
        ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()


def states_equal(a: Any, b: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(states_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(states_equal, a, b))
    return bool(a == b)


class Payload:
    """Unpickled without restriction this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


# The single file


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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An intact checkpoint at step 5."""
    model, optimizers = make(0)
    train(model, optimizers, range(5))
    save_training(tmp_path / "step-00005", model, optimizers, 5, {"seed": 42})
    return tmp_path / "step-00005"


def test_directory_round_trip_is_exact(saved: Path) -> None:
    """Five steps, save, load into another model, five more: bit for bit what ten steps in one go are."""
    straight, straight_optimizers = make(0)
    train(straight, straight_optimizers, range(10))
    model, optimizers = make(1)
    assert load_training(saved, model, optimizers) == 5
    train(model, optimizers, range(5, 10))
    assert states_equal(model.state_dict(), straight.state_dict())
    for ours, theirs in zip(optimizers, straight_optimizers, strict=True):
        assert states_equal(ours.state_dict(), theirs.state_dict())


def test_description_says_what_was_saved(saved: Path) -> None:
    description = read_description(saved)
    assert description is not None
    assert description["step"] == 5 and description["seed"] == 42
    assert ModelConfig(**description["model"]) == CONFIG
    assert sorted(description["files"]) == ["model.safetensors", "optimizer.pt"]
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "no temporary directory stays"


def test_load_model_takes_config_and_weights_from_disk(saved: Path) -> None:
    model = load_model(saved)
    expected, optimizers = make(0)
    train(expected, optimizers, range(5))
    assert model.config == CONFIG
    assert not model.training
    assert states_equal(model.state_dict(), expected.state_dict())
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids), expected(ids))


def test_saving_again_replaces_the_directory(saved: Path) -> None:
    model, optimizers = make(3)
    (saved / "stray").write_text("left by something else")
    save_training(saved, model, optimizers, 6, {})
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    assert states_equal(load_model(saved).state_dict(), model.state_dict())
    other, others = make(4)
    assert load_training(saved, other, others) == 6


def test_failed_save_leaves_the_older_directory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = make(3)

    def fail(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr(torch, "save", fail)
    for name in (saved.name, "step-00009"):
        with pytest.raises(OSError, match="No space"):
            save_training(saved.with_name(name), model, optimizers, 9, {})
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert newest_checkpoint(saved.parent) == saved
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "no temporary directory stays"


def test_newest_checkpoint_goes_by_steps_not_by_name(saved: Path) -> None:
    model, optimizers = make(0)
    for name, step in (("step-9", 9), ("step-10", 10)):
        save_training(saved.with_name(name), model, optimizers, step, {})
    assert newest_checkpoint(saved.parent) == saved.with_name("step-10")


def test_newest_checkpoint_of_nothing_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "not there") is None


def describe(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the description, as one who makes its digest fit."""
    description = json.loads((directory / "checkpoint.json").read_text())
    del description["sha256"]
    change(description)
    (directory / "checkpoint.json").write_text(_signed(description))


def damage(directory: Path, how: str, name: str) -> None:
    """Remove, flip a bit of, cut short or lengthen one file."""
    path = directory / name
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.write_bytes(data + b"\0")


@pytest.mark.parametrize("how", ["removed", "flipped", "truncated", "emptied", "lengthened"])
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_skipped(saved: Path, how: str, name: str) -> None:
    newer = saved.with_name("step-00007")
    shutil.copytree(saved, newer)
    describe(newer, lambda description: description.update(step=7))
    assert newest_checkpoint(saved.parent) == newer
    damage(newer, how, name)
    assert read_description(newer) is None
    assert newest_checkpoint(saved.parent) == saved
    with pytest.raises(UserError, match="step-00007"):
        load_training(newer, *make(1))
    with pytest.raises(UserError, match="step-00007"):
        load_model(newer)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"files": {}}', '{"files": [], "step": 9}', "7", '{"files": 1}'])
def test_other_json_is_no_checkpoint(saved: Path, text: str) -> None:
    newer = saved.with_name("step-00009")
    newer.mkdir()
    (newer / "checkpoint.json").write_text(text)
    assert newest_checkpoint(saved.parent) == saved
    with pytest.raises(UserError, match="step-00009"):
        load_model(newer)


def test_one_changed_byte_is_noticed(saved: Path) -> None:
    """Any byte of the description, and some of the other files: the checkpoint is skipped."""
    for name in FILES:
        data = (saved / name).read_bytes()
        every = 1 if name == "checkpoint.json" else len(data) // 20
        for place in range(0, len(data), every):
            (saved / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert newest_checkpoint(saved.parent) is None, (name, place)
        (saved / name).write_bytes(data)
    assert newest_checkpoint(saved.parent) == saved


def test_pickled_code_in_a_directory_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    """The digests match, as an attacker would make them."""
    victim = tmp_path / "victim"
    torch.save([Payload(victim)], saved / "optimizer.pt")
    data = (saved / "optimizer.pt").read_bytes()
    about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    describe(saved, lambda description: description["files"].update({"optimizer.pt": about}))
    assert read_description(saved) is not None
    with pytest.raises(UserError, match=r"optimizer\.pt"):
        load_training(saved, *make(1))
    assert not victim.exists()


def test_directory_of_another_model_is_a_user_error(saved: Path) -> None:
    wrong = ModelConfig(**{**vars(CONFIG), "d_ff": 16})
    with pytest.raises(UserError, match=r"ffn\.w1\.weight"):
        load_training(saved, *make(1, wrong))


def test_other_optimizers_are_a_user_error(saved: Path) -> None:
    """As when a run with Muon is resumed without."""
    model, optimizers = make(1)
    with pytest.raises(UserError, match="optimizer"):
        load_training(saved, model, [AdamW(model.parameters())])
    with pytest.raises(UserError, match="optimizer"):
        load_training(saved, model, optimizers[::-1])


def test_config_of_another_version_is_a_user_error(saved: Path) -> None:
    describe(saved, lambda description: description["model"].update(from_the_future=1))
    with pytest.raises(UserError, match="from_the_future"):
        load_model(saved)
