"""Loading a component on the CPU, and attaching it at once or later."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..errors import InputError
from ..settings import OffloadSettings
from ._enable import enable_offload
from ._options import changes_of, no_effect
from ._results import DynamicOffloadApplyResult, DynamicOffloadHook
from ._settings import DynamicOffloadConfig


class DynamicOffloadLoadResult:
    """A loaded module. `hook` and `applied` are there if it was attached at once."""

    def __init__(self, module: nn.Module, applied: DynamicOffloadApplyResult | None) -> None:
        self.module, self.applied = module, applied
        self.hook: DynamicOffloadHook | None = applied.hook if applied is not None else None
        self.should_move_to_execution_device = applied is None or applied.should_move_to_execution_device

    def metrics_snapshot(self) -> Any:
        """As `DynamicOffloadApplyResult.metrics_snapshot`; None of a module that isn't attached yet."""
        return self.applied.metrics_snapshot() if self.applied is not None else None

    def profile_run(self) -> Any:
        """As `DynamicOffloadApplyResult.profile_run`. Raises InputError for a module that isn't attached yet."""
        if self.applied is None:
            raise InputError("The module isn't under offload yet; use profile_run of what enable_offload gives.")
        return self.applied.profile_run()

    def release(self) -> int:
        return self.applied.release() if self.applied is not None else 0


def from_pretrained_with_dynamic_offload(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    model_loader: Any | None = None,
    dynamic_offload_config: DynamicOffloadConfig | None = None,
    apply_dynamic: bool = False,
    profile_name: str | None = None,
    build_profile: bool | None = None,
    **from_pretrained_kwargs: Any,
) -> DynamicOffloadLoadResult:
    """Loads a component with its library's own loader, which maps the files, and leaves it on the CPU.

    model_loader: a class with `from_pretrained`, or a function like it; diffusers' AutoModel without one.
    apply_dynamic: False loads only, for a pipeline to be built around the module and `enable_offload` after that; True
    attaches at once. dynamic_offload_config: for attaching; no effect if that comes later. Nothing in any library is
    exchanged meanwhile. profile_name and build_profile: no effect, see `profile_run`.

    A dtype other than the file's makes a whole private copy in RAM; leave it out to stream from the file. Raises what
    the loader raises, and what `enable_offload` raises.
    """
    named = {"profile_name": profile_name, "build_profile": build_profile}
    changes_of({name: value for name, value in named.items() if value})
    if model_loader is None:
        from diffusers import AutoModel

        model_loader = AutoModel
    load = getattr(model_loader, "from_pretrained", model_loader)
    module: nn.Module = load(os.fspath(pretrained_model_name_or_path), **from_pretrained_kwargs)
    module.eval()
    if not apply_dynamic:
        if dynamic_offload_config is not None:
            no_effect("dynamic_offload_config", "nothing is attached yet; give it to enable_offload")
        return DynamicOffloadLoadResult(module, None)
    config = dynamic_offload_config or DynamicOffloadConfig()
    return DynamicOffloadLoadResult(module, enable_offload(module, settings=OffloadSettings(), config=config))
