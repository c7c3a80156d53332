"""Download Model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.errors import InputError, OffloadError

from ..results import NodeResult
from ..schema import Input, Node, NodeSchema, Output
from ._loading import OPTIONAL, OUTPUT, REQUIRED, budget_problem, handle_of, model_fingerprint

if TYPE_CHECKING:
    from ..calls import NodeCall
    from ..state import PackState

CACHE, FOLDER = "hub cache", "models/diffusers"

SCHEMA = NodeSchema(
    id="PhaseOffloadDownloadModel",
    display_name="Download Model",
    description=(
        "A model by its id on the Hugging Face Hub. What is on this machine is used as it is. What isn't is shown "
        "first: how many files and bytes. It is fetched only with download on, and only if downloads are allowed in "
        "Settings > Phase Offload."
    ),
    inputs=(
        Input(
            "model_id",
            "STRING",
            "OWNER/NAME, as in the address of the model's page. It has to be a diffusers model with safetensors "
            "weights.",
            default="",
        ),
        Input(
            "place",
            "COMBO",
            "Where it goes. hub cache: where other programs that use the Hub find it, too. models/diffusers: a folder "
            "of its own, which Load With Dynamic Offload lists.",
            default=CACHE,
            options=(CACHE, FOLDER),
        ),
        Input(
            "download",
            "BOOLEAN",
            "Fetch what isn't here. Off: only say what that would be.",
            default=False,
        ),
        *REQUIRED,
        Input(
            "revision",
            "STRING",
            "A branch, tag or commit. Empty: the main one.",
            default="",
            advanced=True,
            optional=True,
        ),
        Input(
            "variant",
            "STRING",
            "Of weights, such as fp16, where a component has it. Empty: the plain ones.",
            default="",
            advanced=True,
            optional=True,
        ),
        *OPTIONAL,
    ),
    outputs=(OUTPUT, Output("report", "STRING", "What is here, what was fetched, or what would be.")),
    search_aliases=("hugging face", "hub", "hf", "download", "get model", "load diffusers"),
    is_output=True,
)


def download_model(
    call: NodeCall,
    *,
    model_id: str,
    place: str,
    download: bool,
    dtype: str,
    device: str,
    revision: str = "",
    variant: str = "",
    device_memory: str = "auto",
    host_memory: str = "auto",
    warm: bool = False,
    settings: Any = None,
    weight_storage: str = "as stored",
) -> NodeResult:
    """PhaseOffloadDownloadModel: a handle of the model, and what was or would be fetched, in words."""
    model_id = model_id.strip()
    folder, there = _place(call.state, model_id, place, revision, variant)
    said, found = f"{model_id}: on this machine", _usable(call.state, there, whole=folder is not None)
    if found is None:
        said, found = _fetched(call, model_id, folder, revision, variant, download)
    call.observer.status(said)
    if found is None:
        return NodeResult((call.state.host.nothing(said), said), ui={"text": [said]})
    handle = handle_of(
        call,
        "Download Model",
        found,
        dtype=dtype,
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        warm=warm,
        settings=settings,
        weight_storage=weight_storage,
    )
    return NodeResult((handle, said), ui={"text": [said]})


def _fetched(
    call: NodeCall, model_id: str, folder: Path | None, revision: str, variant: str, asked: bool
) -> tuple[str, Path | None]:
    from offload_core.downloads import download, plan_download

    plan = plan_download(model_id, revision=revision or None, variant=variant or None, into=folder)
    if not plan.missing_bytes and folder is None:
        return f"{model_id}: on this machine", download(plan, session=call.session)
    if not asked:
        return f"{plan.sentence()} Switch download on to fetch it.", None
    if not call.state.defaults.downloads:
        raise InputError(
            f"{plan.sentence()} Downloads by nodes are off, because a graph that was shared could start them. Switch "
            "on 'Download Model may download' in Settings > Phase Offload (phase-offload run: --allow-downloads)."
        )
    path = download(plan, session=call.session)
    return f"{plan.model_id}: fetched {len(plan.files)} files", path


def _place(state: PackState, model_id: str, place: str, revision: str, variant: str) -> tuple[Path | None, Path | None]:
    """The folder that the model gets, None for the Hub's cache; and where it is already. Each revision and variant has
    a folder of its own. Raises InputError or ModelError for words that no model can have."""
    from offload_core.downloads import checked_id
    from offload_core.model_source import cached_snapshot

    owner, _, name = checked_id(model_id).partition("/")
    if place == CACHE:
        if variant:
            raise InputError("A variant needs a folder of its own: choose models/diffusers as its place.")
        return None, cached_snapshot(f"{owner}/{name}", revision or None)
    for what, word in (("revision", revision), ("variant", variant)):
        if word and not re.fullmatch(r"\w[\w.-]*", word):
            raise InputError(
                f"The {what} {word!r} can't be a part of a folder's name. Choose the hub cache as its place."
            )
    roots = state.host.model_roots()
    if not roots:
        raise InputError(f"There is no models folder to put {model_id} into. Choose the hub cache as its place.")
    folder = roots[0] / owner / f"{name}{f'@{revision}' if revision else ''}{f'.{variant}' if variant else ''}"
    return folder, folder if folder.is_dir() else None


def _usable(state: PackState, there: Path | None, whole: bool) -> Path | None:
    """What is there, if all of it is; a folder that has the model's name and isn't `whole` is an error."""
    if there is None:
        return None
    try:
        state.fingerprint(there)
    except OffloadError:
        if whole:
            raise
        return None  # the Hub's cache has a part of it
    return there


def fingerprint(
    state: PackState,
    *,
    model_id: Any = "",
    place: Any = CACHE,
    revision: Any = "",
    variant: Any = "",
    download: Any = False,
    **_unused: Any,
) -> str:
    """Changes with the model's files, and when they come."""
    try:
        _, there = _place(state, str(model_id), str(place), str(revision or ""), str(variant or ""))
        if there is not None:
            return model_fingerprint(state, there)
    except OffloadError as error:
        return f"unusable: {error} {download} {state.defaults}"
    return f"not here, {download} {state.defaults}"


def problem(
    state: PackState, *, model_id: Any = None, device_memory: Any = None, host_memory: Any = None, **_unused: Any
) -> str | None:
    """Why an id or a budget can't be used. Only the words are looked at."""
    from offload_core.downloads import checked_id

    try:
        if model_id is not None:
            checked_id(str(model_id))
    except OffloadError as error:
        return str(error)
    return budget_problem(device_memory=device_memory, host_memory=host_memory)


NODE = Node(SCHEMA, download_model, fingerprint, problem)
