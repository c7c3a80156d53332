"""What the pack remembers between calls, and what it asks of its host. Made once at the door and passed down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offload_core.errors import InputError, OffloadError
from offload_core.memory_host import MemoryHost
from offload_core.prompt_cache import PromptCache
from offload_core.report import PhaseReport, RunReport
from offload_core.settings import OffloadSettings
from offload_core.warm import WarmStore

from .companion_files import CompanionFiles
from .defaults import Defaults, is_auto
from .file_list import NONE, FileList
from .followed import process_memory
from .machine import MachineFigures
from .model_list import DEMO_MODEL, ModelList
from .model_parts import ModelPartFiles
from .patcher import WarmCopies
from .progress import NodeObserver
from .record_files import EMBEDS_ENDING, LATENTS_ENDING, record_places
from .run_history import RunHistory

if TYPE_CHECKING:
    import torch

    from offload_core.model_source import ModelSource
    from offload_core.single_files import SplitFiles

REMEMBERED_PHASES = 100


class Host(Protocol):
    """What runs the nodes: ComfyUI, or the graph runner."""

    def model_roots(self) -> Sequence[Path]:
        """Folders to look for diffusers models in, as they are set now."""

    def folders(self, kind: str) -> Sequence[Path]:
        """The folders of a kind, as they are set now: "loras", "input", "output", or one of files that models are made
        of ("checkpoints", "diffusion_models", "text_encoders", "clip_vision", "vae"; "unet_gguf" and "clip_gguf", which
        a pack for GGUF adds) or are loaded with ("controlnet", "ipadapter"). Empty for a kind that this host doesn't
        have."""

    def tokenizer_folders(self) -> Sequence[Path]:
        """Folders to look for the tokenizers of such models in."""

    def devices(self) -> Sequence[str]:
        """Devices a person may choose, "cpu" among them."""

    def auto_device(self) -> str:
        """The device that "auto" stands for."""

    def auto_budgets(self) -> Mapping[str, str]:
        """The memory budgets that "auto" stands for, by the name of the setting. Those left out stay "auto"."""

    @property
    def memory(self) -> MemoryHost:
        """Who makes room for phases and counts what they pin."""

    def offer(self, warm: WarmCopies) -> None:
        """Host copies of weights that the host may take back at any moment."""

    def image_placement(self) -> dict[str, Any]:
        """Where IMAGE outputs belong: the device and dtype for `Tensor.to`."""

    def video(self, image: torch.Tensor, frame_rate: float, audio: Any) -> Any:
        """A VIDEO of the frames of an IMAGE, and of an AUDIO if it isn't None."""

    def nothing(self, why: str) -> Any:
        """The value of an output that has none: what follows it doesn't run, and the person is told why."""

    def observer(self, node_id: str | None) -> NodeObserver:
        """Who listens to a node while it runs, and may interrupt it."""

    def run_id(self) -> str:
        """The prompt that the running node belongs to."""

    def is_interrupt(self, error: BaseException) -> bool:
        """Whether an error is a person's wish to stop."""

    def send(self, event: str, data: dict[str, Any]) -> None:
        """Tells who watches: `data` is JSON. Nothing happens if nobody does."""

    def free_between_prompts(self) -> None:
        """Unload models and empty caches when no node runs: now, or after the prompt that runs. From any thread."""

    def release_cache(self) -> None:
        """Gives back what the host itself caches on the device without using it."""

    def make_room(self) -> None:
        """A node ran out of memory: unload what the host can spare, so that the next try has more."""


class PackState:
    """Lists of models and files, opened model folders, what a person set for all graphs, what the last runs did, and
    what stays between prompts: answers of encoders and, where a model asks for it, warm weights."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.report = RunReport()
        self.defaults = Defaults()
        self.history = RunHistory(process_memory)
        self.machine = MachineFigures(host.auto_device)
        self.prompt_cache = PromptCache()
        self.warm = WarmStore()
        host.offer(self.warm)
        self._models = ModelList(host.model_roots, lambda: host.folders("checkpoints"))
        self.files = ModelPartFiles(host)
        self.companions = CompanionFiles(host)
        self.loras = FileList("LoRA", ".safetensors", lambda: [("", folder) for folder in host.folders("loras")])
        self.embeds = FileList("file of saved embeds", EMBEDS_ENDING, lambda: record_places(host))
        self.latents = FileList("file of saved latents", LATENTS_ENDING, lambda: record_places(host))
        self._sources: dict[Path | SplitFiles, ModelSource] = {}

    def choices(self, name: str) -> list[str]:
        """The values of a combo whose options only the running pack knows."""
        lists: dict[str, Callable[[], list[str]]] = {
            "models": self._models.names,
            "devices": self._devices,
            "loras": self.loras.names,
            "embeds": self.embeds.names,
            "latents": self.latents.names,
            "config_folders": lambda: [NONE, *self._models.folders()],
            **self.files.choices(),
            **self.companions.choices(),
        }
        return lists[name]()

    def model(self, name: str) -> Path | SplitFiles:
        """The folder of a model in the list, or the file that it is. Raises ModelError for any other name."""
        from offload_core.single_files import SplitFiles

        file = self._models.checkpoint(name)
        return self._models.folder(name) if file is None else SplitFiles(file, tokenizers=self.tokenizer_places())

    def model_folder(self, name: str) -> Path:
        """The folder of a model in the list. Raises ModelError for any other name, that of a file too."""
        return self._models.folder(name)

    def tokenizer_places(self) -> tuple[str, ...]:
        """Where tokenizers of models made of files may be: what the host names, then the diffusers folders. Not the
        demo model, whose tokenizers have the names of others and a vocabulary of their own."""
        folders = [folder for name, folder in self._models.folders().items() if name != DEMO_MODEL]
        return tuple(map(str, (*self.host.tokenizer_folders(), *folders)))

    def device(self, choice: str) -> str:
        """The device that a choice of the list stands for. Raises InputError for any other."""
        devices = self._devices()
        if choice not in devices:
            raise InputError(f"The device {choice!r} isn't there: choose one of {', '.join(devices)}.")
        return self.host.auto_device() if choice == "auto" else choice

    def settings(self, base: OffloadSettings | None = None, **budgets: str) -> OffloadSettings:
        """Engine settings with these memory budgets. One that is "auto" or isn't given is that of `base`, without one
        what is set for all graphs; where that is "auto", too, the host may have another."""
        settings = base or OffloadSettings(**self.defaults.numbers())
        given: dict[str, Any] = {name: budget for name, budget in budgets.items() if not is_auto(budget)}
        settings = replace(settings, **given)
        auto: dict[str, Any] = dict(self.host.auto_budgets())
        return replace(settings, **{name: auto[name] for name in auto if getattr(settings, name) == "auto"})

    def with_kept(self, settings: OffloadSettings, *, warm: bool = False) -> OffloadSettings:
        """The settings, with what stays between prompts: weights in RAM if a node asks for it (`warm`) or it is set for
        all graphs, and encoded prompts on disk if that is set for all graphs."""
        from offload_core.small_files import cache_folder

        folder = settings.prompt_cache_folder
        if folder is None and self.defaults.prompt_cache:
            folder = str(cache_folder() / "prompts")
        return replace(settings, warm=warm or settings.warm or self.defaults.warm, prompt_cache_folder=folder)

    def fingerprint(self, model: Path | SplitFiles) -> str:
        """Changes whenever a file of the model changes. Reads headers once, then only asks for sizes and times."""
        from offload_core import model_source

        source = self._sources.get(model)
        if source is not None:
            try:
                source.check_unchanged()
                return source.fingerprint
            except OffloadError:
                del self._sources[model]
        source = self._sources[model] = model_source.resolve_model(model)
        return source.fingerprint

    def remember(self, phases: Sequence[PhaseReport]) -> None:
        self.report.phases.extend(phases)
        del self.report.phases[:-REMEMBERED_PHASES]

    def this_run(self) -> RunReport:
        """Reports of the phases that the run of the graph that is under way has had so far, oldest first."""
        return self.history.report(self.host.run_id()) or RunReport()

    def _devices(self) -> list[str]:
        return list(dict.fromkeys(("auto", *self.host.devices(), "cpu")))
