"""Layer-wise offload: a DiT runs in the room of its other weights and two blocks, as vLLM-Omni's backend of this name.

There are no hooks on blocks here. The engine learns the order in which weights are used and fetches ahead, whatever the
lists are called and however many there are; a step that skips blocks costs time at most, and after the last block the
first one is fetched again. The backend only turns "two blocks, and so many bytes resident" into a budget.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..settings import OffloadSettings
from ..streaming import part_sizes
from ._config import OffloadBackend, OffloadConfig
from ._discovery import ModuleDiscovery, require_dits
from ._dtensor import is_sharded
from ._exclusion import Exclusion
from ._hook import give_back, open_exclusion

log = logging.getLogger(__name__)

_NAMES, _OLD_NAME = "_layerwise_offload_blocks_attrs", "_layerwise_offload_blocks_attr"
_RESIDENT_BELOW = 64 << 10  # bytes: norms and biases of a block, which cost more to send than to keep
_BLOCKS = 2  # the one that runs and the next one


class LayerWiseOffloadBackend(OffloadBackend):
    """A pipeline's DiTs are streamed block by block; its other components come when they are used, and stay."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._dits: Exclusion | None = None
        self._others: Exclusion | None = None

    def enable(self, pipeline: Any) -> None:
        """Raises InputError if there is no DiT, or a component has DTensor weights; BudgetError, ManagedModuleError."""
        if self.enabled:
            log.warning("This backend is enabled already. Call disable() before it takes another pipeline.")
            return
        found = ModuleDiscovery.discover(pipeline)
        require_dits(found, pipeline)
        dits = dict(zip(found.dit_names, found.dits, strict=True))
        components = found.named()
        for name, module in components.items():
            if is_sharded(module):
                raise InputError(
                    f"{name} has DTensor weights, which can't be streamed. Use OffloadStrategy."
                    "MODEL_LEVEL with use_hsdp=True: it moves them as a whole."
                )
        if self.config.strict:
            log.info("strict=True: accepted, no effect because a streamed DiT leaves room for the other components.")
        budget = self._budget(found.dits)
        settings = self.config.settings or OffloadSettings()
        for_dits = replace(settings, device_memory=budget, activation_memory=0, resident_below=_RESIDENT_BELOW)
        pin = self.config.pin_cpu_memory
        self._dits = open_exclusion(
            found.dits, self.device, pin_memory=pin, use_hsdp=self.config.use_hsdp, settings=for_dits
        )
        self._others = Exclusion(self.device, pin_memory=pin, settings=_beside(settings, budget))
        try:
            members = self._dits.add(dits)
            for member in members:
                member.rivals = [other for other in members if other is not member]
            self._others.add({name: module for name, module in components.items() if name not in dits})
        except BaseException:
            self.disable()
            raise
        self.enabled = True

    def disable(self) -> None:
        exclusions = [each for each in (self._others, self._dits) if each is not None]
        self._dits, self._others, self.enabled = None, None, False
        give_back((), [member for each in exclusions for member in each.members()])

    def device_bytes(self) -> dict[str, int]:
        """Bytes of weights on the device by component."""
        exclusions = [each for each in (self._dits, self._others) if each is not None]
        return {name: nbytes for each in exclusions for name, nbytes in each.device_bytes().items()}

    @property
    def device_budget_bytes(self) -> int:
        """The most that the DiTs take on the device, weights of all kinds and copies in flight. 0 if not enabled."""
        return self._dits.device_budget_bytes if self._dits is not None else 0

    @staticmethod
    def get_blocks_attr_names(model: nn.Module) -> list[str]:
        """Dotted names of a model's block lists: what it or its class says in `_layerwise_offload_blocks_attrs`, or all
        outermost `ModuleList`s of two modules or more."""
        said = getattr(model, _NAMES, None) or getattr(model, _OLD_NAME, None)
        if said is not None:
            return [said] if isinstance(said, str) else list(said)
        names: list[str] = []
        for name, part in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in names)
            if isinstance(part, nn.ModuleList) and len(part) >= 2 and not inside:
                names.append(name)
        return names

    @staticmethod
    def set_blocks_attr_names(model: nn.Module, names: Sequence[str]) -> None:
        """Says which block lists this model has. Other models of its class aren't concerned."""
        vars(model)[_NAMES] = tuple(names)

    @staticmethod
    def get_blocks_from_dit(model: nn.Module) -> list[nn.Module]:
        """The blocks of all lists, in their order. Raises InputError for a name that is none of the model's lists."""
        return [block for _, block in _named_blocks(model)]

    def _budget(self, dits: Sequence[nn.Module]) -> int | str:
        """Bytes for the DiTs: what isn't in blocks, two of the largest blocks, and what shall be resident."""
        asked = self.config.settings.device_memory if self.config.settings is not None else "auto"
        if asked != "auto":
            if self.config.resident_bytes:
                log.info("resident_bytes: accepted, no effect because settings.device_memory says what DiTs may take.")
            return asked
        if self.config.resident_bytes < 0:
            raise InputError(f"resident_bytes is {self.config.resident_bytes}; use a number of bytes from 0 on.")
        sizes = [_sizes(dit) for dit in dits]
        stays = sum(small for small, _, _ in sizes)
        takes_turns = max(rest + _BLOCKS * block for _, rest, block in sizes)
        return stays + takes_turns + self.config.resident_bytes


def _beside(settings: OffloadSettings, budget: int | str) -> OffloadSettings:
    """Settings for what runs beside the DiTs: in what is left on the device where no one said how much that is."""
    if settings.device_memory != "auto" or not isinstance(budget, int):
        return replace(settings, resident_below=0)
    return replace(settings, device_memory=f"leave {budget}", resident_below=0)


def _sizes(dit: nn.Module) -> tuple[int, int, int]:
    """Bytes of a DiT's weights: those that never leave the device, the others outside of blocks, those of a block."""
    blocks = [(f"{name}.", 0) for name, _ in _named_blocks(dit)]
    if not blocks:
        log.warning("%s has no list of blocks; its direct children are taken for them.", type(dit).__name__)
        blocks = [(f"{name}.", 0) for name, _ in dit.named_children()]
    by_block = dict(blocks)
    small = rest = 0
    for part in part_sizes(dit):
        name = part.sizes[0].name
        block = next((prefix for prefix in by_block if name.startswith(prefix)), None)
        if part.stays or part.is_norm or part.nbytes < _RESIDENT_BELOW:
            small += part.nbytes
        elif block is None:
            rest += part.nbytes
        else:
            by_block[block] += part.nbytes
    return small, rest, max(by_block.values(), default=0)


def _named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks: list[tuple[str, nn.Module]] = []
    for name in LayerWiseOffloadBackend.get_blocks_attr_names(model):
        try:
            found = model.get_submodule(name)
        except AttributeError:
            found = None
        if not isinstance(found, nn.ModuleList | nn.Sequential):
            raise InputError(
                f"{type(model).__name__} has no list of blocks {name!r}. Correct {_NAMES}, or leave it out."
            )
        blocks += [(f"{name}.{index}", block) for index, block in enumerate(found) if block is not None]
    return blocks
