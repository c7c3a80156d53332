"""VAE Decode Phase."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import offload_core
from offload_core.errors import InputError

from ..foreseen import foreseen, foreseen_of_several
from ..pictures import as_image, waveforms_as_image
from ..results import NodeResult
from ..schema import MODEL, RECORD_KEY, Input, Node, NodeSchema, Output

if TYPE_CHECKING:
    from ..calls import NodeCall

OWN_FRAME_RATE = 0.0  # frame_rate: the model's
USUAL_FRAME_RATE = 24.0  # of a model that doesn't say

SCHEMA = NodeSchema(
    id="PhaseOffloadVAEDecode",
    display_name="VAE Decode Phase",
    description="Loads the VAE, turns the latent picture into pixels, and gives the memory back.",
    inputs=(
        MODEL,
        Input(
            "latent",
            "LATENT",
            "From Denoise Phase, or any LATENT of the same kind of model. If another node changed it, the changed "
            "values are decoded.",
        ),
        Input(
            "tiling",
            "COMBO",
            "Decode in tiles, which needs less memory and can leave faint seams. auto: only if the whole picture "
            "doesn't fit, or as the preset of Offload Settings says.",
            default="auto",
            options=("auto", "on", "off"),
        ),
        Input(
            "frame_rate",
            "FLOAT",
            "Frames per second of the video output. 0: the model's own.",
            default=OWN_FRAME_RATE,
            min=0.0,
            max=240.0,
            step=0.01,
            optional=True,
        ),
    ),
    outputs=(
        Output(
            "image",
            "IMAGE",
            "The pictures; the frames of a video come as a batch. Of a model that makes sound alone, its waveform is "
            "drawn. A list of latents gives a list: all are decoded in one phase.",
            is_list=True,
        ),
        Output(
            "audio",
            "AUDIO",
            "The sound of a model that makes some (LTX-2, Stable Audio, ACE-Step). With others, what follows doesn't "
            "run.",
            is_list=True,
        ),
        Output(
            "video",
            "VIDEO",
            "The frames and the sound as one video, for Save Video. With a model that makes sound alone, what follows "
            "doesn't run.",
            is_list=True,
        ),
    ),
    search_aliases=("vae decode", "latent to image", "tiled", "tiling", "video", "audio", "sound", "fps", "offload"),
    takes_lists=True,
)


def vae_decode(
    call: NodeCall, *, model: Any, latent: Mapping[str, Any], tiling: str, frame_rate: float = OWN_FRAME_RATE
) -> NodeResult:
    """PhaseOffloadVAEDecode: IMAGE [B, H, W, 3], 0 to 1, its sound if it has some, and both as a video.

    The frames of videos follow each other in the batch.
    """
    tiling = model.settings.vae_tiling if tiling == "auto" else tiling
    latents, notes = _latents_to_decode(model, latent)
    if latents.only_sound:
        with foreseen(call, offload_core.foresee_decode, model, latents, tiling=tiling) as plan:
            sound = _sound(call, model, latents, tiling=tiling, plan=plan)
        call.say_how_it_went(*notes)
        return _result_of_sound(call, sound)
    sound = _sound(call, model, latents)
    with foreseen(call, offload_core.foresee_decode, model, latents, tiling=tiling) as plan:
        pixels = offload_core.decode(model, latents, "np", tiling=tiling, session=call.session, plan=plan)
    call.say_how_it_went(*notes)
    return _result(call, pixels, sound, frame_rate or latents.frame_rate)


def vae_decode_jobs(call: NodeCall, jobs: list[dict[str, Any]]) -> list[NodeResult]:
    """Several of them, with each model's VAE loaded once for all that follow each other."""
    made: list[NodeResult] = []
    said: dict[str, None] = {}
    for (model, tiling), group in itertools.groupby(jobs, key=itemgetter("model", "tiling")):
        same = list(group)
        tiling = model.settings.vae_tiling if tiling == "auto" else tiling
        found = [_latents_to_decode(model, job["latent"]) for job in same]
        said |= dict.fromkeys(note for _, notes in found for note in notes)
        latents = [each for each, _ in found]
        asked = [((model, each), {"tiling": tiling}) for each in latents]
        if all(each.only_sound for each in latents):
            plan = foreseen_of_several(call, offload_core.foresee_decode, asked)
            heard = offload_core.decode_sound_many(model, latents, tiling=tiling, session=call.session, plan=plan)
            made += [_result_of_sound(call, _audio(sound)) for sound in heard]
            continue
        sounds = [_sound(call, model, each) for each in latents]
        plan = foreseen_of_several(call, offload_core.foresee_decode, asked)
        pictures = offload_core.decode_many(model, latents, "np", tiling=tiling, session=call.session, plan=plan)
        rates = [job.get("frame_rate") or each.frame_rate for job, each in zip(same, latents, strict=True)]
        made += [_result(call, *one) for one in zip(pictures, sounds, rates, strict=True)]
    call.say_how_it_went(*said)
    return made


def _sound(call: NodeCall, model: Any, latents: Any, **options: Any) -> dict[str, Any] | None:
    """The AUDIO of latents that have some. options: of the engine's decode_sound."""
    if latents.sound is None:
        return None
    sound = offload_core.decode_sound(model, latents, session=call.session, **options)
    return None if sound is None else _audio(sound)


def _audio(sound: tuple[Any, int]) -> dict[str, Any]:
    """The AUDIO of a waveform and its samples a second."""
    return {"waveform": sound[0], "sample_rate": sound[1]}


def _result(call: NodeCall, pixels: Any, audio: dict[str, Any] | None, frame_rate: float | None) -> NodeResult:
    host = call.state.host
    image = as_image(pixels).to(**host.image_placement())
    no_sound = "This model makes no sound: take what follows the audio of VAE Decode Phase off."
    video = host.video(image, frame_rate or USUAL_FRAME_RATE, audio)
    return NodeResult((image, host.nothing(no_sound) if audio is None else audio, video))


def _result_of_sound(call: NodeCall, audio: Any) -> NodeResult:
    """There is no picture: the waveform is drawn in its place, and there is no video."""
    host = call.state.host
    image = waveforms_as_image(audio).to(**host.image_placement())
    no_video = "This model makes sound and no picture: take what follows the video of VAE Decode Phase off."
    return NodeResult((image, audio, host.nothing(no_video)))


def _latents_to_decode(model: Any, latent: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The exact record of Denoise Phase if the LATENT still agrees with it; else what its `samples` say."""
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        raise InputError("This LATENT holds several tensors (sound and picture): split it before VAE Decode Phase.")
    samples = samples.to("cpu")  # the host may keep latents on the device
    record = latent.get(RECORD_KEY)
    if record is None:
        return offload_core.latents_from_samples(model, samples), []
    if record.is_stale(samples):
        return record.with_samples(samples), ["The latent was changed after Denoise Phase; the change is decoded."]
    return record, []


NODE = Node(SCHEMA, vae_decode, run_many=vae_decode_jobs)
