"""A pretend accelerator called "vgpu", so that everything about device memory is tested on machines without one.

Its memory is host memory with an exact cap, its kernels are the CPU's, so results are bit-equal to the CPU's. Too
large an allocation raises `torch.OutOfMemoryError`; operands on different devices are refused as CUDA refuses them.
It is one device, counts bytes unrounded, and doesn't count the scratch memory inside CPU kernels.

Registering it can't be undone in a process and makes it `torch.accelerator`'s device for everything. So tests run in
a process of their own::

    from vgpu.runner import run_on_vgpu

    def peak_of_a_copy(count):                     # plain values in, JSON values out
        import torch, vgpu
        tensor = torch.ones(count).to("vgpu")
        return vgpu.install().peak()

    def test_peak():
        assert run_on_vgpu(peak_of_a_copy, 1000) == 4000

`install()` returns the extension module: set_cap(bytes or None), cap, current, peak, reset_peak, ooms, pinned_bytes,
set_poison(bool), set_lazy(bool), lazy_counts, counters, log_ops(bool), op_log, and what stands here as functions.

Two switches find mistakes with streams. `set_lazy(True)` makes non-blocking copies between pinned and device memory on
a side stream late: until something waits for them their target reads as NaN. `set_race_check(True)` refuses an access
to memory that no event, synchronize or blocking copy orders after the accesses before it, whatever the timing was.
Memory that was freed and is reused on its stream keeps its past, as with a caching allocator.

Not seen: hand-overs between threads (what one thread waited for counts for all), what the CPU does to pinned memory
(late copies show that as wrong data), an allocation that was freed and replaced before a storage over a bare pointer
into it was used for the first time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent / "vgpu.cpp"
HEADER = Path(__file__).parent / "race.h"
#: Releases of torch whose C++ interfaces the source is known to fit.
TESTED_TORCH = ("2.13",)

_installed: Any = None


def why_not() -> str | None:
    """Why the pretend accelerator can't be built here, or None if it can (or is built already)."""
    if _library().exists():
        return None
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "the pretend accelerator needs a C++ compiler (g++)"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "the pretend accelerator needs ninja (pip install ninja)"
    if not torch.__version__.startswith(TESTED_TORCH):
        return f"the pretend accelerator is written for torch {', '.join(TESTED_TORCH)}, not {torch.__version__}"
    return None


def install() -> Any:
    """Registers "vgpu" with torch for the rest of this process (building it once) and returns its extension module."""
    global _installed
    if _installed is None:
        # The name first: registering the kernels doesn't need it, but error texts do.
        torch.utils.rename_privateuse1_backend("vgpu")
        _installed = _load()
        torch._register_device_module("vgpu", _device_module(_installed))
        torch.utils.generate_methods_for_privateuse1_backend()
    return _installed


def set_race_check(on: bool) -> None:
    """Has every access to device and pinned memory checked from now on; an unordered one raises RuntimeError."""
    install().set_race_check(on)


def races() -> list[str]:
    """What was refused since the check was last switched on: the text of each, with both accesses."""
    return install().races()


def fail_at(kind: str | None, k: int) -> None:
    """Makes the k-th operation of a kind from now on fail, once; `fail_at(None, 0)` calls it off.

    "alloc" (device memory) raises torch.OutOfMemoryError, "copy" (to, from or on the device) and "pin" (pinned host
    memory) raise RuntimeError. ValueError: another kind, or k below 1.
    """
    install().fail_at(kind, k)


def operation_counts() -> dict[str, int]:
    """How many operations of each kind that `fail_at` knows were asked for in this process, failed ones too."""
    return install().operation_counts()


def _library() -> Path:
    """Where the built library is kept, by a hash of all it depends on."""
    identity = SOURCE.read_bytes() + HEADER.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    cache = os.environ.get("VGPU_CACHE") or Path.home() / ".cache" / "phase-offload-vgpu"
    return Path(cache) / hashlib.sha256(identity).hexdigest()[:12] / "vgpu_ext.so"


def _load() -> Any:
    library = _library()
    if not library.exists():
        return _build(library)
    spec = importlib.util.spec_from_file_location("vgpu_ext", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(library: Path) -> Any:
    """Builds aside and moves: no stale lock to hang on, no half-written library, even with two builds at once."""
    from torch.utils import cpp_extension

    library.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "1")
    scripts = str(Path(sys.executable).parent)  # ninja of a virtual environment that isn't activated
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        module = cpp_extension.load(
            "vgpu_ext", [str(SOURCE)], build_directory=folder, extra_cflags=["-O1", "-g0", "-w"]
        )
        (Path(folder) / "vgpu_ext.so").replace(library)
    return module


def _device_module(ext: Any) -> types.ModuleType:
    """The `torch.vgpu` namespace: what `torch.cuda` has, as far as torch and diffusers ask for it."""
    accelerator = torch.accelerator
    module: Any = types.ModuleType("torch.vgpu")
    module._C = ext
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = module.empty_cache = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: accelerator.synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: ext.manual_seed(seed % (1 << 64))
    module.default_generators = ()
    module.get_rng_state = lambda device=None: torch.frombuffer(bytearray(ext.rng_state()), dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: ext.set_rng_state(bytes(state.cpu().numpy()))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda: True
    module.memory_allocated = module.memory_reserved = lambda device=None: ext.current()
    module.max_memory_allocated = module.max_memory_reserved = lambda device=None: ext.peak()
    module.reset_peak_memory_stats = lambda device=None: ext.reset_peak()
    module.memory_stats = lambda device=None: accelerator.memory_stats()
    module.mem_get_info = lambda device=None: accelerator.get_memory_info()
    module.OutOfMemoryError = torch.OutOfMemoryError
    module.Stream = lambda device="vgpu", priority=0: torch.Stream(device="vgpu", priority=priority)
    module.Event = lambda enable_timing=False, **unused: torch.Event("vgpu", enable_timing=enable_timing)
    module.current_stream = lambda device=None: accelerator.current_stream()
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=20)
    module.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    module.set_stream = accelerator.set_stream
    module.device = lambda device: contextlib.nullcontext()
    module._utils = types.SimpleNamespace(_get_device_index=lambda device, optional=False: 0)
    return module
