"""What the tests of the weight cache share: small models over a file, a module in a scope, counts made from outside."""

from __future__ import annotations

import copy
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from offload_core.settings import OffloadSettings
from offload_core.streaming import Managed, OffloadScope
from offload_core.streaming._shape import as_bytes
from offload_core.streaming._weight import Entry

ALIGN = 64
ROOMY = 1 << 30
# A call of a block, and the calls that it makes between its two layers.
Call = tuple[int, tuple["Call", ...]]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, inner: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        nested = inner(x) if inner is not None else x
        return torch.tanh(self.down(hidden)) + nested


class Blocks(nn.Module):
    """Blocks of several sizes that run in whatever order is asked for."""

    def __init__(self, hidden: Sequence[int] = (40, 96, 33, 64, 96, 50), width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, size) for size in hidden)

    def forward(self, x: torch.Tensor, program: Sequence[Call] | None = None) -> torch.Tensor:
        for call in in_turn(len(self.blocks)) if program is None else program:
            x = self._call(x, call)
        return x

    def _call(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        index, inner = call
        return self.blocks[index](x, (lambda y: self(y, inner)) if inner else None)


def in_turn(count: int) -> tuple[Call, ...]:
    return tuple((index, ()) for index in range(count))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with the same random values every time, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make().eval()


def inputs(width: int = 32, rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


def save(module: nn.Module, path: Path) -> Path:
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in module.state_dict().items()}, path)
    return path


def from_file(module: nn.Module, path: Path) -> nn.Module:
    """A copy of `module` whose weights are mapped from the file, as `from_pretrained` leaves them."""
    mapped = copy.deepcopy(module)
    mapped.load_state_dict(safetensors.torch.load_file(path), assign=True)
    return mapped


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def group_bytes(module: nn.Module) -> int:
    """What all weights of a module take in a ring."""
    return sum(padded(weight.nbytes) for weight in module.parameters())


def smallest_budget(module: nn.Module) -> int:
    """The bytes that the hungriest layer's weights need, in a ring that has to be aligned itself."""
    return max(group_bytes(layer) for layer in module.modules() if not list(layer.children())) + ALIGN


def weight_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


class StorageCount:
    """Bytes that an engine allocated and that are alive, told by the storages themselves."""

    def __init__(self, scope: OffloadScope) -> None:
        self.live = self.peak = self.calls = 0
        self.fail_at: int | None = None
        self._allocate = scope.engine.allocate
        self._lock = threading.RLock()
        scope.engine.allocate = self.allocate  # type: ignore[method-assign]

    def allocate(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            self.calls += 1
            if self.calls == self.fail_at:
                raise torch.OutOfMemoryError("made to fail")
        block = self._allocate(nbytes)
        storage = block.untyped_storage()
        with self._lock:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._died, storage.nbytes())
        return block

    def _died(self, nbytes: int) -> None:
        with self._lock:
            self.live -= nbytes


class FillSpy:
    """Sees every fill of a hot copy, poisons it first, and may delay it (by `seed`) or make the k-th one fail."""

    def __init__(self, scope: OffloadScope, *, seed: int | None = None, most_s: float = 0.002) -> None:
        self.count: Counter[str] = Counter()
        self.calls = 0
        self.before: Callable[[Entry], None] | None = None
        self.fail_at: int | None = None
        self.error: Callable[[], BaseException] = lambda: OSError("made to fail")
        self._random = random.Random(seed) if seed is not None else None
        self._most_s, self._fill = most_s, scope.engine.fill
        self._lock = threading.Lock()
        scope.engine.fill = self.fill  # type: ignore[method-assign]

    def fill(self, entry: Entry, hot: torch.Tensor, buffer: Any, stop: Any) -> Any:
        with self._lock:
            self.calls += 1
            mine = self.calls
            self.count[entry.names[0]] += 1
            pause = self._random.uniform(0, self._most_s) if self._random is not None else 0.0
        with torch.inference_mode(False):
            as_bytes(hot).fill_(0xFF)  # a NaN in every float dtype
        if pause:
            time.sleep(pause)
        if self.before is not None:
            self.before(entry)
        if mine == self.fail_at:
            raise self.error()
        return self._fill(entry, hot, buffer, stop)


class Attached:
    """A module in a scope of its own, with the counts on. Leaving the `with` block gives everything back.

    Every weight access checks that what is allocated is what is booked, and within the budget.
    on_access: called at every access. inline_bytes: weights above it are read by threads.
    """

    def __init__(
        self,
        module: nn.Module,
        device_memory: int,
        *,
        host_memory: int = ROOMY,
        files: Sequence[Path] = (),
        on_access: Callable[[], None] | None = None,
        threads: int = 2,
        inline_bytes: int = 0,
        resident_below: int = 0,
        seed: int | None = None,
        prepare: Callable[[Attached], None] | None = None,
    ) -> None:
        settings = OffloadSettings(
            execution_device="cpu",
            device_memory=device_memory,
            host_memory=host_memory,
            activation_memory=0,
            resident_below=resident_below,
            read_threads=threads,
        )
        self.module, self._on_access = module, on_access
        self.checks = self.accesses = 0
        self.strict = True
        self.scope = OffloadScope(settings, torch.device("cpu"), poll=self._poll)
        self.cache, self.ledger = self.scope.cache, self.scope.ledger
        self.cache._inline_bytes = inline_bytes
        self.storages, self.fills = StorageCount(self.scope), FillSpy(self.scope, seed=seed)
        try:
            if prepare is not None:
                prepare(self)
            with torch.no_grad():
                self.managed: Managed = self.scope.attach(module, name="m", files=list(files))
        except BaseException:
            self.scope.close()
            raise

    def _poll(self, nbytes: int) -> None:
        self.accesses += 1
        self.check()
        if self._on_access is not None:
            self._on_access()

    def check(self) -> None:
        if not self.strict:
            return
        with self.cache._lock:  # a reader may be between booking and making
            live, booked = self.storages.live, self.ledger.used("device")
        assert live == booked <= self.ledger.limits["device"], f"{live} bytes are alive and {booked} are booked"
        self.checks += 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.module(*args, **kwargs)

    @property
    def entries(self) -> dict[str, Entry]:
        return {entry.names[0]: entry for entry in self.managed.entries}

    def is_idle(self) -> bool:
        """Whether no copy is on its way."""
        with self.cache._lock:
            return all(entry.fetch is None for entry in self.cache._room)

    def release(self) -> int:
        self.managed.release(restore=True)
        return self.scope.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for what another thread does. A failure, not a measurement, if it takes so long."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.001)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offload-reader-")]


def run_threads(*bodies: Callable[[], None], seconds: float = 30.0) -> None:
    """Runs each in a thread of its own and raises the first error."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if errors:
        raise errors[0]


def same_tensors(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether a module has the very tensors that it had."""
    now = tensors_of(module)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
