"""One module under offload: its weights exchanged for streamed ones, and what it takes to give it back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ManagedModuleError, OffloadError
from ..file_backing import FileMapping, read_mappings
from ..inventory import Item, take_inventory
from ..ledger import Reservation
from ..stored_weight import StoredWeight
from ._accelerator import link_bytes
from ._compiled import compiled_blocks, install, uninstall
from ._dtypes import through
from ._forms import DtypeRule, Forms
from ._guards import ApplyGuard, check_free
from ._homes import Homes
from ._masters import HostMaster
from ._packed_weight import PackedWeight
from ._parts import Part, group_of, operator_groups, unpacking_bytes
from ._plan import PartSize, StreamPlan, WeightSize, largest_group, plan_parts, spread
from ._shape import as_bytes
from ._weight import Entry, StreamedWeight

if TYPE_CHECKING:
    from ._scope import OffloadScope


class Managed:
    """A module whose weights a scope manages. Kept alive by the module itself (by its guard)."""

    def __init__(self, scope: OffloadScope, name: str) -> None:
        self.scope, self.name = scope, name
        self.plan: StreamPlan
        self._forms: Forms
        self.attributes: dict[str, tuple[str, ...]] = {}
        self.parts: list[Part] = []
        self._guarded: list[weakref.ref[nn.Module]] = []
        self._compiled: list[weakref.ref[nn.Module]] = []
        self._extra: list[Reservation] = []
        self._homes: Homes | None = None
        self.root: weakref.ref[nn.Module] | None = None
        self.at_release: list[Callable[[], None]] = []
        self.released = False
        self.resting = False  # see `_turns`

    # --- attach --------------------------------------------------------------------------------------------------

    def attach(
        self,
        module: nn.Module,
        files: Sequence[Path] | None,
        dtype_of: DtypeRule | None,
        *,
        restore: bool,
        plain_if_whole: bool,
        keep_grad: bool,
        planned: StreamPlan | None = None,
        added_bytes: int = 0,
        homes: Homes | None = None,
        was_there: bool = False,
        stored: Mapping[str, StoredWeight] | None = None,
        pack: Collection[str] = (),
    ) -> None:
        """Takes `module` over. Nothing of it has changed if this raises.

        restore: keep what `release` needs to give the module back as it was. plain_if_whole: if everything fits, the
        module gets ordinary tensors and no wrappers. keep_grad: weights require grad if they did before; else none do.
        planned: what was planned before for this module; followed if it still fits. added_bytes: of weights that it
        will be given on the execution device right after (LoRA): they are booked here, see `book_new`. homes: where
        its tensors were before, `release` takes them back there. was_there: what lies in RAM did so already when the
        budgets were measured, so that it needs no part of an "auto" one. stored: how cold weights are made from files,
        by name. pack: names of weights that are packed on their way in.
        """
        check_free(module, self.name)
        self._homes = homes
        self._forms = Forms(self.scope, self.name, keep_grad=keep_grad, was_there=was_there, pack=pack)
        mappings = read_mappings()
        found = _mapped_files(mappings) if files is None else files
        inventory = take_inventory(module, found, stored=stored, mappings=lambda: mappings)
        self.attributes = inventory.attributes
        items = [item for item in inventory.items if not self._is_absent(item)]
        rules = [self._forms.rule_of(item) for item in items]
        try:
            self.parts = [self._forms.part(item, rule, dtype_of) for item, rule in zip(items, rules, strict=True)]
            blocks = compiled_blocks(module, self.name)
            groups = operator_groups(module, [path for path, _ in blocks])
            widened = [part.item.nbytes for part in self.parts if part.is_widened]
            if widened:
                self.scope.engine.prepare_casts(max(widened))
            shapes = {
                part.name: (part.layout.shape, part.layout.dtype)
                for part in self.parts
                if part.rule.rule == "packed" and part.layout is not None and not part.is_lookup
            }
            unpacking = unpacking_bytes(shapes, groups)
            missing = max(unpacking - self.scope.unpacking_bytes, 0)
            small, large = self._split_and_plan(groups, planned, added_bytes + missing)
            self.scope.keep_unpacking(unpacking)
            if added_bytes:
                self._extra.append(self.scope.ledger.reserve("device", "adapters", added_bytes, self.name))
            if self.plan.whole and plain_if_whole:
                small, large = [*small, *large], []
            for part in small:
                part.plain = True
            self._load_plain(small)
            for part in large:
                self._forms.give_masters(part)
                part.replacement = self._forms.wrapper(part)
            self.plan_host(large)
            for part in self.parts:
                part.original = part.item.tensor if restore or part.untouched else None
            self._exchange(module)
            for _, block in blocks:
                install(block)
                self._compiled.append(weakref.ref(block))
            for part in self.parts:
                part.forget_module()
        except BaseException:
            for part in self.parts:
                if part.layer_home is not None:
                    self._move_layers(part, part.layer_home)
            self.scope.cache.release([entry for part in self.parts for entry in part.entries])
            self._give_back_masters()
            self.parts = []
            raise

    def _is_absent(self, item: Item) -> bool:
        """Whether a weight was left out on purpose (a half of a VAE that isn't needed): it stays cold."""
        if not isinstance(item.tensor, StreamedWeight) or item.stored is not None:
            return False
        if item.tensor._entry.cache is not None:
            raise ManagedModuleError(f"{item.tensor._entry.name} is under offload already. Release that one first.")
        return True

    def _split_and_plan(
        self, groups: dict[str, str], planned: StreamPlan | None, added_bytes: int
    ) -> tuple[list[Part], list[Part]]:
        """Parts that stay on the device (small, mutable, or of a class that can't be streamed), and parts that the plan
        is for."""
        sizes = [self._size(part, groups) for part in self.parts]
        self.scope.make_room(sum(size.nbytes for size in sizes) + added_bytes)
        cache = self.scope.cache
        self.plan, is_small = plan_parts(
            sizes,
            resident_below=self.scope.settings.resident_below,
            ahead=lambda sizes: cache.fetches_ahead(size.nbytes for size in sizes),
            added_bytes=added_bytes,
            available=self.scope.available(),
            resident_limit=self.scope.resident_limit,
            ring_there=cache.ring.largest,
            ring_for_others=self.scope.largest_bytes,
            align=self.scope.engine.align,
            name=self.name,
            device=str(self.scope.device),
        )
        if planned is not None and planned.can_replace(self.plan):
            self.plan = planned
        small = [part for part, stays in zip(self.parts, is_small, strict=True) if stays]
        large = [part for part, stays in zip(self.parts, is_small, strict=True) if not stays]
        for entry in (entry for part in large for entry in part.entries):
            entry.resident = self.plan.whole or entry.names[0] in self.plan.resident
            entry.lookup_only &= not self.plan.whole
        return small, large

    def _size(self, part: Part, groups: dict[str, str]) -> PartSize:
        for entry in part.entries:
            entry.group, entry.lookup_only = group_of(part.name, groups), part.is_lookup
        sizes = tuple(WeightSize(e.names[0], e.nbytes, e.group, e.lookup_only) for e in part.entries)
        return PartSize(sizes, part.nbytes, part.item.kind == "buffer" or not part.entries, part.is_norm)

    def _load_plain(self, parts: list[Part]) -> None:
        entries = []
        for part in parts:  # before the first layer moves, and all of its weights with it
            if part.moves_with_layer and not part.untouched:
                part.layer_home = part.item.tensor.device
        for part in parts:
            if part.untouched:
                part.reservation = self.scope.ledger.reserve("device", "resident", part.item.nbytes, part.name)
            elif not part.entries:
                part.reservation = self.scope.ledger.reserve("device", "resident", part.item.nbytes, part.name)
                if part.layer_home is not None:
                    self._move_layers(part, self.scope.device)
                else:
                    part.replacement = part.item.tensor.to(self.scope.device)
            else:
                self._forms.give_masters(part)
                for entry in part.entries:
                    entry.resident = True
                entries += part.entries
        self.scope.cache.load(entries)
        for part in parts:
            if part.entries:
                part.replacement = self._forms.plain_tensor(part)

    def _move_layers(self, part: Part, device: torch.device) -> None:
        for place in part.places:
            owner = place.owner()
            if owner is not None:
                owner.to(device)

    def plan_host(self, parts: list[Part]) -> None:
        """Which streamed weights stay in pinned memory, spread evenly; the others are read anew each time."""
        streamed = [
            entry
            for part in parts
            for entry in part.entries
            if not entry.resident and not entry.lookup_only and entry.master is not None and entry.master.in_file
        ]
        room = self.scope.engine.pinned_free - self.scope.promised_host_bytes
        sizes = [WeightSize(entry.names[0], link_bytes(entry)) for entry in streamed]
        total = sum(size.nbytes for size in sizes)
        names = {size.name for size in sizes} if total <= room else set(spread(sizes, max(room, 0)))
        for entry in streamed:
            entry.keep_on_host = entry.names[0] in names
        self.scope.engine.want_pinned(sum(size.nbytes for size in sizes if size.name in names))

    def _exchange(self, module: nn.Module) -> None:
        """Puts everything in place. Only assignments: it can't stop half-way."""
        self.root = weakref.ref(module)
        cache = self.scope.cache
        if self.plan.ring_bytes > 0:
            cache.add_arena(self.plan.ring_bytes)
        cache.add(entry for part in self.parts for entry in part.entries)
        for part in self.parts:
            if part.replacement is not None:
                for place in part.places:
                    place.put(part.replacement)
        for path, owner in module.named_modules():
            name = f"{self.name}.{path}" if path else self.name
            here = weakref.ref(owner)
            guard = ApplyGuard(name, self.scope.device, partial(self.recast, here), here, owner=self)
            owner.__dict__["_apply"] = guard
            self._guarded.append(weakref.ref(owner))

    # --- while it is attached --------------------------------------------------------------------------------------

    def recast(self, within: weakref.ref[nn.Module], dtype: torch.dtype) -> None:
        """What `within.to(dtype)` means: its floating weights and buffers are of that dtype from now on, also those
        that were added or assigned after attach. Raises BudgetError if no ring holds them then; nothing has changed.
        """
        module = within()
        if module is None:
            return
        parts = {(id(place.owner()), place.key): part for part in self.parts for place in part.places}
        found: list[tuple[dict[str, Any], str, torch.Tensor, Part | None]] = [
            (tensors, key, tensor, parts.get((id(owner), key)))
            for owner in module.modules()
            for tensors in (owner._parameters, owner._buffers)
            for key, tensor in tensors.items()
            if tensor is not None and tensor.is_floating_point()
        ]
        for _, _, tensor, _ in found:
            if isinstance(tensor, PackedWeight):
                tensor.recast(dtype)
        found = [each for each in found if not isinstance(each[2], PackedWeight)]
        streamed = {tensor._entry: None for _, _, tensor, _ in found if isinstance(tensor, StreamedWeight)}
        sizes = [
            WeightSize(entry.names[0], entry.layout.with_dtype(dtype).nbytes, entry.group)
            for entry in streamed
            if not entry.lookup_only
        ]
        needed = largest_group(sizes, self.scope.engine.align)
        if needed > self.scope.cache.ring.largest > 0:
            self.scope.cache.add_arena(needed)
        for entry in streamed:
            self._recast_streamed(entry, dtype)
        for tensors, key, tensor, part in found:
            if isinstance(tensor, StreamedWeight):
                continue
            if part is None or not self._is_ours(part, tensor):
                tensor.data = tensor.data.to(dtype)
            elif part.rule.rule != "plain":
                tensors[key] = tensor.to(dtype)
            elif part.plain and part.entries:
                self._recast_plain(part, dtype)
            else:
                tensor.data = tensor.data.to(dtype)

    def _recast_plain(self, part: Part, dtype: torch.dtype) -> None:
        current = part.places[0].get()
        if current is None or current.dtype == dtype:
            return
        entry = part.entries[0]
        self.scope.cache.replace_hot(entry, entry.layout.with_dtype(dtype), through(entry, dtype))
        if part.item.kind == "buffer":
            for place in part.places:
                place.put(entry.hot)
        else:
            current.data = entry.hot

    def _recast_streamed(self, entry: Entry, dtype: torch.dtype) -> None:
        if entry.layout.dtype == dtype:
            return
        self.scope.cache.recast(entry, dtype, through(entry, dtype))
        for ref in list(entry.wrappers):
            wrapper = ref()
            if wrapper is not None:
                torch.Tensor.data.__set__(wrapper, StreamedWeight(entry, self.scope.device))  # type: ignore[attr-defined]

    def book_new(self, module: nn.Module) -> None:
        """Books weights that were added after attach (LoRA) and lie on the execution device, as far as they are more
        than was said there; others make room."""
        nbytes = max(self.new_bytes(module) - sum(booked.nbytes for booked in self._extra), 0)
        if nbytes:
            self.scope.make_room(nbytes)
            self._extra.append(self.scope.ledger.reserve("device", "adapters", nbytes, self.name))

    @property
    def resident_bytes(self) -> int:
        """Bytes that `stream_more` could give back."""
        return sum(part.nbytes for part in self.parts if self._could_stream(part) and part.is_resident)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the ring that this module's streamed weights need at least, none while it rests."""
        if self.resting:
            return 0
        streamed = [part for part in self.parts if part.entries and not (part.plain or part.is_resident)]
        entries = [entry for part in streamed for entry in part.entries if not entry.lookup_only]
        sizes = [WeightSize(entry.names[0], entry.nbytes, entry.group) for entry in entries]
        return largest_group(sizes, self.scope.engine.align)

    def stream_more(self, nbytes: int) -> int:
        """Gives back at least `nbytes` of resident weights, as far as there are: they are streamed from now on.

        Returns the bytes. The ring grows when it has to. Nothing may be computing with the weights.
        """
        self.scope.engine.drain()
        gone = 0
        resident = [part for part in self.parts if self._could_stream(part) and part.is_resident]
        for part in sorted(resident, key=lambda part: part.nbytes, reverse=True):
            if gone >= nbytes:
                break
            gone += part.nbytes
            entry = part.entries[0]
            entry.lookup_only = part.is_lookup
            if part.plain:
                self._keep_plain_edits(part)
                part.plain = False
                if part.rule.rule != "packed":
                    wants_grad = part.replacement.requires_grad
                    part.replacement = nn.Parameter(StreamedWeight(entry, self.scope.device), requires_grad=wants_grad)
                    for place in part.places:
                        place.put(part.replacement)
                self.scope.cache.order.expect([entry])
            self.scope.cache.stream(entry)
        return gone

    def cool(self) -> None:
        """Gives back every hot copy that can be made again, and their ring. The module stays under offload."""
        if not self.released:
            self.scope.cache.cool(entry for part in self.parts if not part.plain for entry in part.entries)

    def _could_stream(self, part: Part) -> bool:
        streams = part.rule.rule in ("plain", "packed")
        is_weight = part.item.kind == "parameter" and streams and len(part.entries) == 1
        return is_weight and part.nbytes >= max(self.scope.settings.resident_below, 1)

    def new_bytes(self, module: nn.Module) -> int:
        """Bytes of parameters that were added after attach (LoRA) and lie on the execution device."""
        mine = {id(kept) for part in self.parts for kept in (part.replacement, part.original)}
        new = [p for p in module.parameters() if id(p) not in mine and not isinstance(p, StreamedWeight)]
        return sum(p.nbytes for p in new if p.device == self.scope.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and buffers in the dtype they run in, with those that were booked beside them (LoRA)."""
        return sum(part.nbytes for part in self.parts) + sum(booked.nbytes for booked in self._extra)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of what was made hot when the module was attached."""
        return sum(part.nbytes for part in self.parts if part.plain)

    @property
    def entries(self) -> list[Entry]:
        return [entry for part in self.parts for entry in part.entries]

    # --- release ---------------------------------------------------------------------------------------------------

    def release(self, *, restore: bool) -> list[tuple[weakref.ref[Any], int]]:
        """Takes every hot copy back. Returns the storages of resident wrapped ones, to see that they are gone.

        restore: the module gets its own tensors back, with the edits that were made. Otherwise it is left with cold
        weights that say so when they are touched, and whole hot copies are offered to the next phase.
        """
        if self.released:
            return []
        offered = [
            (entry, as_bytes(entry.hot))
            for entry in (self.entries if not restore and self.scope.warm is not None else ())
            if entry.hot is not None and entry.region is None and entry.mark is not None
        ]
        held = self._release(restore=restore)
        while offered:  # here, where no local of the release holds a weight any more
            self.scope.engine.give_warm(*offered.pop())
        return held

    def _release(self, *, restore: bool) -> list[tuple[weakref.ref[Any], int]]:
        self.released = True
        for end in self.at_release:
            end()
        cache = self.scope.cache
        held = [
            (weakref.ref(entry.hot.untyped_storage()), entry.nbytes)
            for part in self.parts
            for entry in part.entries
            if entry.hot is not None and entry.region is None and not part.plain
        ]
        failed: OffloadError | None = None
        for part in self.parts if restore else ():
            try:
                self._keep_plain_edits(part)
            except OffloadError as error:  # its file changed, or RAM is short: all else is given back first
                failed = failed or error.with_traceback(None)
        current = {id(part): [place.get() for place in part.places] for part in self.parts}
        strays = [
            weight._entry
            for weights in current.values()
            for weight in weights
            if isinstance(weight, StreamedWeight) and weight._entry not in set(self.entries)
        ]
        cache.release([*self.entries, *strays], keep_edits=restore)
        for part in self.parts:
            for place, now in zip(part.places, current[id(part)], strict=True):
                if not self._is_ours(part, now):
                    continue
                place.put(self._original(part, now) if restore else self._forms.cold(part))
        self._give_back_masters()
        for ref in self._compiled:
            block = ref()
            if block is not None:
                uninstall(block)
        for ref in self._guarded:
            owner = ref()
            if owner is not None and isinstance(vars(owner).get("_apply"), ApplyGuard):
                del owner.__dict__["_apply"]
        for part in self.parts:
            if restore and part.layer_home is not None:
                self._move_layers(part, part.layer_home)
        self.parts = []
        self.scope.forget(self)
        if restore and self._homes is not None:
            try:
                self._homes.restore()
            except OffloadError as error:
                failed = failed or error.with_traceback(None)
        if failed is not None:
            raise failed
        return held

    def _is_ours(self, part: Part, now: Any) -> bool:
        """Whether what is registered is what was put there (or a later form of it), not something new."""
        if part.layer_home is not None:
            return False
        return now is part.replacement or isinstance(now, StreamedWeight) or part.item.kind == "buffer"

    def _keep_plain_edits(self, part: Part) -> None:
        """A plain tensor may have been changed in ways that nothing reports: its bytes are compared."""
        if not part.plain or part.rule.rule != "plain" or not part.entries:
            return
        entry, now = part.entries[0], part.places[0].get()
        if now is None or entry.master is None or now.device != self.scope.device:
            return
        self.scope.cache.keep_if_changed(entry, now.detach())

    def _original(self, part: Part, now: Any) -> Any:
        original = part.original
        if original is None or part.untouched or part.layer_home is not None:
            return now
        entry = now._entry if isinstance(now, StreamedWeight) else part.entries[0] if part.entries else None
        master = entry.master if entry is not None else None
        if isinstance(master, HostMaster) and part.rule.rule == "plain":
            with torch.no_grad():
                original.data = master.tensor.to(original.dtype)  # a cast ends with the offload
        return original

    def _give_back_masters(self) -> None:
        for reservation in self._extra:
            reservation.release()
        for part in self.parts:
            if part.reservation is not None:
                part.reservation.release()
            for entry in part.entries:
                if entry.master is not None:
                    entry.master.close()
        self._forms.close()


def _mapped_files(mappings: list[FileMapping] | None) -> list[Path]:
    """The safetensors files that this process has mapped, where the system tells."""
    paths = {mapping.path for mapping in mappings or () if mapping.path}
    return sorted(Path(path) for path in paths if path.endswith(".safetensors"))
