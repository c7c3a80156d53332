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
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

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
    folder = _folder(call.state, model_id, place, revision, variant)
    said = f"{model_id}: on this machine"
    found = _here(model_id, folder, revision)
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
    if not asked:
        return f"{plan.sentence()} Switch download on to fetch it.", None
    if not call.state.defaults.downloads:
        raise InputError(
            f"{plan.sentence()} Downloads by nodes are off, because a graph that was shared could start them. Switch "
            "on 'Download Model may download' in Settings > Phase Offload (phase-offload run: --allow-downloads)."
        )
    path = download(plan, session=call.session)
    return f"{plan.model_id}: fetched {len(plan.files)} files", path


def _here(model_id: str, folder: Path | None, revision: str) -> Path | None:
    """The model's folder, if all of it is on this machine."""
    from offload_core.model_source import cached_snapshot, resolve_model

    path = folder if folder is not None else cached_snapshot(model_id, revision or None)
    if path is None or not path.is_dir():
        return None
    try:
        resolve_model(path)
    except OffloadError:
        if folder is not None:
            raise
        return None
    return path


def _folder(state: PackState, model_id: str, place: str, revision: str, variant: str) -> Path | None:
    """The folder that the model has or gets, None for the Hub's cache. Each revision and variant has one of its own."""
    if not _ID.fullmatch(model_id) or ".." in model_id:
        raise InputError(
            f"{model_id!r} is no id of the Hub: an id is OWNER/NAME, as in the address of the model's page."
        )
    if place == CACHE:
        if variant:
            raise InputError("A variant needs a folder of its own: choose models/diffusers as its place.")
        return None
    for what, word in (("revision", revision), ("variant", variant)):
        if word and not re.fullmatch(r"\w[\w.-]*", word):
            raise InputError(
                f"The {what} {word!r} can't be a part of a folder's name. Choose the hub cache as its place."
            )
    roots = state.host.model_roots()
    if not roots:
        raise InputError(f"There is no models folder to put {model_id} into. Choose the hub cache as its place.")
    owner, _, name = model_id.partition("/")
    return roots[0] / owner / f"{name}{f'@{revision}' if revision else ''}{f'.{variant}' if variant else ''}"


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
        name, version = str(model_id).strip(), str(revision or "")
        found = _here(name, _folder(state, name, str(place), version, str(variant or "")), version)
        return model_fingerprint(state, found) if found is not None else f"not here, {download} {state.defaults}"
    except OffloadError as error:
        return f"unusable: {error}"


def problem(
    state: PackState, *, model_id: Any = None, device_memory: Any = None, host_memory: Any = None, **_unused: Any
) -> str | None:
    """Why an id or a budget can't be used. Only the words are looked at."""
    if model_id is not None and not _ID.fullmatch(str(model_id).strip()):
        return f"{model_id!r} is no id of the Hub: an id is OWNER/NAME, as in the address of the model's page."
    return budget_problem(device_memory=device_memory, host_memory=host_memory)


NODE = Node(SCHEMA, download_model, fingerprint, problem)
