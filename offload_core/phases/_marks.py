"""Fingerprints by content: what must agree between the phase that made a record and the one that uses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from ..checkpoint import content_mark
from ..model_source import ComponentSource, ModelSource
from ._handle import Handle
from ._roles import models


def encoders_mark(handle: Handle, source: ModelSource, records: Iterable[str]) -> str:
    """A fingerprint of everything that made `records`: configs, content and dtype of those components, and LoRAs.

    records: their keys, which start with the component's name (a VAE among them if a picture was encoded).
    """
    made_by = {key.split(".")[0] for key in records}
    digest = hashlib.sha256()
    for name, part in models(source):
        if name in made_by:
            digest.update(json.dumps([name, part.class_name, part.config], sort_keys=True).encode())
            digest.update(str(handle.dtype_of(part)).encode())
            for file in part.weight_files:
                digest.update(content_mark(file).encode())
    if handle.weight_storage != "as stored":
        digest.update(handle.weight_storage.encode())
    digest.update(repr([(lora.fingerprint, lora.scale) for lora in handle.loras if lora.encodes]).encode())
    return digest.hexdigest()


def vae_mark(part: ComponentSource) -> str:
    """A fingerprint of a VAE's architecture and statistics: latents may go to another VAE that shares them."""
    config = {name: value for name, value in (part.config or {}).items() if not name.startswith("_")}
    return hashlib.sha256(json.dumps([part.class_name, config], sort_keys=True).encode()).hexdigest()
