"""What ComfyUI's list of loaded models holds for this pack: the memory of a running phase, and warm host copies.

ComfyUI asks its models for memory through the methods below, by name (a duck-typed ModelPatcher). Ours answers:

- While a phase runs it gives nothing of the phase: weights that a forward uses can't go. The phase is over when its
  node is, and then all of its memory is back. (Nodes run one after another. So whoever asks in the middle is either the
  phase itself, for room that others should make, or a thread that must wait anyway.)
- Warm host copies go at once, at any time, whoever asks for whatever: they are made again at the next use.
"""

from __future__ import annotations

from typing import Any, Protocol


class WarmCopies(Protocol):
    """Host copies of weights that wait for the next phase. `release` is safe from any thread at any moment."""

    @property
    def held_bytes(self) -> int: ...

    def release(self, nbytes: int | None = None) -> int:
        """Frees at least `nbytes` if there are as many, None: all. Returns the bytes that it freed."""


class NoCopies:
    """None are kept."""

    held_bytes = 0

    def release(self, nbytes: int | None = None) -> int:
        return 0


class PhaseOffload:
    """Stands where ComfyUI looks for a patcher's module. Its name is what the log says that it loads."""


class PhasePatcher:
    """All that this pack holds by one device: weights of the running phase there, and warm copies in RAM.

    load_device, offload_device: as ComfyUI names the execution device, and RAM. warm: copies that may be taken back.
    """

    parent = None

    def __init__(self, load_device: Any, offload_device: Any, warm: WarmCopies) -> None:
        self.load_device, self.offload_device = load_device, offload_device
        self.model = PhaseOffload()
        self._warm = warm
        self._entering = self._was_detached = False
        self._phase_bytes = 0

    # What the pack tells it.

    def begin(self) -> None:
        """A phase asks for room and is listed. Until it holds something there is nothing to make room for by ComfyUI's
        own reckoning, nor to take back: warm copies don't go for the phase that they are kept for."""
        self._entering, self._was_detached = True, False

    def hold(self, weight_bytes: int) -> None:
        """The phase takes this much of the device from now on."""
        self._entering, self._phase_bytes = False, weight_bytes

    def end(self) -> bool:
        """The phase has given everything back. Returns whether there is anything left to stand for.

        The host has forgotten a patcher that it detached. So copies that the rest of the phase made go now.
        """
        self._entering, self._phase_bytes = False, 0
        if self._was_detached:
            self._warm.release()
        return self._warm.held_bytes > 0

    # What ComfyUI asks it.

    def model_size(self) -> int:
        return 0 if self._entering else self._phase_bytes + self._warm.held_bytes

    def loaded_size(self) -> int:
        if self._entering:
            return 0
        return self._phase_bytes + (self._warm.held_bytes if self.load_device == self.offload_device else 0)

    def current_loaded_device(self) -> Any:
        return self.load_device if self.loaded_size() else self.offload_device

    def partially_load(self, device: Any, extra_bytes: float, force_patch_weights: bool = False) -> int:
        """Nothing: a phase reads its weights by itself, when it needs them."""
        return 0

    def partially_unload(self, device: Any, nbytes: float, force_patch_weights: bool = False) -> int:
        """What warm copies on this device gave. ComfyUI takes less than it asked for as a reason to detach."""
        return self._warm.release(int(nbytes) + 1) if self.load_device == self.offload_device else 0

    def detach(self, unpatch_all: bool = True) -> None:
        """unpatch_all=False: ComfyUI loads us again in the same breath, and everything stays."""
        if unpatch_all and not self._entering:
            self._was_detached = True
            self._warm.release()

    def is_clone(self, other: Any) -> bool:
        return getattr(other, "model", None) is self.model

    def model_dtype(self) -> None:
        return None

    def model_patches_to(self, device_or_dtype: Any) -> None:
        pass

    def model_patches_models(self) -> list[Any]:
        return []

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False

    def loaded_ram_size(self) -> int:
        return 0
