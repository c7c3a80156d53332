"""Fingerprints by content: what must agree between the phase that made a record and the one that uses it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..checkpoint import read_header
from ..model_source import ComponentSource, ModelSource
from ._handle import Handle
from ._roles import Role, models, role_of

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def encoders_mark(handle: Handle, source: ModelSource) -> str:
    """A fingerprint of everything that encodes: configs and content of the encoders, their dtype, and LoRAs."""
    digest = hashlib.sha256()
    for name, part in models(source):
        if role_of(part) is Role.ENCODER:
            digest.update(json.dumps([name, part.class_name, part.config], sort_keys=True).encode())
            digest.update(str(handle.dtype_of(part)).encode())
            for file in part.weight_files:
                digest.update(content_mark(file).encode())
    digest.update(repr([(lora.fingerprint, lora.scale) for lora in handle.loras]).encode())
    return digest.hexdigest()


def vae_mark(part: ComponentSource) -> str:
    """A fingerprint of a VAE's architecture and statistics: latents may go to another VAE that shares them."""
    config = {name: value for name, value in (part.config or {}).items() if not name.startswith("_")}
    return hashlib.sha256(json.dumps([part.class_name, config], sort_keys=True).encode()).hexdigest()


def content_mark(file: Path) -> str:
    """A fingerprint of a weights file by its header and 64 KiB of samples spread over its data.

    It doesn't depend on the file's name or time, so saved embeddings survive a copied model; a fine-tune of the same
    architecture changes nearly every weight and so the samples.
    """
    header = read_header(file)
    digest = hashlib.sha256(f"{header.header_sha256} {header.file_bytes}".encode())
    with file.open("rb") as data:
        for index in range(_SAMPLES):
            data.seek(header.data_start + (header.file_bytes - header.data_start) * index // _SAMPLES)
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
