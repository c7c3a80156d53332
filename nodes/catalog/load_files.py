"""Load Split Files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.errors import OffloadError

from ..file_list import NONE
from ..results import NodeResult
from ..schema import Input, Node, NodeSchema
from ._loading import OPTIONAL, OUTPUT, REQUIRED, budget_problem, handle_of, model_fingerprint

if TYPE_CHECKING:
    from offload_core.single_files import SplitFiles

    from ..calls import NodeCall
    from ..state import PackState

_ENCODERS = ("encoder_1", "encoder_2", "encoder_3")
_ENCODER = (
    "A text encoder in a text_encoders folder. Their order doesn't matter: each file says what it is. "
    "none: the model needs no more, or the checkpoint has it."
)

SCHEMA = NodeSchema(
    id="PhaseOffloadLoadFiles",
    display_name="Load Split Files",
    description=(
        "Puts a model together from files: a denoiser, its text encoders and its VAE. It reads only file headers: each "
        "phase loads the weights it needs when it runs and gives them back when it ends."
    ),
    inputs=(
        Input(
            "denoiser",
            "COMBO",
            "The UNet or transformer: a file in a diffusion_models folder, or a checkpoint. Of a checkpoint the other "
            "parts are used too, where no file is given for them.",
            options="denoisers",
        ),
        *(Input(name, "COMBO", _ENCODER, default=NONE, options="encoders_or_none") for name in _ENCODERS),
        Input(
            "vae",
            "COMBO",
            "The VAE, in a vae folder. none: the checkpoint has it.",
            default=NONE,
            options="vaes_or_none",
        ),
        Input(
            "family",
            "COMBO",
            "What kind of model it is. auto: the files tell, except of those that look like another one: FLUX.1 "
            "Kontext, Qwen-Image-Edit, Wan 2.1 14B.",
            default="auto",
            options="families",
        ),
        *REQUIRED,
        Input(
            "denoiser_2",
            "COMBO",
            "The second denoiser of a model that has two. Wan 2.2: the file for low noise; the first is that for high "
            "noise.",
            default=NONE,
            options="denoisers_or_none",
            advanced=True,
            optional=True,
        ),
        Input(
            "configs",
            "COMBO",
            "A diffusers folder whose configs, scheduler and tokenizers are taken, for a model of another size than "
            "the known ones. Its weights aren't read and may be missing.",
            default=NONE,
            options="config_folders",
            advanced=True,
            optional=True,
        ),
        *OPTIONAL,
    ),
    outputs=(OUTPUT,),
    search_aliases=("load diffusion model", "unet loader", "dual clip loader", "load vae", "low vram", "offload"),
)


def load_files(
    call: NodeCall,
    *,
    denoiser: str,
    encoder_1: str,
    encoder_2: str,
    encoder_3: str,
    vae: str,
    family: str,
    dtype: str,
    device: str,
    denoiser_2: str = NONE,
    configs: str = NONE,
    device_memory: str = "auto",
    host_memory: str = "auto",
    warm: bool = False,
    settings: Any = None,
    weight_storage: str = "as stored",
) -> NodeResult:
    """PhaseOffloadLoadFiles: a handle of the model that the chosen files are. Reads headers and configs only."""
    encoders = (encoder_1, encoder_2, encoder_3)
    files = _files(call.state, denoiser, denoiser_2, encoders, vae, family, configs)
    handle = handle_of(
        call,
        "Load Split Files",
        files,
        dtype=dtype,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        warm=warm,
        settings=settings,
        weight_storage=weight_storage,
    )
    names = ", ".join(dict.fromkeys(Path(path).name for _, path in files.named))
    call.observer.status(f"{names}: ready, nothing loaded yet")
    return NodeResult((handle,))


def fingerprint(
    state: PackState,
    *,
    denoiser: Any = None,
    encoder_1: Any = NONE,
    encoder_2: Any = NONE,
    encoder_3: Any = NONE,
    vae: Any = NONE,
    family: Any = "auto",
    denoiser_2: Any = NONE,
    configs: Any = NONE,
    **_unused: Any,
) -> str:
    """Changes with the files, and with what is set for all graphs. What can't be used has its error as the
    fingerprint."""
    names = [str(name) for name in (denoiser, denoiser_2, vae, family, configs)]
    encoders = tuple(str(name) for name in (encoder_1, encoder_2, encoder_3))
    try:
        return model_fingerprint(state, _files(state, names[0], names[1], encoders, *names[2:]))
    except OffloadError as error:
        return f"unusable: {error}"


def problem(state: PackState, *, device_memory: Any = None, host_memory: Any = None, **_unused: Any) -> str | None:
    """Why a budget can't be used. Names are checked by the host, and files when they are read."""
    return budget_problem(device_memory=device_memory, host_memory=host_memory)


def _files(
    state: PackState, denoiser: str, denoiser_2: str, encoders: tuple[str, ...], vae: str, family: str, configs: str
) -> SplitFiles:
    more: dict[str, Any] = {"family": family, "tokenizers": state.tokenizer_places()}
    if configs != NONE:
        more["configs"] = state.model_folder(configs)
    return state.files.chosen(denoiser, denoiser_2, encoders, vae, **more)


NODE = Node(SCHEMA, load_files, fingerprint, problem)
