"""What a phase may take from the prompt cache instead of loading an encoder.

The pipeline's own code runs in every Encode, and asks its encoders. An answer is taken from the cache if the same
encoder was asked the same before, down to the bits of its arguments, and an encoder is loaded with the first question
that isn't known. So there is no list of the options that an encoding depends on, and none of the families whose
encoding depends on the size: what they depend on is in the question.

What isn't in the question is in the name of the encoder: its class, config, files, dtype and LoRAs, the kind of device,
and the libraries whose code it runs. An answer for which random numbers were drawn isn't kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import content_mark
from ..file_reader import FileIdentity
from ..model_source import ComponentSource, ModelSource
from ..prompt_cache import PromptCache
from ._plain import Plain, to_plain
from ._roles import Role, models, role_of

if TYPE_CHECKING:
    from ._handle import Handle

LIBRARIES = ("torch", "diffusers", "transformers")
ASKED = (Role.ENCODER, Role.HEAD, Role.VAE)


class Answers:
    """The answers that one phase may use, and those it adds. Keys are those of `Records`.

    call: the arguments of the pipeline's call. reads: whether answers are taken; if not, they are only added.
    """

    def __init__(
        self, cache: PromptCache, handle: Handle, source: ModelSource, call: dict[str, Any], *, reads: bool = True
    ) -> None:
        self._cache, self._folder, self._reads = cache, handle.settings.prompt_cache_folder, reads
        self._handle, self._call = handle, call
        self._parts = {name: part for name, part in models(source) if role_of(part) in ASKED}
        self._marks: dict[str, str] = {}
        self.taken: set[str] = set()  # components that answered from the cache

    @property
    def hopeful(self) -> bool:
        """Whether it is worth asking: some answer of an encoder of this model is kept."""
        return self._reads and any(self._cache.knows(self._mark(name), self._folder) for name in self._parts)

    def get(self, component: str, key: str) -> Plain | None:
        answer = self._cache.get(self._name(component, key), self._folder) if self._reads else None
        if answer is not None:
            self.taken.add(component)
        return answer

    def put(self, component: str, key: str, answer: Plain) -> None:
        self._cache.put(self._name(component, key), answer, self._folder)

    def _name(self, component: str, key: str) -> str:
        return f"{self._mark(component)}-{hashlib.sha256(key.encode()).hexdigest()}"

    def _mark(self, component: str) -> str:
        if component not in self._marks:
            self._marks[component] = encoder_mark(self._handle, self._parts[component], self._call)
        return self._marks[component]


def encoder_mark(handle: Handle, part: ComponentSource, call: dict[str, Any]) -> str:
    """A hash of everything but the question that an encoder's answer depends on.

    The files count by a sample of their content, their size and their time: an edit too small for the sample changes
    the time. `cross_attention_kwargs` and its like scale the LoRAs of an encoder, beside its arguments.
    """
    loras = [lora for lora in handle.loras if lora.encodes or role_of(part) is Role.HEAD]
    scales = {name: value for name, value in call.items() if name.endswith("attention_kwargs")} if loras else {}
    files = [(content_mark(file), FileIdentity.of(file)) for file in part.weight_files]
    made_by = {
        "class": [part.name, part.library, part.class_name],
        "config": part.config,
        "files": [[mark, identity.size, identity.mtime_ns] for mark, identity in files],
        "runs": [str(handle.dtype_of(part)), handle.device_here().type, torch.get_float32_matmul_precision()],
        "loras": [[lora.fingerprint, lora.scale] for lora in loras],
        "scales": to_plain(scales, "an argument of encode").key(),
        "code": _versions(),
    }
    if handle.weight_storage != "as stored":
        made_by["weights"] = handle.weight_storage
    return hashlib.sha256(json.dumps(made_by, sort_keys=True, default=repr).encode()).hexdigest()


@functools.cache
def _versions() -> list[str]:
    return [importlib.metadata.version(name) for name in LIBRARIES]
