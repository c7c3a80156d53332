"""Models from the Hugging Face Hub: what a download would take, shown before it starts, and the download itself.

Only what loading needs is fetched: configs, vocabularies, and one set of safetensors weights for each component.
Pickles, code and other formats stay where they are. What is in the Hub's cache already isn't fetched again; what was
cut off goes on where it stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ._report_table import human_bytes
from .checkpoint import show
from .errors import ModelError
from .model_folder import plain_parts
from .model_source import CONTENT_SUFFIXES, DEFAULTS_FILE, INDEX, MODULAR_INDEX, resolve_model
from .session import Progress, Session
from .weight_files import choose_weight_names

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CHUNK_BYTES = 4 << 20
_SPARE_BYTES = 64 << 20  # that a disk keeps free
_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "socket", "ssl")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model on the Hub. nbytes: its size. is_here: whether the Hub's cache on this machine has it. sha256:
    of its bytes, in hex, where the Hub says it (of large files)."""

    name: str
    nbytes: int
    is_here: bool
    sha256: str | None = None


@dataclass(frozen=True)
class DownloadPlan:
    """What a download would fetch. revision: the commit. asked: what it was found by. into: the folder that it would
    make, None for the Hub's cache. left_out: weights of other formats and variants, which aren't needed. free_bytes: of
    the disk it would go to."""

    model_id: str
    revision: str
    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...]
    free_bytes: int
    into: Path | None = None
    endpoint: str | None = None
    asked: str = "main"

    @property
    def total_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        return sum(file.nbytes for file in self.files if not file.is_here)

    @property
    def needed_bytes(self) -> int:
        """What it takes of the disk: a folder gets all of the files, also those that the Hub's cache has."""
        return self.total_bytes if self.into is not None else self.missing_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it."""
        return self.needed_bytes + _SPARE_BYTES <= self.free_bytes or not self.needed_bytes

    def sentence(self) -> str:
        """What it would do, in words."""
        place = f"the folder {self.into.name}" if self.into is not None else "the Hub's cache"
        what = f"{self.model_id}: {len(self.files)} files, {human_bytes(self.total_bytes)}"
        have = self.total_bytes - self.missing_bytes
        here = f", of which {human_bytes(have)} are on this machine" if have else ""
        return f"{what}{here}. To fetch: {human_bytes(self.missing_bytes)}, into {place}."


def checked_id(text: str) -> str:
    """The id of a model on the Hub that `text` is. Raises ModelError for anything else."""
    if not _ID.fullmatch(text.strip()) or ".." in text:
        what = f"{show(text)} is no Hub id. An id is OWNER/NAME, as in the address of the model's page"
        raise ModelError(f"{what}; a single file is fetched from there, by hand.")
    return text.strip()


def plan_download(
    model_id: str,
    *,
    revision: str | None = None,
    variant: str | None = None,
    into: Path | None = None,
    endpoint: str | None = None,
) -> DownloadPlan:
    """What `download` would fetch. Asks the Hub for names and sizes, and fetches the model's index (a few kB).

    revision: a branch, tag or commit, None for the main one. variant: of weights, "fp16", where a component has it.
    into: a folder to be made for the model, which mustn't be there yet; None for the Hub's cache. endpoint: of another
    Hub. Raises ModelError, a sentence: not an id, not there, gated, offline, no diffusers model, pickles only.
    """
    model_id = checked_id(model_id)
    if into is not None and into.exists():
        raise ModelError(
            f"There is a {into.name} in {into.parent.name or '.'} already. Choose another name, or remove it."
        )
    from huggingface_hub import HfApi

    with _explained(model_id):
        info = HfApi(endpoint=endpoint).model_info(model_id, revision=revision or None, files_metadata=True)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
    sums = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs is not None}
    commit = str(info.sha)
    index = next((name for name in (INDEX, MODULAR_INDEX) if name in sizes), None)
    if index is None:
        raise ModelError(_no_model(model_id, sizes))
    components = _components(_fetch_text(model_id, index, commit, endpoint), model_id, index)
    chosen, left_out = _choose(sizes, components, variant, model_id)
    files = tuple(RemoteFile(name, sizes[name], _is_here(model_id, name, commit), sums.get(name)) for name in chosen)
    place = into.parent if into is not None else _cache_folder()
    return DownloadPlan(model_id, commit, files, left_out, _free_bytes(place), into, endpoint, revision or "main")


def download(plan: DownloadPlan, *, session: Session | None = None) -> Path:
    """Fetches what a plan says and returns the model's folder, checked as `load` would check it.

    session: whose observer is told of the bytes, and may interrupt: then what has arrived stays for the next try (in
    the Hub's cache, or in a hidden folder beside `into`), and no half model has its name. Raises ModelError.
    """
    if not plan.fits:
        raise ModelError(
            f"{plan.model_id} needs {human_bytes(plan.needed_bytes)}, and the disk has {human_bytes(plan.free_bytes)} "
            "free. Make room, or choose another place."
        )
    from huggingface_hub import hf_hub_download

    session = session or Session()
    done = 0 if plan.into is not None else plan.total_bytes - plan.missing_bytes
    parts = None if plan.into is None else plan.into.with_name(f".{plan.into.name}.download")
    where: dict[str, Any] = {} if parts is None else {"local_dir": parts}
    folder: Path | None = None
    for file in plan.files:
        bar = _bar(session, plan.total_bytes, done)
        with _explained(plan.model_id), _room(plan):
            path = hf_hub_download(
                plan.model_id, file.name, revision=plan.revision, endpoint=plan.endpoint, tqdm_class=bar, **where
            )
        session.observer.check_interrupt()
        if not (file.is_here and parts is None):
            _check_file(Path(path), file, plan, session)
            done += file.nbytes
        session.observer.progress(Progress("download", "load", min(done, plan.total_bytes), plan.total_bytes, "bytes"))
        if file.name in (INDEX, MODULAR_INDEX):
            folder = Path(path).parent
    if parts is not None and plan.into is not None:
        _finish(parts, plan)
        folder = plan.into
    assert folder is not None
    resolve_model(folder)
    if plan.into is None:
        _note_revision(folder, plan)
    return folder


def _check_file(path: Path, file: RemoteFile, plan: DownloadPlan, session: Session) -> None:
    """Raises ModelError, and removes the file, if it isn't what the Hub says."""
    wrong = path.stat().st_size != file.nbytes
    if not wrong and file.sha256 is not None:
        digest = hashlib.sha256()
        with path.open("rb") as data:
            while chunk := data.read(_CHUNK_BYTES):
                session.observer.check_interrupt()
                digest.update(chunk)
        wrong = digest.hexdigest() != file.sha256
    if wrong:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{file.name} of {plan.model_id} arrived damaged: its bytes aren't those of the Hub. Try again."
        )


@contextmanager
def _room(plan: DownloadPlan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ModelError(f"The disk was full while {plan.model_id} was fetched. Make room, and try again.") from None


def _finish(parts: Path, plan: DownloadPlan) -> None:
    """Gives a fetched folder its name, once it is exactly what was planned and can be loaded."""
    assert plan.into is not None
    wanted = {parts / file.name for file in plan.files}
    for path in parts.rglob("*"):
        if path.is_file() and path not in wanted:  # the client's notes, and what a stopped try for others has left
            path.unlink()
    shutil.rmtree(parts / ".cache", ignore_errors=True)
    try:
        resolve_model(parts)
    except ModelError:
        shutil.rmtree(parts, ignore_errors=True)  # the client would take damaged files for fetched ones
        raise
    parts.rename(plan.into)


# ------------------------------------------------------------------------------------------------ which files


def _components(text: str, model_id: str, index: str) -> dict[str, str]:
    """The folders of a model's components, with the library of each."""
    try:
        entries = json.loads(text)
        found = dict(filter(None, map(_component, entries.items())))
    except (ValueError, AttributeError):
        raise ModelError(f"{index} of {model_id} isn't JSON, so it can't be a diffusers model.") from None
    for name in found:
        if plain_parts(name) != [name]:
            raise ModelError(f"{index} of {model_id} names a component {show(name)}, which is no folder's name.")
    return found


def _component(entry: tuple[str, Any]) -> tuple[str, str] | None:
    """(folder, library) of an entry of an index, None for one that isn't a component. An entry of a modular index says
    in its third value which folder it has, and which class if there is none yet."""
    name, value = entry
    if not isinstance(value, list) or len(value) < 2:
        return None
    spec = value[2] if len(value) > 2 and isinstance(value[2], dict) else {}
    hint = spec.get("type_hint") or [None, None]
    library = value[0] if value[0] is not None else hint[0]
    return (str(spec.get("subfolder") or name), str(library)) if library is not None else None


def _choose(
    sizes: Mapping[str, int], components: Mapping[str, str], variant: str | None, model_id: str
) -> tuple[list[str], tuple[str, ...]]:
    """Names of the files that loading needs, and of the weights that it doesn't."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in sizes:
        path = PurePosixPath(name)
        if len(path.parts) == 2:
            by_folder[path.parts[0]].append(path.name)
    chosen = [name for name in (INDEX, MODULAR_INDEX, DEFAULTS_FILE) if name in sizes]
    left_out: list[str] = []
    for component, library in components.items():
        names = by_folder.get(component, [])
        weights, others = choose_weight_names(names, library, variant)
        if not weights and any(name.endswith((".bin", ".ckpt", ".pt", ".pth")) for name in names):
            raise ModelError(
                f"{component} of {model_id} has pickles only, which can run code and are never opened. Choose a model "
                "with safetensors files."
            )
        left_out += [f"{component}/{name}" for name in others]
        content = [name for name in names if PurePosixPath(name).suffix in CONTENT_SUFFIXES and name not in others]
        chosen += [f"{component}/{name}" for name in sorted({*content, *weights})]
    return chosen, tuple(left_out)


def _no_model(model_id: str, names: Mapping[str, int]) -> str:
    files = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if files:
        some = ", ".join(map(show, files[:3]))
        return (
            f"{model_id} is no diffusers model: it has files of weights ({some}) and no model_index.json. Fetch the "
            "file you want from its page, and load it as a file."
        )
    return f"{model_id} is no diffusers model: it has no model_index.json. Choose another."


# -------------------------------------------------------------------------------------------------- the Hub


def _fetch_text(model_id: str, name: str, commit: str, endpoint: str | None) -> str:
    from huggingface_hub import hf_hub_download

    with _explained(model_id):
        return Path(hf_hub_download(model_id, name, revision=commit, endpoint=endpoint)).read_text("utf-8")


def _is_here(model_id: str, name: str, commit: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model_id, name, revision=commit), str)


def _note_revision(snapshot: Path, plan: DownloadPlan) -> None:
    """Says in the Hub's cache which commit a branch is, so that the id alone is enough from now on: it was asked for by
    its commit, so that all files are of one (docs: huggingface_hub, "Understand caching")."""
    ref = snapshot.parents[1] / "refs" / plan.asked
    if plan.asked != plan.revision and plain_parts(plan.asked) is not None:
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(plan.revision, "utf-8")


def _cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _bar(session: Session, total: int, before: int) -> type:
    """A progress bar class that tells a session's observer, and prints nothing."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.arrived = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.arrived += int(n or 0)
            session.observer.progress(Progress("download", "load", min(before + self.arrived, total), total, "bytes"))
            session.observer.check_interrupt()
            return None

    return Bar


@contextmanager
def _explained(model_id: str) -> Iterator[None]:
    """Turns what the Hub's library raises into a sentence. No token is in it: its own messages are never repeated."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{model_id} is gated. Accept its conditions on its page, and sign in on this machine with `hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{model_id} has no such revision. Choose a branch, tag or commit of its page.") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"The Hub has no model {model_id}, or it is private. Check the id; for a private one sign in with "
            "`hf auth login`."
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise ModelError(
            f"The Hub can't be reached (or HF_HUB_OFFLINE is set), and not all of {model_id} is on this machine. "
            "Connect, or copy the model's folder here."
        ) from None
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no answer")
        if code in (401, 403):
            raise ModelError(f"The Hub refused {model_id}. Sign in on this machine with `hf auth login`.") from None
        raise ModelError(f"The Hub answered {code} when it was asked for {model_id}. Try again later.") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _NETWORK and not isinstance(error, ConnectionError):
            raise
        raise ModelError(
            f"The Hub can't be reached ({type(error).__name__}). Check the connection, and try again."
        ) from None
