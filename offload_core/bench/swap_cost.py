"""What it costs that two components take turns: sequential offload beside a swap that copies back.

Copying back is the usual way (vLLM-Omni's `SequentialOffloadHook` does it): the component that leaves is copied to RAM
and pinned there, then the one that comes is copied to the device. Here a component that rests keeps its masters where
they were, so nothing is copied for it to leave.

The seconds of a swap are those until every weight of the one that comes was touched on the device. On the CPU there is
no link, and the seconds of the two aren't of one thing: a swap that copies back goes from RAM to RAM and holds all
weights there, while ours reads the model's file again and holds nothing. So only bytes are set side by side then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .job import Job

ROUNDS = 3


def measure_swap(job: Job) -> dict[str, Any]:
    """Bytes and seconds of a swap, both ways, between the text encoder and the transformer of `job.folder`.

    bytes_in: copied to the device for the component that comes. bytes_back: copied to RAM for the one that leaves; of
    ours, what the ledger books more of for copies of weights. Both of one swap, the most of `ROUNDS`. swap_s: their
    median. weight_bytes: of the component that comes, the transformer. link: whether one lies between the memories.
    """
    import torch

    with torch.no_grad():
        ours = _ours(job)
        return {"ours": ours, "copy_back": _copy_back(job), "rounds": ROUNDS, "link": job.device != "cpu"}


def _ours(job: Job) -> dict[str, Any]:
    import torch

    from ..sequential import apply_sequential_offload, remove_sequential_offload
    from ..sequential._exclusion import member_of

    encoder, transformer = _components(job)
    apply_sequential_offload([transformer], [encoder], torch.device(job.device))
    member = member_of(transformer)
    assert member is not None and member.exclusion._scope is not None
    cache, ledger = member.exclusion._scope.cache, member.exclusion._scope.ledger

    def copies_in_ram() -> int:
        booked = ledger.by_kind("host")
        return booked.get("private", 0) + booked.get("masters", 0)

    found = _Rounds()
    try:
        for _ in range(ROUNDS):
            _touch(encoder)
            fetched, copies = cache.counts.fetched_bytes, copies_in_ram()
            seconds = _seconds(lambda: _touch(transformer), job)
            found.add(seconds, cache.counts.fetched_bytes - fetched, copies_in_ram() - copies)
    finally:
        remove_sequential_offload([transformer, encoder])
    return found.to_dict(_weight_bytes(transformer))


def _copy_back(job: Job) -> dict[str, Any]:
    encoder, transformer = _components(job)
    found = _Rounds()
    for _ in range(ROUNDS):
        _move(transformer, "cpu")
        _move(encoder, job.device)
        copied = [0, 0]

        def swap(copied: list[int] = copied) -> None:
            copied[:] = _move(encoder, "cpu"), _move(transformer, job.device)
            _touch(transformer)

        found.add(_seconds(swap, job), copied[1], copied[0])
    return found.to_dict(_weight_bytes(transformer))


def _touch(module: Any) -> None:
    """Uses every weight, as little of it as can be."""
    for weight in module.parameters():
        weight.flatten()[:1].clone()


def _move(module: Any, device: str) -> int:
    """Copies every weight and returns the bytes. Real copies on the CPU, too, where `.to` would copy nothing."""
    copied = 0
    for tensor in (*module.parameters(), *module.buffers()):
        left = tensor.device.type
        tensor.data = tensor.data.to(device, copy=True)
        if device == "cpu" and left != "cpu":
            tensor.data = tensor.data.pin_memory()
        copied += tensor.nbytes
    return copied


class _Rounds:
    def __init__(self) -> None:
        self._rounds: list[tuple[float, int, int]] = []

    def add(self, seconds: float, bytes_in: int, bytes_back: int) -> None:
        self._rounds.append((seconds, bytes_in, bytes_back))

    def to_dict(self, weight_bytes: int) -> dict[str, Any]:
        seconds, bytes_in, bytes_back = zip(*self._rounds, strict=True)
        return {
            "swap_s": statistics.median(seconds),
            "bytes_in": max(bytes_in),
            "bytes_back": max(bytes_back),
            "weight_bytes": weight_bytes,
        }


def _components(job: Job) -> tuple[Any, Any]:
    """The large text encoder and the transformer as their loaders map them."""
    import torch
    from diffusers import FluxTransformer2DModel
    from transformers import T5EncoderModel

    encoder = T5EncoderModel.from_pretrained(job.folder, subfolder="text_encoder_2", dtype=torch.bfloat16)
    transformer = FluxTransformer2DModel.from_pretrained(
        job.folder, subfolder="transformer", torch_dtype=torch.bfloat16
    )
    return encoder.eval(), transformer.eval()


def _seconds(run: Callable[[], Any], job: Job) -> float:
    import torch

    started = time.perf_counter()
    run()
    if job.device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _weight_bytes(module: Any) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
