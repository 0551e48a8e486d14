"""Checkpoints: the directories of a training run.

A directory has ``model.safetensors``, ``optimizer.pt`` and ``checkpoint.json``. A model with a scalar head has
``head.safetensors`` too, so that ``model.safetensors`` is that of any language model. The training of an adapter saves
``adapter.safetensors`` in place of the model, which is that of another checkpoint, its base. A directory counts as a
checkpoint only if its ``checkpoint.json`` is intact, and the size and SHA-256 of the other files are as stated there.

A training that shards weights or optimizer state saves them in shards, ``model-1-of-4.safetensors`` and
``optimizer-1-of-4.pt``: each process writes its rows of every tensor. The rows of all shards in order are the tensor.
So any number of processes can read it, whether they shard or not. Files are memory-mapped: a process that shards reads
its own rows only.
"""

import hashlib
import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lm.checkpoint.adapter_base import possible_bases, read_adapter
from lm.checkpoint.safe_load import (
    assign_weights,
    check_weights_are_finite,
    create_empty_model,
    load_optimizer_states,
    load_weights,
    map_safetensors,
    read_safetensors,
    read_tensors,
    save_safetensors,
    save_tensors,
)
from lm.checkpoint.training_snapshot import TrainingSnapshot, take_snapshot
from lm.common.errors import UserError
from lm.distributed.plan import Parallel
from lm.distributed.process_group import all_gather, broadcast_from_rank0, call_on_rank0, get_rank, get_world_size
from lm.files.atomic_dir import atomic_directory
from lm.files.checksum import dumps_with_checksum, file_checksum, loads_with_checksum
from lm.model.adapter import add_adapter, fuse_adapter
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.shards import shard_like

ROW_FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "reference.jsonl")
"""Files that a training may write beside its checkpoints: a JSON object per line, each with its ``step``."""
_HEAD_NAME = "head.safetensors"


def save_training(
    directory: Path,
    model: TransformerLM,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    metadata: dict[str, Any],
    parallel: Parallel | None = None,
    snapshot: TrainingSnapshot | None = None,
) -> None:
    """Write a checkpoint directory atomically, replacing an older one of that name.

    If ``parallel`` shards weights or state, all ranks must call this together, and see the same ``directory``.
    Otherwise ``snapshot`` may hold what to write, so that the model can be trained on meanwhile.

    The file ``optimizer.pt`` also holds the states of torch's random number generators; ``checkpoint.json`` holds the
    step, the model's config and ``metadata``. That of an adapter has ``adapter``: the fields of its config, and as
    ``base`` the :func:`weights_digest` of its base. Raises OSError, on all ranks if one cannot write its shard.
    """
    rank, world_size = (get_rank(), get_world_size()) if parallel and parallel.shards_state else (0, 1)
    weight_shards = world_size if parallel and parallel.shards_weights else 1
    with atomic_directory(directory) if rank == 0 else nullcontext(directory) as temporary:
        if world_size > 1:
            temporary = Path(broadcast_from_rank0(str(temporary)))
        error = ""
        try:
            # Before the files: a rank whose disk is full must not leave the others alone in the collectives.
            snapshot = snapshot or take_snapshot(model, optimizers, parallel)
            if rank < weight_shards:
                _save_weights(snapshot.weights, temporary / _shard_name(_weights_stem(metadata), rank, weight_shards))
            state = {"optimizers": snapshot.states, "rng": snapshot.rng}
            save_tensors(state, temporary / _shard_name("optimizer", rank, world_size))
        except (OSError, RuntimeError, SafetensorError) as caught:
            if world_size == 1:
                raise
            error = f"process {rank}: {caught}"
        if world_size > 1 and any(errors := all_gather(error)):
            raise OSError("; ".join(filter(None, errors)))
        if rank == 0:
            files = {path.name: _describe_file(path) for path in sorted(temporary.iterdir())}
            description = {"step": step, "model": asdict(model.config), **metadata, "files": files}
            (temporary / "checkpoint.json").write_text(dumps_with_checksum(description), encoding="utf-8")


def _save_weights(weights: dict[str, Tensor], path: Path) -> None:
    head = {key: weight for key, weight in weights.items() if key.startswith("scalar_head.")}
    save_safetensors({key: weight for key, weight in weights.items() if key not in head}, path)
    if head:
        save_safetensors(head, path.with_name(_HEAD_NAME))


def _weights_stem(description: dict[str, Any] | None) -> str:
    return "adapter" if description and "adapter" in description else "model"


def _shard_name(stem: str, shard: int, shards: int) -> str:
    suffix = ".pt" if stem == "optimizer" else ".safetensors"
    return f"{stem}{suffix}" if shards == 1 else f"{stem}-{shard + 1}-of-{shards}{suffix}"


def _shard_names(stem: str, files: dict[str, Any]) -> list[str]:
    """Return the names of all shards, if ``files`` has them; else the name of the only file."""
    counts = [match[1] for name in files if (match := re.fullmatch(rf"{stem}-1-of-([0-9]+)\..*", name))]
    shards = int(counts[0]) if counts and int(counts[0]) <= len(files) else 1
    return [_shard_name(stem, shard, shards) for shard in range(shards)]


def _describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_checksum(path.open("rb"))}


def read_description(directory: Path) -> dict[str, Any] | None:
    """Return the content of ``checkpoint.json`` if ``directory`` is an intact checkpoint, else None."""
    try:
        match loads_with_checksum((directory / "checkpoint.json").read_bytes()):
            case {"step": int(), "model": dict(), "files": dict(files)} as description if files.keys() - {
                _HEAD_NAME
            } == {*_shard_names(_weights_stem(description), files), *_shard_names("optimizer", files)}:
                paths = {name: directory / name for name in files}
                # Only regular files: reading a device or a named pipe may never end.
                is_intact = all(paths[name].is_file() and _describe_file(paths[name]) == files[name] for name in files)
                return description if is_intact else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _require_description(directory: Path) -> dict[str, Any]:
    description = read_description(directory)
    if description is None:
        raise UserError(f"{directory} is not an intact checkpoint.")
    return description


def step_name(step: int) -> str:
    """Return the directory name of a checkpoint. Names get longer past step 9,999,999, so sort them by number."""
    return f"step-{step:07d}"


def step_number(name: str) -> int:
    """Return the step of a checkpoint from the name of its directory, or -1 if no checkpoint has such a name."""
    match = re.fullmatch("step-([0-9]+)", name)
    return int(match[1]) if match else -1


def step_directories(directory: Path) -> list[Path]:
    """Return all ``step-NNNNNNN`` directories in ``directory``, intact or not, sorted by number."""
    numbered = sorted((step_number(path.name), path) for path in directory.glob("step-*"))
    return [path for step, path in numbered if step >= 0]


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the intact checkpoint in ``directory`` with the highest step, or None."""
    described = ((read_description(path), path) for path in step_directories(directory))
    intact = [(description["step"], path) for description, path in described if description]
    return max(intact)[1] if intact else None


def load_training(
    directory: Path,
    model: TransformerLM,
    optimizers: list[torch.optim.Optimizer],
    parallel: Parallel | None = None,
    description: dict[str, Any] | None = None,
) -> int:
    """Restore all state of a checkpoint, and return its step.

    With ``parallel``, each rank restores its rows. If it shards no state, only rank 0 reads the directory, which other
    machines may not have. ``description`` is that of :func:`read_description`; if it is given, the files are not hashed
    again. Raises UserError if the checkpoint is damaged or does not fit.
    """

    def read() -> tuple[dict[str, list[Tensor]], list[Any], int]:
        about = description or _require_description(directory)
        weights = _read_weights(directory, about, has_scalar_head=_HEAD_NAME in about["files"])
        shards = [read_tensors(directory / name, mmap=True) for name in _shard_names("optimizer", about["files"])]
        return weights, shards, about["step"]

    weights, shards, step = call_on_rank0(read) if parallel and not parallel.shards_state else read()
    params = dict(model.named_parameters())
    load_weights(model, _join_weights(weights, directory, params, parallel), str(directory))
    states = []
    for shard in shards:
        match shard:
            case {"optimizers": list(shard_states), "rng": {"cpu": torch.Tensor(), "cuda": list()}}:
                states.append(shard_states)
            case _:
                raise UserError(
                    f"The checkpoint {directory} lacks the states of optimizers or random number generators."
                )
    local_optimizers = [parallel.local(o) if parallel else o for o in optimizers]
    try:
        if len(shards) > 1 or (parallel and parallel.shards_state):
            by_optimizer = zip(local_optimizers, *states, strict=True)
            states = [[_select_state(optimizer, list(dicts), parallel) for optimizer, *dicts in by_optimizer]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise UserError(f"{directory} belongs to another optimizer config: {error}") from None
    load_optimizer_states(local_optimizers, states[0], str(directory))
    rng = shards[0]["rng"]
    try:
        torch.set_rng_state(rng["cpu"])
        if len(rng["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(rng["cuda"])
    except (TypeError, RuntimeError) as error:
        raise UserError(f"The checkpoint {directory} has an invalid random number generator state: {error}") from None
    return step


def _select_state(
    optimizer: torch.optim.Optimizer, shards: list[dict[str, Any]], parallel: Parallel | None
) -> dict[str, Any]:
    """Return the state of the rows that ``optimizer`` has, from the state dicts of all shards."""
    state = {}
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        entries = [shard["state"][index] for shard in shards if index in shard["state"]]  # one may have no rows of it
        if entries and p.numel():
            state[index] = {
                key: shard_like(_select_rows([entry[key] for entry in entries], p, parallel), p)
                if isinstance(value, Tensor) and value.ndim
                else value
                for key, value in entries[0].items()
            }
    return {"state": state, "param_groups": shards[0]["param_groups"]}


def _select_rows(shards: list[Tensor], p: nn.Parameter | None, parallel: Parallel | None) -> Tensor:
    """Return the rows that this rank has of the parameter ``p`` from the shards of a tensor; all rows without ``p``."""
    bounds = parallel.bounds(p) if parallel and p is not None else None
    if bounds is None:
        rows = shards[0] if len(shards) == 1 else torch.cat(shards)
    else:
        start, stop = bounds[get_rank()], bounds[get_rank() + 1]
        pieces, first = [], 0
        for shard in map(torch.atleast_1d, shards):
            pieces.append(shard[max(0, start - first) : max(0, stop - first)])
            first += len(shard)
        rows = torch.cat(pieces)  # copies: a view would keep the whole in memory
    return rows.view(p.shape) if p is not None and rows.numel() == p.numel() else rows  # a scalar may be saved as a row


def _read_weights(
    directory: Path, description: dict[str, Any], has_scalar_head: bool, is_mapped: bool = False
) -> dict[str, list[Tensor]]:
    """Return the shards of each weight. Raises UserError if a file is damaged or the shards have different tensors."""
    names = _shard_names(_weights_stem(description), description["files"])
    read = map_safetensors if is_mapped else read_safetensors
    shards = [read(directory / name) for name in names]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise UserError(f"The parts of the checkpoint {directory} hold different tensors.")
    weights = {name: [shard[name] for shard in shards] for name in shards[0]}
    if has_scalar_head:
        weights |= {name: [tensor] for name, tensor in read_safetensors(directory / _HEAD_NAME).items()}
    return weights


def read_weights(
    directory: Path, description: dict[str, Any], has_scalar_head: bool = False, is_mapped: bool = False
) -> dict[str, Tensor]:
    """Return the weights of a checkpoint: of an adapter's, its matrices. ``description`` is that of
    :func:`read_description`. Raises UserError if a file is damaged or the shards do not fit together."""
    return _join_weights(_read_weights(directory, description, has_scalar_head, is_mapped), directory)


def _join_weights(
    weights: dict[str, list[Tensor]],
    directory: Path,
    params: dict[str, nn.Parameter] | None = None,
    parallel: Parallel | None = None,
) -> dict[str, Tensor]:
    """Join the shards of each weight; see :func:`_select_rows`. Raises UserError if they do not fit together."""
    params = params or {}
    try:
        return {name: _select_rows(shards, params.get(name), parallel) for name, shards in weights.items()}
    except RuntimeError as error:
        raise UserError(f"The parts of the checkpoint {directory} do not fit together: {error}") from None


def load_model(
    directory: Path,
    device: str | torch.device = "cpu",
    has_scalar_head: bool = False,
    config: ModelConfig | None = None,
    is_mapped: bool = False,
) -> TransformerLM:
    """Load the model of a checkpoint directory in evaluation mode, without its scalar head unless ``has_scalar_head``.

    Weights of 16 bits, of an imported model, become float32. An adapter is fused into its base, which is loaded too.
    ``config`` replaces that of the checkpoint, for another context. With ``is_mapped``, on the CPU, the weights of a
    whole model stay in their files, in their dtypes: a caller that converts them has one tensor in memory at a time
    and checks that they are finite. Raises UserError if a checkpoint is missing or damaged, or a weight is not finite.
    """
    description = _require_description(directory)
    try:
        config = config or ModelConfig(**description["model"])
    except TypeError as error:
        raise UserError(f"The checkpoint {directory} cannot be read: {error}") from None
    weights = read_weights(directory, description, has_scalar_head, is_mapped)
    if "adapter" in description:
        return _load_fused(directory, config, description["adapter"], weights, device, has_scalar_head)
    model = create_empty_model(config, len(weights), str(directory))
    if has_scalar_head:
        model.add_scalar_head()
    if is_mapped:
        assign_weights(model, weights, str(directory), device)
        return model.eval()
    # The files are memory-mapped. One tensor at a time is copied, so that no device holds the weights twice.
    copies = {}
    for key in list(weights):
        weight = weights.pop(key)
        copies[key] = weight.to(device, torch.float32 if weight.is_floating_point() else weight.dtype, copy=True)
    assign_weights(model, copies, str(directory), device)
    check_weights_are_finite(model.state_dict(), str(directory))
    return model.eval()


def _load_fused(
    directory: Path,
    config: ModelConfig,
    about: dict[str, Any],
    weights: dict[str, Tensor],
    device: str | torch.device,
    has_scalar_head: bool,
) -> TransformerLM:
    """Return the base of the adapter ``weights`` with the adapter fused into it, in float32."""
    adapter, digest = read_adapter(about, weights, str(directory))
    model = load_model(find_base(directory, digest), device, config=config)
    with torch.random.fork_rng(devices=[]):  # the initial matrices are replaced
        add_adapter(model, adapter)
    if has_scalar_head:
        model.add_scalar_head()
    check_weights_are_finite(weights, str(directory))
    load_weights(model, weights, str(directory))
    return fuse_adapter(model.float()).eval()


def weights_digest(description: dict[str, Any]) -> str:
    """Return the SHA-256 of the digests of a checkpoint's weights: of an adapter those of its base too."""
    names = _shard_names(_weights_stem(description), description["files"])
    digests = [description["files"][name]["sha256"] for name in names]
    base = [description["adapter"]["base"]] if "adapter" in description else []
    return hashlib.sha256(json.dumps([*digests, *base]).encode()).hexdigest()


def find_base(directory: Path, digest: str) -> Path:
    """Return the checkpoint of the base of the adapter in the checkpoint ``directory``: the one with this digest.

    Raises UserError if there is no such checkpoint, or if it is damaged.
    """
    candidates = possible_bases(directory)
    for path in candidates:
        description = read_description(path)
        if description and weights_digest(description) == digest:
            return path
    state = "is another model" if read_description(candidates[0]) else "is missing or damaged"
    raise UserError(
        f"{directory} holds an adapter, and the checkpoint of its base, {candidates[0]}, {state}. Put the base there, "
        "or train the adapter again."
    )
