"""Checkpoint directories: exact round trips, atomic saves, no code run, damage detected."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.training_checkpoint import (
    _select_rows,
    load_model,
    load_training,
    newest_checkpoint,
    read_description,
    save_training,
    step_name,
)
from lm.common.errors import UserError
from lm.files.checksum import dumps_with_checksum
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from tests.helpers.checkpoints import CONFIG, FILE_NAMES, Payload, are_states_equal, make_training, train_steps


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An intact checkpoint at step 5."""
    model, optimizers = make_training(0)
    train_steps(model, optimizers, range(5))
    save_training(tmp_path / "step-00005", model, optimizers, 5, {"seed": 42})
    return tmp_path / "step-00005"


def test_resumed_training_equals_an_uninterrupted_one(saved: Path) -> None:
    straight, straight_optimizers = make_training(0)
    train_steps(straight, straight_optimizers, range(10))
    model, optimizers = make_training(1)
    assert load_training(saved, model, optimizers) == 5
    train_steps(model, optimizers, range(5, 10))
    assert are_states_equal(model.state_dict(), straight.state_dict())
    for resumed, expected in zip(optimizers, straight_optimizers, strict=True):
        assert are_states_equal(resumed.state_dict(), expected.state_dict())


def test_a_loaded_state_is_saved_with_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    """Also if equal strings are other objects than before: pickle writes an object that occurs twice once."""
    model, optimizers = make_training(1)
    load_training(saved, model, optimizers)
    for optimizer in optimizers:
        for entry in (*optimizer.state.values(), *optimizer.param_groups):
            for key in list(entry):
                entry[key[:1] + key[1:]] = entry.pop(key)
    save_training(tmp_path / "again", model, optimizers, 5, {"seed": 42})
    assert (tmp_path / "again" / "optimizer.pt").read_bytes() == (saved / "optimizer.pt").read_bytes()


def test_a_checkpoint_restores_the_random_number_generator(tmp_path: Path) -> None:
    """Sampling goes on with the numbers that an uninterrupted training would draw."""
    model, optimizers = make_training(0)
    save_training(tmp_path / "step-1", model, optimizers, 1, {})
    expected = torch.rand(3)
    load_training(tmp_path / "step-1", *make_training(1))
    assert torch.equal(torch.rand(3), expected)


def test_rows_of_a_sharded_checkpoint_do_not_keep_the_whole_in_memory() -> None:
    class Halves:
        def bounds(self, p: torch.nn.Parameter) -> list[int]:
            return [0, 3]

    parts = [torch.arange(12.0).view(3, 4), torch.ones(3, 4)]
    rows = _select_rows(parts, torch.nn.Parameter(torch.zeros(3, 4)), Halves())  # type: ignore[arg-type]
    assert torch.equal(rows, parts[0]) and rows.untyped_storage().nbytes() == rows.nbytes


def test_all_files_of_a_checkpoint_have_the_mode_of_new_files(tmp_path: Path) -> None:
    model, optimizers = make_training(0)
    model.add_scalar_head()
    save_training(tmp_path / "step-1", model, optimizers, 1, {})
    (tmp_path / "new").touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "step-1").iterdir()}
    assert modes.keys() == {"model.safetensors", "head.safetensors", "optimizer.pt", "checkpoint.json"}
    assert {*modes.values()} == {(tmp_path / "new").stat().st_mode}


def test_description_of_a_checkpoint(saved: Path) -> None:
    description = read_description(saved)
    assert description is not None
    assert description["step"] == 5 and description["seed"] == 42
    assert ModelConfig(**description["model"]) == CONFIG
    assert sorted(description["files"]) == ["model.safetensors", "optimizer.pt"]
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILE_NAMES)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "no temporary directory is left"


def test_load_model_restores_config_and_weights(saved: Path) -> None:
    model = load_model(saved)
    expected, optimizers = make_training(0)
    train_steps(expected, optimizers, range(5))
    assert model.config == CONFIG
    assert not model.training
    assert are_states_equal(model.state_dict(), expected.state_dict())
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids), expected(ids))


def test_saving_again_replaces_the_directory(saved: Path) -> None:
    model, optimizers = make_training(3)
    (saved / "stray").write_text("left by something else")
    save_training(saved, model, optimizers, 6, {})
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILE_NAMES)
    assert are_states_equal(load_model(saved).state_dict(), model.state_dict())
    other, others = make_training(4)
    assert load_training(saved, other, others) == 6


def test_failed_save_keeps_the_older_directory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = make_training(3)

    def fail(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr(torch, "save", fail)
    for name in (saved.name, "step-00009"):
        with pytest.raises(OSError, match="No space"):
            save_training(saved.with_name(name), model, optimizers, 9, {})
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert newest_checkpoint(saved.parent) == saved
    assert [path.name for path in saved.parent.iterdir()] == [saved.name], "no temporary directory is left"


def test_newest_checkpoint_has_the_highest_step(saved: Path) -> None:
    model, optimizers = make_training(0)
    for name, step in (("step-9", 9), ("step-10", 10)):
        save_training(saved.with_name(name), model, optimizers, step, {})
    assert newest_checkpoint(saved.parent) == saved.with_name("step-10")


def test_newest_checkpoint_of_an_empty_directory_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "not there") is None


def edit_description(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the description and update its checksum."""
    description = json.loads((directory / "checkpoint.json").read_text())
    del description["sha256"]
    change(description)
    (directory / "checkpoint.json").write_text(dumps_with_checksum(description))


def damage(directory: Path, how: str, name: str) -> None:
    """Damage one file in one of five ways."""
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
@pytest.mark.parametrize("name", FILE_NAMES)
def test_damaged_checkpoint_is_skipped(saved: Path, how: str, name: str) -> None:
    newer = saved.with_name("step-00007")
    shutil.copytree(saved, newer)
    edit_description(newer, lambda description: description.update(step=7))
    assert newest_checkpoint(saved.parent) == newer
    damage(newer, how, name)
    assert read_description(newer) is None
    assert newest_checkpoint(saved.parent) == saved
    with pytest.raises(UserError, match="step-00007"):
        load_training(newer, *make_training(1))
    with pytest.raises(UserError, match="step-00007"):
        load_model(newer)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"files": {}}', '{"files": [], "step": 9}', "7", '{"files": 1}'])
def test_checkpoint_with_other_json_is_skipped(saved: Path, text: str) -> None:
    newer = saved.with_name("step-00009")
    newer.mkdir()
    (newer / "checkpoint.json").write_text(text)
    assert newest_checkpoint(saved.parent) == saved
    with pytest.raises(UserError, match="step-00009"):
        load_model(newer)


def test_one_changed_byte_is_detected(saved: Path) -> None:
    """Every byte of the description, and about 20 bytes of each other file."""
    for name in FILE_NAMES:
        data = (saved / name).read_bytes()
        every = 1 if name == "checkpoint.json" else len(data) // 20
        for place in range(0, len(data), every):
            (saved / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert newest_checkpoint(saved.parent) is None, (name, place)
        (saved / name).write_bytes(data)
    assert newest_checkpoint(saved.parent) == saved


def test_pickled_code_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    """The checksums match, as an attacker would make_training them."""
    victim = tmp_path / "victim"
    torch.save([Payload(victim)], saved / "optimizer.pt")
    data = (saved / "optimizer.pt").read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_description(saved, lambda description: description["files"].update({"optimizer.pt": entry}))
    assert read_description(saved) is not None
    with pytest.raises(UserError, match=r"optimizer\.pt"):
        load_training(saved, *make_training(1))
    assert not victim.exists()


def test_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    wrong = ModelConfig(**{**vars(CONFIG), "d_ff": 16})
    with pytest.raises(UserError, match=r"ffn\.w1\.weight"):
        load_training(saved, *make_training(1, wrong))


def test_checkpoint_of_other_optimizers_is_refused(saved: Path) -> None:
    model, optimizers = make_training(1)
    with pytest.raises(UserError, match="optimizer"):
        load_training(saved, model, [AdamW(model.parameters())])
    with pytest.raises(UserError, match="optimizer"):
        load_training(saved, model, optimizers[::-1])


def test_config_of_another_version_is_refused(saved: Path) -> None:
    edit_description(saved, lambda description: description["model"].update(from_the_future=1))
    with pytest.raises(UserError, match="from_the_future"):
        load_model(saved)


@pytest.mark.parametrize(("name", "value"), [("layers.1.ffn.w2.weight", math.nan), ("ln_final.weight", -math.inf)])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, name: str, value: float) -> None:
    model, _ = make_training(0)
    model.get_parameter(name).detach().view(-1)[-1] = value
    save_training(tmp_path / step_name(1), model, [], 1, {})
    with pytest.raises(UserError, match=rf"step-0000001: {name} holds numbers that are not finite"):
        load_model(tmp_path / step_name(1))


def test_a_scalar_head_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model, _ = make_training(0)
    model.add_scalar_head()
    assert model.scalar_head is not None
    model.scalar_head.weight.detach()[0] = math.inf
    save_training(tmp_path / step_name(1), model, [], 1, {})
    load_model(tmp_path / step_name(1))
    with pytest.raises(UserError, match=r"scalar_head\.weight holds numbers that are not finite"):
        load_model(tmp_path / step_name(1), has_scalar_head=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_weights_are_on_the_gpu_once(tmp_path: Path) -> None:
    model = TransformerLM(replace(CONFIG, vocab_size=50_000, d_model=64))
    save_training(tmp_path / step_name(1), model, [], 1, {})
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load_model(tmp_path / step_name(1), "cuda")
    assert torch.cuda.max_memory_allocated() - before < 1.6 * num_bytes, "with a copy of the largest tensor at most"
