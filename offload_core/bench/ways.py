"""Every way to run the model that is compared: resident, mapped, this engine, and its peers.

A way is a function of the job. It imports what it needs (not timed) and returns the set-up (timed), which takes the
module as from_pretrained gives it, its weights mapped from the files, to one that is ready to run. Peers are used as
their own pages show, at the settings that hold the least memory. What can't be imported, or refuses this machine, is
a row with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .job import Job
from .model import model_class


class CannotRunError(Exception):
    """This way can't run on this machine. `str(error)` says why."""


@dataclass(frozen=True)
class Counts:
    """What an engine says about itself, from its start."""

    streamed_bytes: int
    stall_s: float
    peak_bytes: int


@dataclass
class Ready:
    """A module that is ready to run. `keep`: what has to stay alive with it."""

    module: Any
    keep: Any = None
    counts: Callable[[], Counts] | None = None
    release: Callable[[], Any] | None = None


SetUp = Callable[[Any], Ready]


@dataclass(frozen=True)
class Way:
    """`peer`: it counts when the best peer is looked for. `holds_all`: it needs room for every weight.
    `where`: "cpu", "accelerator" or "both"."""

    name: str
    title: str
    prepare: Callable[[Job], SetUp]
    peer: bool = True
    holds_all: bool = False
    where: str = "both"


def load(job: Job) -> Any:
    """The module as from_pretrained gives it: bfloat16, its weights mapped from the files."""
    import torch

    return model_class(job.family).from_pretrained(job.folder, torch_dtype=torch.bfloat16).eval()


def needs(package: str, module: str | None = None) -> Any:
    """A peer's module. Raises CannotRunError if it can't be imported."""
    try:
        return importlib.import_module(module or package.replace("-", "_"))
    except ImportError as error:
        raise CannotRunError(f"{package} can't be imported ({error})") from None


# ---------------------------------------------------------------------------------------------- the twin, ours


def _resident(job: Job) -> SetUp:
    def set_up(module: Any) -> Ready:
        if job.device != "cpu":
            return Ready(module.to(job.device))
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()  # aligned memory of its own, where a mapped tensor has the file's offset
        return Ready(module)

    return set_up


def _mmap(job: Job) -> SetUp:
    return Ready


def _ours(job: Job) -> SetUp:
    try:
        from ..settings import OffloadSettings
        from ..streaming import enable_offload
    except ImportError as error:
        raise CannotRunError(f"this engine has no streaming here ({error})") from None

    def set_up(module: Any) -> Ready:
        settings: dict[str, Any] = {"execution_device": job.device, "host_memory": "auto"}
        if job.budget_bytes is not None:
            settings["device_memory"] = job.budget_bytes
        result = enable_offload(module, settings=OffloadSettings(**settings), component="transformer")

        def counts() -> Counts:
            report = result.report()
            return Counts(report.streamed_bytes, report.stall_s, report.peak_bytes)

        return Ready(result.module, result, counts, result.release)

    return set_up


# ---------------------------------------------------------------------------------------------------- peers


def _group(level: str, *, disk: bool = False, stream: bool = False) -> Callable[[Job], SetUp]:
    def prepare(job: Job) -> SetUp:
        import torch
        from diffusers.hooks import apply_group_offloading

        def set_up(module: Any) -> Ready:
            options: dict[str, Any] = {"offload_type": f"{level}_level"}
            if level == "block":
                options["num_blocks_per_group"] = 1
            if disk:
                options["offload_to_disk_path"] = str(Path(job.scratch) / "groups")
            if stream:
                options |= {"use_stream": True, "non_blocking": True, "record_stream": True}
            apply_group_offloading(module, torch.device(job.device), torch.device("cpu"), **options)
            return Ready(module)

        return set_up

    return prepare


def _accelerate_disk(job: Job) -> SetUp:
    accelerate = needs("accelerate")

    def set_up(module: Any) -> Ready:
        accelerate.disk_offload(module, str(Path(job.scratch) / "accelerate"), execution_device=job.device)
        return Ready(module)

    return set_up


def _accelerate_cpu(job: Job) -> SetUp:
    accelerate = needs("accelerate")

    def set_up(module: Any) -> Ready:
        accelerate.cpu_offload(module, execution_device=job.device)
        return Ready(module)

    return set_up


def _ddo(job: Job) -> SetUp:
    ddo = needs("diffusers-dynamic-offloader")

    def set_up(module: Any) -> Ready:
        result = ddo.enable_offload(
            module,
            component="transformer",
            preset="low_ram_safe",
            execution_device=job.device,
            offload_device="cpu",
        )
        module = result.module.to(job.device) if result.should_move_to_execution_device else result.module
        return Ready(module, result)

    return set_up


def _mmgp(job: Job) -> SetUp:
    offload = needs("mmgp", "mmgp.offload")

    def set_up(module: Any) -> Ready:
        budget = (job.budget_bytes or 0) >> 20
        keep = offload.all({"transformer": module}, pinnedMemory=False, quantizeTransformer=False, budgets=budget)
        return Ready(module, keep)

    return set_up


def _diffusers_mm(job: Job) -> SetUp:
    mm = needs("diffusers-mm")
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    def set_up(module: Any) -> Ready:
        others = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipeline = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=module, **others)
        streams = job.device != "cpu"
        keep = mm.managed(pipeline, strategy="group_offload", device=job.device, group_offload_use_stream=streams)
        return Ready(module, keep)

    return set_up


WAYS = {
    way.name: way
    for way in (
        Way("resident", "resident", _resident, peer=False, holds_all=True),
        Way("mmap", "plain mmap", _mmap, where="cpu"),
        Way("group_block", "diffusers group, block", _group("block"), where="cpu"),
        Way("group_leaf", "diffusers group, leaf", _group("leaf"), where="cpu"),
        Way("group_block_disk", "diffusers group, block, disk", _group("block", disk=True), where="cpu"),
        Way("group_leaf_disk", "diffusers group, leaf, disk", _group("leaf", disk=True), where="cpu"),
        Way("group_block_stream", "diffusers group, block, stream", _group("block", stream=True), where="accelerator"),
        Way("group_leaf_stream", "diffusers group, leaf, stream", _group("leaf", stream=True), where="accelerator"),
        Way("accelerate_disk", "accelerate disk_offload", _accelerate_disk),
        Way("accelerate_cpu", "accelerate cpu_offload", _accelerate_cpu),
        Way("ddo", "diffusers-dynamic-offloader", _ddo),
        Way("mmgp", "mmgp", _mmgp),
        Way("diffusers_mm", "diffusers-mm", _diffusers_mm),
        Way("ours", "phase-offload", _ours, peer=False),
    )
}
