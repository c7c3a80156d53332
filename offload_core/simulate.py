"""A replay of streaming on stated hardware: when each weight is read, when compute waits for it, how long a pass takes.

One reader brings weights in the order of their use into a ring, as far as it has room; compute goes through its
stretches in order and waits for what isn't there. A weight's place in the ring is free again when the stretch that used
it is over. Resident weights are read once, before their first use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Load:
    """Compute between one use of weights and the next. weights: names, used together by its first operator. seconds:
    how long it takes with its weights there."""

    weights: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Hardware:
    """How fast weights arrive. bytes_per_s: of large reads. read_s: seconds that each read takes beside its bytes.
    shares_compute: the part of a read's seconds that compute loses meanwhile (reading from the page cache takes CPU).
    inline_bytes: weights up to this size aren't read ahead, but by compute when it needs them.
    """

    bytes_per_s: float
    read_s: float = 0.0
    shares_compute: float = 0.0
    inline_bytes: int = 0


@dataclass(frozen=True)
class Event:
    """Something between two moments, in seconds from the start. kind: "read", "compute" or "stall". stretch: for which
    it is, counted on through all passes."""

    kind: str
    start: float
    end: float
    what: str
    stretch: int


@dataclass(frozen=True)
class Timeline:
    """A replay. pass_s: seconds of each pass. stall_s: seconds that compute waited, in all. read_bytes: in all.
    peak_bytes: the most that hot copies took."""

    pass_s: tuple[float, ...]
    stall_s: float
    read_bytes: int
    peak_bytes: int
    events: tuple[Event, ...] = field(repr=False, default=())

    @property
    def seconds(self) -> float:
        return sum(self.pass_s)

    @property
    def step_s(self) -> float:
        """Seconds of a pass when everything that stays is there: not the last one, in which nothing is read ahead."""
        return self.pass_s[-2] if len(self.pass_s) > 2 else self.pass_s[-1]


def simulate(
    loads: Sequence[Load],
    sizes: dict[str, int],
    *,
    resident: Collection[str],
    ring_bytes: int,
    hardware: Hardware,
    passes: int = 3,
    record: bool = False,
) -> Timeline:
    """Replays `passes` passes over `loads`. sizes: bytes by weight; those it lacks take no time and no memory.

    ring_bytes: must hold what each stretch streams. record: keep the events.
    Raises ValueError if a stretch's streamed weights don't fit the ring.
    """
    replay = _Replay(sizes, frozenset(resident), ring_bytes, hardware, record)
    needs = [_needs(load, sizes, replay.resident, ring_bytes) for load in loads]
    ends = []
    for number in range(passes):
        for load, streamed in zip(loads, needs, strict=True):
            replay.queue(load, streamed, first=number == 0)
    for _ in range(passes):
        for load in loads:
            replay.compute(load)
        ends.append(replay.now)
    pass_s = tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False))
    return Timeline(pass_s, replay.stall_s, replay.read_bytes, replay.peak_bytes, tuple(replay.events))


def waiting(loads: Sequence[Load], sizes: dict[str, int], resident: Collection[str]) -> list[Load]:
    """The same compute in fewer stretches: those in a row that wait for nothing are one. Reads of resident weights are
    left out, so only later passes take the same time."""
    joined: list[Load] = []
    for load in loads:
        streamed = tuple(name for name in load.weights if name in sizes and name not in resident)
        if streamed or not joined or joined[-1].weights:
            joined.append(Load(streamed, load.seconds))
        else:
            joined[-1] = Load((), joined[-1].seconds + load.seconds)
    return joined


def _needs(load: Load, sizes: dict[str, int], resident: frozenset[str], ring_bytes: int) -> list[str]:
    streamed = [name for name in load.weights if name in sizes and name not in resident]
    together = sum(sizes[name] for name in streamed)
    if together > ring_bytes:
        raise ValueError(f"{', '.join(streamed)} take {together:,} bytes together; the ring has {ring_bytes:,}.")
    return streamed


class _Replay:
    def __init__(
        self, sizes: dict[str, int], resident: frozenset[str], ring_bytes: int, hardware: Hardware, record: bool
    ) -> None:
        self.sizes, self.resident, self.ring_bytes = sizes, resident, ring_bytes
        self.hardware, self.record = hardware, record
        self.now = self.reader_free = self.stall_s = 0.0
        self.read_bytes = self.peak_bytes = 0
        self.events: list[Event] = []
        self._reads: list[list[tuple[str, bool]]] = []  # for each stretch to come: (weight, whether it stays)
        self._loaded: set[str] = set()
        self._next_read = self._next_compute = 0
        self._in_ring = self._kept = 0
        self._ready: dict[int, float] = {}  # by stretch: when its weights are there
        self._ahead: dict[int, int] = {}  # by stretch: its bytes in the ring

    def queue(self, load: Load, streamed: Sequence[str], *, first: bool) -> None:
        staying = [
            name
            for name in load.weights
            if first and name in self.sizes and name in self.resident and name not in self._loaded
        ]
        self._loaded.update(staying)
        self._reads.append([*((name, True) for name in staying), *((name, False) for name in streamed)])

    def compute(self, load: Load) -> None:
        """The next stretch: waits for its weights, runs, and lets them go."""
        index = self._next_compute
        self._read_up_to(index)
        ready = self._ready.pop(index)
        if ready > self.now:
            self._add("stall", self.now, ready, load.weights, index)
            self.stall_s += ready - self.now
            self.now = ready
        self._read_on()
        start, end = self.now, self.now + load.seconds
        end += max(0.0, min(self.reader_free, end) - start) * self.hardware.shares_compute
        self._add("compute", start, end, load.weights, index)
        self.now = end
        self._in_ring -= self._ahead.pop(index, 0)
        self._next_compute += 1

    def _read_up_to(self, index: int) -> None:
        while self._next_read <= index:
            self._read_next()

    def _read_on(self) -> None:
        """Reads ahead as far as the ring has room now."""
        while self._next_read < len(self._reads) and self._fits(self._next_read):
            self._read_next()

    def _fits(self, index: int) -> bool:
        sizes = [self.sizes[name] for name, stays in self._reads[index] if not stays]
        ahead = not sizes or max(sizes) > self.hardware.inline_bytes
        return ahead and self._in_ring + sum(sizes) <= self.ring_bytes

    def _read_next(self) -> None:
        index = self._next_read
        start = max(self.reader_free, self.now if self._reads[index] else 0.0)
        for name, stays in self._reads[index]:
            nbytes = self.sizes[name]
            end = start + self.hardware.read_s + nbytes / self.hardware.bytes_per_s
            self._add("read", start, end, (name,), index)
            self.read_bytes += nbytes
            if stays:
                self._kept += nbytes
            else:
                self._in_ring += nbytes
                self._ahead[index] = self._ahead.get(index, 0) + nbytes
            self.peak_bytes = max(self.peak_bytes, self._kept + self._in_ring)
            start = self.reader_free = end
        self._ready[index] = start if self._reads[index] else 0.0
        self._next_read += 1

    def _add(self, kind: str, start: float, end: float, what: Sequence[str], stretch: int) -> None:
        if self.record:
            self.events.append(Event(kind, start, end, ", ".join(what), stretch))
