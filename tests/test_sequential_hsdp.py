"""Sequential offload of DTensor weights: FSDP2 on a 2-D mesh over gloo, with every move recorded.

One process in the default run; four of them, where weights are really sharded, with `-m slow`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest


def facts_of(rank: int, mesh_shape: tuple[int, int], store: str) -> dict[str, Any]:
    """What one process of the group sees."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mesh_shape[0] * mesh_shape[1])
    try:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        return {**_moves(mesh), **_turns(mesh)}
    finally:
        dist.destroy_process_group()


def _sharded(mesh: Any) -> tuple[Any, Any, Any]:
    """A model that FSDP2 sharded, one of its layers in shards of uneven size, with an input and the right answer."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 7), nn.Linear(7, 8)])
            self.last = nn.Linear(8, 8)  # of the root, whose weights stay gathered after a forward
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.last.weight
            self.register_buffer("shift", torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.tied(self.last(x)) + self.shift

    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    x = torch.rand(2, 8)
    expected = model(x)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, x, expected


def _moves(mesh: Any) -> dict[str, Any]:
    import torch

    from offload_core.ledger import Ledger
    from offload_core.sequential._dtensor import ShardedComponent, fresh_copy, is_sharded

    model, x, expected = _sharded(mesh)
    cpu = torch.device("cpu")
    moves: list[Any] = []
    facts: dict[str, Any] = {}
    fail_at = 0

    def move(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        moves.append((tensor.data_ptr(), device, non_blocking, type(tensor)))
        if len(moves) == fail_at:
            raise MemoryError("out of memory")
        return fresh_copy(tensor, device, non_blocking)

    def state() -> Any:
        return {
            name: (id(p), p._local_tensor.data_ptr(), p.device_mesh is not None and p.placements, p.dtype)
            for name, p in model.named_parameters(remove_duplicate=False)
        }

    def even(state: Any) -> Any:
        """What FSDP pads it copies anew whenever its weights are exchanged: no storage of those is the one before."""
        return {name: entry for name, entry in state.items() if not name.startswith("blocks.1")}

    ledger = Ledger(device=1 << 20, host=1 << 20)
    before, meshes = state(), {name: p.device_mesh for name, p in model.named_parameters()}
    component = ShardedComponent(model, "dit", cpu, ledger, non_blocking=True, move=move)
    facts["is sharded"] = is_sharded(model)
    facts["nothing moves before it is needed"] = moves == [] and even(state()) == even(before)

    component.wake()
    facts["each shard once, ties too"] = len(moves) == len({id(p) for p in model.parameters()}) + 1
    facts["plain shards, as asked"] = all(
        device == cpu and non_blocking is True and kind is torch.Tensor for _, device, non_blocking, kind in moves
    )
    awake = state()
    facts["same objects, mesh and placements"] = all(
        (awake[name][0], awake[name][2]) == (before[name][0], before[name][2]) for name in before
    ) and all(p.device_mesh is meshes[name] for name, p in model.named_parameters())
    sent = {name for name, p in model.named_parameters() if p._local_tensor.numel()}
    facts["fresh storage"] = all(awake[name][1] != before[name][1] for name in sent)
    facts["booked"] = ledger.used("device") == component.nbytes > 0

    kept = {path: master.clone() for path, master in component._masters.items()}
    for master in component._masters.values():
        master.fill_(float("nan"))  # nobody may compute with a master
    facts["computes with the fresh shards"] = torch.equal(model(x), expected)
    for path, master in component._masters.items():
        master.copy_(kept[path])

    versions = {path: master._version for path, master in component._masters.items()}
    moves.clear()
    component.rest()
    facts["rest copies nothing"] = moves == [] and versions == {
        path: master._version for path, master in component._masters.items()
    }
    facts["the masters are back"] = even(state()) == even(before)
    facts["given back"] = ledger.used("device") == 0

    component.wake()
    model(x)
    model.reshard()
    model.blocks[0].weight.mul_(2)
    component.rest()
    facts["an edited shard is kept"] = torch.equal(
        model.blocks[0].weight._local_tensor, kept["blocks.0.weight"] * 2
    ) and torch.equal(model.last.weight._local_tensor, kept["last.weight"])
    model.blocks[0].weight.div_(2)

    count = len({id(p) for p in model.parameters()}) + 1
    failures = []
    for k in range(1, count + 1):
        moves.clear()
        fail_at = k
        try:
            component.wake()
        except MemoryError:
            failures.append(even(state()) == even(before) and not component.awake and ledger.used("device") == 0)
        fail_at = 0
    facts["a move that fails changes nothing"] = failures == [True] * count
    component.wake()
    facts["and the next one works"] = torch.equal(model(x), expected)
    component.release()
    facts["restored"] = even(state()) == even(before)
    return facts


def _turns(mesh: Any) -> dict[str, Any]:
    import torch
    from torch import nn

    from offload_core.errors import InputError
    from offload_core.sequential import apply_sequential_offload, remove_sequential_offload
    from offload_core.sequential._exclusion import member_of

    model, x, expected = _sharded(mesh)
    encoder = nn.Linear(8, 8).requires_grad_(False)
    before = {name: p._local_tensor.data_ptr() for name, p in model.named_parameters() if "blocks.1" not in name}
    traces = {name: set(vars(part)) | {f"{len(part._forward_pre_hooks)} hooks"} for name, part in model.named_modules()}
    facts: dict[str, Any] = {}
    try:
        apply_sequential_offload([model], [encoder], torch.device("cpu"))
    except InputError as error:
        facts["DTensors have to be said"] = "use_hsdp=True" in str(error)
    apply_sequential_offload([model], [encoder], torch.device("cpu"), use_hsdp=True)
    dit, text = member_of(model), member_of(encoder)
    assert dit is not None and text is not None
    first_hook = next(iter(model._forward_pre_hooks.values()))
    facts["it wakes before FSDP gathers"] = getattr(first_hook, "__name__", "") == "_wake_first"
    encoder(x)
    first = dit.component.device_bytes
    facts["dit runs"] = torch.equal(model(x), expected) and torch.equal(model(x), expected)
    facts["turns"] = first == 0 < dit.component.device_bytes and text.component.device_bytes == 0
    encoder(x)
    facts["back"] = dit.component.device_bytes == 0 < text.component.device_bytes
    with torch.inference_mode():
        facts["in inference mode"] = torch.equal(model(x), expected)
    remove_sequential_offload([model, encoder])
    facts["removed"] = all(dict(model.named_parameters())[n]._local_tensor.data_ptr() == at for n, at in before.items())
    facts["no trace"] = traces == {
        name: set(vars(part)) | {f"{len(part._forward_pre_hooks)} hooks"} for name, part in model.named_modules()
    }
    facts["runs after"] = torch.equal(model(x), expected)
    return facts


def run(mesh_shape: tuple[int, int], folder: Path) -> list[dict[str, Any]]:
    world = mesh_shape[0] * mesh_shape[1]
    arguments = [json.dumps(mesh_shape), str(folder / "store")]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-4000:]
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return results


def check(results: list[dict[str, Any]]) -> None:
    wrong = {f"{rank}: {name}": fact for rank, facts in enumerate(results) for name, fact in facts.items() if not fact}
    assert wrong == {}
    assert all(len(facts) == len(results[0]) >= 20 for facts in results)


def test_dtensor_weights_move_as_shards_and_come_back(tmp_path: Path) -> None:
    check([facts_of(0, (1, 1), str(tmp_path / "store"))])


@pytest.mark.slow
def test_dtensor_weights_move_as_shards_and_come_back_in_four_processes(tmp_path: Path) -> None:
    check(run((2, 2), tmp_path))


if __name__ == "__main__":
    try:
        print(json.dumps(facts_of(int(sys.argv[1]), tuple(json.loads(sys.argv[2])), sys.argv[3])))
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
