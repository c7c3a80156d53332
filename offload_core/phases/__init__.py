"""Phases: a pipeline's own code run in parts, each with only its components loaded. See docs/phases.md."""

from ._components import from_files, stand_in
from ._conditioning import Conditioning, conditioning_of, embeds_from_conditioning
from ._control import Control
from ._decode import check_latents, decode, decode_many, latents_from_samples
from ._denoise import check_denoise, check_embeds, denoise, denoise_many
from ._encode import encode, encode_many
from ._foresee import (
    PhaseTrace,
    TracedCall,
    foresee,
    trace_cached_encode,
    trace_decode,
    trace_denoise,
    trace_encode,
    trace_images,
)
from ._guest import Guest, Visit, guest_of
from ._handle import Handle, load
from ._images import encode_images, images_from_samples
from ._ip_adapter import IPAdapter
from ._loras import Lora, as_loras
from ._records import Embeds, Images, Latents
from ._scope import Phase, open_phase
from ._sound import decode_sound, decode_sound_many

__all__ = [
    "Conditioning",
    "Control",
    "Embeds",
    "Guest",
    "Handle",
    "IPAdapter",
    "Images",
    "Latents",
    "Lora",
    "Phase",
    "PhaseTrace",
    "TracedCall",
    "Visit",
    "as_loras",
    "check_denoise",
    "check_embeds",
    "check_latents",
    "conditioning_of",
    "decode",
    "decode_many",
    "decode_sound",
    "decode_sound_many",
    "denoise",
    "denoise_many",
    "embeds_from_conditioning",
    "encode",
    "encode_images",
    "encode_many",
    "foresee",
    "from_files",
    "guest_of",
    "images_from_samples",
    "latents_from_samples",
    "load",
    "open_phase",
    "stand_in",
    "trace_cached_encode",
    "trace_decode",
    "trace_denoise",
    "trace_encode",
    "trace_images",
]
