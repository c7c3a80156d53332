"""Which dtype each weight has after `from_pretrained(dtype=…)`: both libraries keep some of them in float32.

A weight that is streamed is cast on its way in, one by one, and must come out as the library's own loader would have
made it. The rules are those of diffusers 0.42 (`load_model_dict_into_meta`) and transformers 5.24
(`PreTrainedModel._get_dtype_plan`, `convert_and_load_state_dict_in_model`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

HALF_DTYPES = (torch.float16, torch.bfloat16)


def parameter_dtypes(
    module: nn.Module | type[nn.Module], library: str, names: Iterable[str], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The dtype of each named parameter or buffer in what `from_pretrained(dtype=dtype)` of the library returns.

    module: best an instance that was made as the loader makes it, with `dtype` as torch's default dtype and, if it is
    of transformers, from a config that `request_dtype` was called on; it needs no weights (they may be on the meta
    device). Its own dtypes then tell what is not floating, or was declared in another dtype. Of a class alone, every
    tensor is taken to be a floating one in the file and declared in the default dtype, and what transformers collects
    from the parts of a composite model is missing.

    library: "diffusers" or "transformers"; of any other the loader is unknown, and every floating tensor gets `dtype`.
    """
    instance = module if isinstance(module, nn.Module) else None
    declared: dict[str, torch.dtype] = {}
    in_files: set[str] | None = None
    if instance is not None:
        tensors = [*instance.named_parameters(remove_duplicate=False), *instance.named_buffers(remove_duplicate=False)]
        declared = {name: tensor.dtype for name, tensor in tensors}
        in_files = _names_in_files(instance)
    rule = {"diffusers": _Diffusers, "transformers": _Transformers}.get(library, _Plain)(module, dtype)
    return {
        name: rule.dtype(name, declared.get(name, dtype))
        if in_files is None or name in in_files
        else declared.get(name, dtype)
        for name in names
    }


def request_dtype(config: Any, dtype: torch.dtype) -> None:
    """Sets the dtype of a transformers config and its parts: the constructor makes the parts of a model in theirs."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            part.dtype = dtype


def _names_in_files(module: nn.Module) -> set[str]:
    """All names but those of buffers that are never saved: these stay as the constructor made them."""
    unsaved = {
        f"{path}.{key}" if path else key
        for path, part in module.named_modules(remove_duplicate=False)
        for key in part._non_persistent_buffers_set
    }
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name for name, _ in tensors} - unsaved


class _Plain:
    """Every floating tensor in the dtype that was asked for."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.asked = dtype

    def dtype(self, name: str, declared: torch.dtype) -> torch.dtype:
        return self.asked if declared.is_floating_point else declared


class _Diffusers(_Plain):
    """Floating tensors are cast whatever they were declared as; `_keep_in_fp32_modules` are names of path components.

    They are kept for every dtype asked for, bfloat16 too.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        kept = getattr(module, "_keep_in_fp32_modules", None)
        self.kept = frozenset([kept] if isinstance(kept, str) else kept or ())

    def dtype(self, name: str, declared: torch.dtype) -> torch.dtype:
        if declared.is_floating_point and not self.kept.isdisjoint(name.split(".")):
            return torch.float32
        return super().dtype(name, declared)


class _Transformers(_Plain):
    """A declared dtype other than the default is respected; what is kept in float32 is a pattern found in the name.

    `_keep_in_fp32_modules` counts for float16 only, `_keep_in_fp32_modules_strict` for bfloat16 too. The patterns are
    regular expressions in which * stands for any text, and "wo" is found in "two.weight".
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        kept: set[str] = set()
        if dtype == torch.float16:
            kept.update(getattr(module, "_keep_in_fp32_modules", None) or ())
        if dtype in HALF_DTYPES:
            kept.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        self.kept = re.compile("|".join(sorted(pattern.replace("*", ".*") for pattern in kept))) if kept else None

    def dtype(self, name: str, declared: torch.dtype) -> torch.dtype:
        return torch.float32 if self.kept is not None and self.kept.search(name) else declared
