"""The adapter to ComfyUI's V3 API and the one module that talks to ComfyUI, against small stand-ins of the host."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_engine
import offload_core
from offload_core.errors import InputError
from offload_core.report import PhaseReport
from offload_core.session import Progress
from offload_core.settings import OffloadSettings
from phase_offload_nodes.catalog import NODES
from phase_offload_nodes.local_host import LocalHost
from phase_offload_nodes.results import NodeResult
from phase_offload_nodes.state import PackState

ROOT = Path(__file__).parents[1]
SCHEMAS_LIMIT_S = 0.005
SCHEMAS = {name: node.schema for name, node in NODES.items()}


class Interrupted(BaseException):
    """As ComfyUI's InterruptProcessingException: no Exception."""


# A stand-in of comfy_api.latest


class Spec:
    """An input or output as the adapter made it. Takes exactly the settings that its version of the host knows."""

    known: tuple[str, ...] = ()
    kind = ""

    def __init__(self, id: str | None = None, **settings: Any) -> None:  # noqa: A002 - the host's name
        assert set(settings) <= set(self.known), (self.kind, settings)
        self.id, self.settings = id, settings


def socket(kind: str, extra: str = "") -> type:
    """A type with Input and Output classes whose signatures can be inspected, as the host's can."""
    sides = {"Input": f"display_name optional tooltip lazy {extra}", "Output": "display_name tooltip is_output_list"}
    made = {}
    for side, names in sides.items():
        known = tuple(names.split())
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("id", *known)]
        made[side] = type(side, (Spec,), {"kind": kind, "known": known, "__signature__": inspect.Signature(parameters)})
    return type(kind, (), made)


class OldSchema:
    def __init__(
        self,
        node_id: str,
        display_name: str | None = None,
        category: str = "",
        inputs: Any = None,
        outputs: Any = None,
        hidden: Any = None,
        description: str = "",
        is_input_list: bool = False,
        is_output_node: bool = False,
    ) -> None:
        vars(self).update({name: value for name, value in locals().items() if name != "self"})


class NewSchema(OldSchema):
    def __init__(
        self,
        node_id: str,
        display_name: str | None = None,
        category: str = "",
        inputs: Any = None,
        outputs: Any = None,
        hidden: Any = None,
        description: str = "",
        search_aliases: Any = None,
        is_input_list: bool = False,
        is_output_node: bool = False,
    ) -> None:
        vars(self).update({name: value for name, value in locals().items() if name != "self"})


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None, expand: Any = None, block_execution: Any = None) -> None:
        self.args, self.ui = args, ui


class ComfyNode:
    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, **inputs: Any) -> Any:
        raise NotImplementedError


def comfy_api(new: bool) -> types.SimpleNamespace:
    more = "advanced" if new else ""
    number = f"default min max step control_after_generate display_mode {more}"
    return types.SimpleNamespace(
        ComfyNode=ComfyNode,
        NodeOutput=NodeOutput,
        Schema=NewSchema if new else OldSchema,
        Int=socket("INT", number),
        Float=socket("FLOAT", f"default min max step round {more}"),
        String=socket("STRING", f"default multiline placeholder {more}"),
        Boolean=socket("BOOLEAN", f"default label_on label_off {more}"),
        Combo=socket("COMBO", f"default options control_after_generate {more}"),
        Image=socket("IMAGE"),
        Mask=socket("MASK"),
        Latent=socket("LATENT"),
        Audio=socket("AUDIO"),
        Video=socket("VIDEO"),
        Conditioning=socket("CONDITIONING"),
        AnyType=socket("*"),
        Custom=socket,
    )


@pytest.fixture(params=["old", "new"])
def io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    api = comfy_api(request.param == "new")
    latest = types.ModuleType("comfy_api.latest")
    latest.io, latest.ComfyExtension = api, type("ComfyExtension", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy_api", types.ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    return api


@pytest.fixture
def state(tmp_path: Path) -> PackState:
    fake_engine.model_folder(tmp_path / "models", "tiny")
    return PackState(LocalHost([tmp_path / "models"]))


def classes(state: PackState) -> dict[str, Any]:
    from phase_offload_nodes.comfy_v3 import make_extension

    nodes = asyncio.run(make_extension(state).get_node_list())
    return {node.define_schema().node_id: node for node in nodes}


# Schemas


def test_every_node_of_the_table_has_a_class_with_its_schema(io: Any, state: PackState) -> None:
    made = classes(state)
    assert list(made) == list(SCHEMAS)
    for node_id, node in SCHEMAS.items():
        schema = made[node_id].define_schema()
        assert schema.display_name == node.display_name
        assert [spec.id for spec in schema.inputs] == [spec.name for spec in node.inputs]
        assert [spec.kind for spec in schema.inputs] == [spec.type for spec in node.inputs]
        assert [spec.kind for spec in schema.outputs] == [spec.type for spec in node.outputs]
        assert all(spec.settings["tooltip"] for spec in (*schema.inputs, *schema.outputs))
        assert schema.is_output_node == node.is_output
        if io.Schema is NewSchema:
            assert schema.search_aliases == list(node.search_aliases)


def test_all_schemas_are_made_in_a_moment(io: Any, state: PackState) -> None:
    """ComfyUI makes them at every /object_info, and for every node of every prompt. The best of many, so that a busy
    machine doesn't matter; an object of the real API takes longer than one of the stand-in, but not ten times."""
    made = classes(state)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        for node in made.values():
            node.define_schema()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < SCHEMAS_LIMIT_S


def test_schemas_made_again_and_again_make_no_new_types(io: Any, state: PackState) -> None:
    """A type of a host is a class, and every prompt asks for schemas: in a long day they would take the memory."""
    made, custom = [], io.Custom
    io.Custom = lambda name: made.append(name) or custom(name)
    for _ in range(3):
        for node in classes(state).values():
            node.define_schema()
    assert made and len(made) == len(set(made))


def test_seed_has_control_after_generate(io: Any, state: PackState) -> None:
    inputs = {spec.id: spec.settings for spec in classes(state)["PhaseOffloadDenoise"].define_schema().inputs}
    assert inputs["seed"]["control_after_generate"] is True
    assert inputs["seed"]["max"] == 2**64 - 1
    assert (inputs["steps"]["default"], inputs["guidance"]["default"], inputs["width"]["default"]) == (0, -1.0, 0)


def test_model_list_is_that_of_the_moment(io: Any, state: PackState, tmp_path: Path) -> None:
    def options() -> list[str]:
        return classes(state)["PhaseOffloadLoad"].define_schema().inputs[0].settings["options"]

    assert options()[0] == "tiny"
    fake_engine.model_folder(tmp_path / "models", "another")
    assert options()[:2] == ["another", "tiny"]


def test_a_model_name_is_checked_before_anything_runs(io: Any, state: PackState) -> None:
    load = classes(state)["PhaseOffloadLoad"]
    assert load.validate_inputs(model="tiny") is True
    assert load.validate_inputs() is True
    assert "no model called" in load.validate_inputs(model="nope")
    assert "no model name" in load.validate_inputs(model="../tiny")
    assert list(inspect.signature(load.validate_inputs).parameters) == ["model"]


def test_an_unusable_budget_is_one_sentence_when_load_runs(io: Any, state: PackState) -> None:
    """Not in `validate_inputs`: the host repeats its sentence for each input that is named there, right or wrong."""
    load = classes(state)["PhaseOffloadLoad"]
    for name in ("device_memory", "host_memory"):
        for budget in ("", "lots", "0", "-1GiB", "101%", "leave"):
            with pytest.raises(InputError, match=f"^{name}={budget!r} isn't a usable memory budget: give auto, a size"):
                load.execute(model="tiny", dtype="auto", device="cpu", **{name: budget})


def test_inputs_that_came_later_are_optional_and_last(io: Any, state: PackState) -> None:
    """Saved workflows list the values of widgets by order, and saved API graphs lack the new names."""
    inputs = classes(state)["PhaseOffloadLoad"].define_schema().inputs
    names = ["model", "dtype", "device", "device_memory", "host_memory", "warm", "settings", "weight_storage"]
    assert [spec.id for spec in inputs] == names
    assert [spec.settings.get("optional", False) for spec in inputs] == [False] * 3 + [True] * 5
    assert [spec.settings["default"] for spec in inputs[3:6]] == ["auto", "auto", False]
    for spec in inputs[3:5]:
        for spelling in ("auto", "6GiB", "60%", "leave 2GiB"):
            assert spelling in spec.settings["tooltip"]


def test_optional_inputs_have_their_schemas_default_in_the_body() -> None:
    for node in NODES.values():
        parameters = inspect.signature(node.run).parameters
        for spec in node.schema.inputs:
            default = parameters[spec.name].default
            assert default == (spec.default if spec.optional else inspect.Parameter.empty)


def test_nodes_with_a_choice_of_files_have_a_fingerprint_and_only_load_checks_its_choice(
    io: Any, state: PackState
) -> None:
    made = classes(state)

    def own(name: str) -> set[str]:
        """Nodes with this method, of their own or of a class between: so the host looks for it."""
        return {
            node_id
            for node_id, node in made.items()
            if any(name in vars(cls) for cls in node.__mro__[: node.__mro__.index(io.ComfyNode)])
        }

    assert own("fingerprint_inputs") == {name for name, node in NODES.items() if node.fingerprint is not None}
    assert own("validate_inputs") == {"PhaseOffloadLoad"}
    first = made["PhaseOffloadLoad"].fingerprint_inputs(model="tiny", dtype="auto", device="auto")
    assert first == made["PhaseOffloadLoad"].fingerprint_inputs(model="tiny", dtype="auto", device="auto")
    assert made["PhaseOffloadLoad"].fingerprint_inputs(model=None) != first


def test_bodies_take_exactly_the_inputs_of_their_schema() -> None:
    for node in NODES.values():
        parameters = list(inspect.signature(node.run).parameters.values())
        assert [p.name for p in parameters[1:]] == [spec.name for spec in node.schema.inputs]


def test_every_node_has_a_help_page() -> None:
    pages = {page.stem: page.read_text("utf-8") for page in (ROOT / "web" / "docs").glob("*.md")}
    assert set(pages) == set(SCHEMAS)
    for node_id, text in pages.items():
        assert text.startswith(f"# {SCHEMAS[node_id].display_name}\n")
        for spec in (*SCHEMAS[node_id].inputs, *SCHEMAS[node_id].outputs):
            assert f"**{spec.name}**" in text, (node_id, spec.name)


# Execution


def test_execute_gives_values_and_ui(io: Any, state: PackState, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.install(monkeypatch)
    made = classes(state)
    purged = made["PhaseOffloadPurgeCache"].execute(anything=3)
    assert purged.args == (3, "Freed 1 MiB.")
    assert purged.ui == {"text": ["Freed 1 MiB."]}
    loaded = made["PhaseOffloadLoad"].execute(model="tiny", dtype="auto", device="cpu")
    assert loaded.args[0].model == "tiny"
    assert loaded.args[0].settings == OffloadSettings()
    assert loaded.ui is None
    budgets = {"device_memory": "6GiB", "host_memory": "50%"}
    loaded = made["PhaseOffloadLoad"].execute(model="tiny", dtype="auto", device="cpu", **budgets)
    assert loaded.args[0].settings == OffloadSettings(**budgets)


def test_a_picture_that_a_node_shows_becomes_a_file_of_the_host_beside_its_text(
    io: Any, state: PackState, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PreviewImage:
        def __init__(self, image: torch.Tensor) -> None:
            self.image = image

        def as_dict(self) -> dict[str, Any]:
            return {"images": [{"filename": f"of {self.image.shape[1]} rows"}], "animated": (False,)}

    picture = torch.zeros(1, 4, 9, 3)
    shown = NodeResult(("table", picture), ui={"text": ["table"]}, shown=picture)
    plan = replace(NODES["PhaseOffloadPlanPreview"], run=lambda call, **_: shown)
    monkeypatch.setitem(NODES, "PhaseOffloadPlanPreview", plan)
    sys.modules["comfy_api.latest"].ui = types.SimpleNamespace(PreviewImage=PreviewImage)  # type: ignore[attr-defined]
    output = classes(state)["PhaseOffloadPlanPreview"].execute()
    assert output.args == ("table", picture)
    assert output.ui == {"text": ["table"], "images": [{"filename": "of 4 rows"}], "animated": (False,)}


def test_a_node_that_takes_lists_gives_lists_and_works_on_all_at_once(
    io: Any, state: PackState, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine.install(monkeypatch)
    made = classes(state)
    for node_id, node in SCHEMAS.items():
        schema = made[node_id].define_schema()
        assert schema.is_input_list == node.takes_lists
        assert [spec.settings.get("is_output_list", False) for spec in schema.outputs] == [
            spec.is_list for spec in node.outputs
        ]
    model = fake_engine.Handle("m", "cpu", "auto")
    encode = made["PhaseOffloadEncodePrompt"].execute
    (one,) = encode(model=[model], prompt=["x"], negative_prompt=[""]).args
    (two,) = encode(model=[model], prompt=["x", "y"], negative_prompt=["z"]).args
    assert one == [fake_engine.Embeds("x", None)]
    assert two == [fake_engine.Embeds("x", "z"), fake_engine.Embeds("y", "z")]
    assert engine.phases == ["encode", "encode_many"]


@pytest.mark.parametrize("error", [InputError("One sentence."), Interrupted(), KeyboardInterrupt(), ValueError("x")])
def test_errors_and_interrupts_pass_through_as_they_are(
    io: Any, state: PackState, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    fake_engine.install(monkeypatch).fails["encode"] = error
    with pytest.raises(type(error)) as caught:
        model = fake_engine.Handle("m", "cpu", "auto")
        encode = classes(state)["PhaseOffloadEncodePrompt"].execute
        encode(model=[model], prompt=["x"], negative_prompt=[""])
    assert caught.value is error


# The module that talks to ComfyUI


class HostModules:
    """Stand-ins for the modules of ComfyUI that host.py asks. Everything sent or asked for is in `sent`."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.routes: list[Any] = []
        self.interrupted = False
        self.args = types.SimpleNamespace(preview_method="auto", preview_size=256)
        self.context: Any = types.SimpleNamespace(node_id="12", prompt_id="first")
        mm = types.SimpleNamespace(
            get_torch_device=lambda: torch.device("cpu"),
            intermediate_device=lambda: torch.device("cpu"),
            throw_exception_if_processing_interrupted=self._throw,
            soft_empty_cache=lambda: self.sent.append("soft_empty_cache"),
            unload_all_models=lambda: self.sent.append("unload_all_models"),
            loaded_models=list,
        )
        sent = self.sent

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                sent.append(("bar", total, node_id))

            def update_absolute(self, value: int, total: int, preview: Any = None) -> None:
                sent.append((value, total, preview))

        self.modules: dict[str, Any] = {
            "comfy": types.SimpleNamespace(model_management=mm, utils=types.SimpleNamespace(ProgressBar=ProgressBar)),
            "comfy.model_management": mm,
            "comfy.cli_args": types.SimpleNamespace(
                args=self.args, LatentPreviewMethod=types.SimpleNamespace(NoPreviews="none")
            ),
            "comfy_execution": types.SimpleNamespace(),
            "comfy_execution.utils": types.SimpleNamespace(get_executing_context=lambda: self.context),
            "folder_paths": types.SimpleNamespace(
                models_dir="/m",
                get_folder_paths=lambda kind: {"diffusers": ["/a", "/b"], "loras": ["/l", "/m/loras"]}[kind],
                get_input_directory=lambda: "/in",
                get_output_directory=lambda: "/out",
            ),
            "server": types.SimpleNamespace(
                PromptServer=types.SimpleNamespace(
                    instance=types.SimpleNamespace(
                        send_progress_text=lambda text, node: sent.append((node, text)),
                        routes=types.SimpleNamespace(route=lambda *_: lambda handler: self.routes.append(handler)),
                    )
                )
            ),
        }
        self.modules["comfy.utils"] = self.modules["comfy"].utils
        self.mm = mm

    def _throw(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise Interrupted


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> HostModules:
    host = HostModules()
    for name, module in host.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return host


def test_host_is_asked_for_folders_devices_and_placement(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    host = ComfyHost()
    assert host.model_roots() == (Path("/a"), Path("/b"))
    assert PackState(host).choices("devices") == ["auto", "cpu"]
    assert host.image_placement() == {"device": torch.device("cpu"), "dtype": torch.float32}
    comfy.mm.get_torch_device = lambda: torch.device("cuda:0")
    comfy.mm.get_all_torch_devices = lambda: [torch.device("cuda:0"), torch.device("cuda:1")]
    comfy.mm.intermediate_dtype = lambda: torch.float16
    assert PackState(host).choices("devices") == ["auto", "cuda:0", "cuda:1", "cpu"]
    assert PackState(host).device("auto") == "cuda:0"
    assert host.image_placement()["dtype"] == torch.float16
    host.release_cache()
    host.make_room()
    assert comfy.sent == ["soft_empty_cache", "unload_all_models"]


def test_folders_are_those_of_the_host(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    host = ComfyHost()
    assert host.folders("loras") == (Path("/l"), Path("/m/loras"))
    assert host.folders("unet_gguf") == ()  # no pack for GGUF has added it
    assert (host.folders("input"), host.folders("output")) == ((Path("/in"),), (Path("/out"),))


def test_phases_are_remembered_by_the_prompt_of_the_host(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    state = PackState(ComfyHost())

    def ran(name: str) -> list[str]:
        """The phases of the prompt that is under way, after one more."""
        state.history.ended(state.host.run_id(), "node", [PhaseReport(name, 1, 0, 0, 0, 0, 0, 0)])
        return [phase.name for phase in state.this_run().phases]

    assert state.this_run().phases == []
    assert (ran("encode"), ran("denoise")) == (["encode"], ["encode", "denoise"])
    comfy.context.prompt_id = "second"
    assert state.this_run().phases == []
    assert ran("decode") == ["decode"]
    comfy.context = None
    assert state.this_run().phases == []


def test_bar_counts_bytes_until_the_first_step_and_never_jumps_back(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    observer = ComfyHost().observer(None)
    for event in (
        Progress("denoise", "load", 512, 1024, "bytes"),
        Progress("denoise", "load", 1024, 1024, "bytes"),
        Progress("denoise", "step", 1, 4, "steps"),
        Progress("denoise", "load", 10, 2048, "bytes"),
        Progress("denoise", "step", 4, 4, "steps"),
    ):
        observer.progress(event)
    bars = [item for item in comfy.sent if item[0] != "12"]
    assert bars == [
        ("bar", 1024, "12"),
        (512, 1024, None),
        (1024, 1024, None),
        ("bar", 4, "12"),
        (1, 4, None),
        (4, 4, None),
    ]
    said = [text for node, text in (item for item in comfy.sent if item[0] == "12")]
    assert said[0].startswith("loading 512 B of 1.0 KiB")
    assert said[-1] == "step 4 of 4"


def test_previews_follow_the_hosts_method(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    picture: Any = object()
    observer = ComfyHost().observer(None)
    assert observer.wants_preview
    observer.progress(Progress("denoise", "step", 1, 2, "steps", picture))
    assert (1, 2, ("JPEG", picture, 256)) in comfy.sent
    comfy.args.preview_method = "none"
    assert not ComfyHost().observer(None).wants_preview


def test_the_hosts_interrupt_passes_through_checks_and_progress(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    observer = ComfyHost().observer(None)
    observer.check_interrupt()
    for act in (observer.check_interrupt, lambda: observer.progress(Progress("decode", "load", 1, 2, "bytes"))):
        comfy.interrupted = True
        with pytest.raises(Interrupted):
            act()


def test_without_a_running_node_nothing_is_sent(comfy: HostModules) -> None:
    from phase_offload_nodes.host import ComfyHost

    comfy.context = None
    ComfyHost().observer(None).status("hello")
    assert comfy.sent == []


# The door


@contextlib.contextmanager
def imported_as(name: str, file: Path) -> Iterator[Any]:
    """Imports a pack as ComfyUI does: by its file, under the name of its path."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def test_the_door_gives_the_modules_that_are_already_there() -> None:
    before = dict(sys.modules)
    with imported_as("/somewhere/custom_nodes/phase-offload", ROOT / "__init__.py") as pack:
        assert (ROOT / pack.WEB_DIRECTORY).is_dir()
        assert sys.modules["offload_core"] is offload_core is before["offload_core"]
        assert sys.modules["phase_offload_nodes"] is before["phase_offload_nodes"]
        assert not hasattr(pack, "NODE_CLASS_MAPPINGS")


def test_comfy_entrypoint_gives_all_nodes(io: Any, comfy: HostModules) -> None:
    with imported_as("/somewhere/custom_nodes/phase-offload", ROOT / "__init__.py") as pack:
        extension = asyncio.run(pack.comfy_entrypoint())
    assert comfy.routes
    assert len(asyncio.run(extension.get_node_list())) == len(NODES)


DOOR = """
import importlib.util, sys
for name in ("offload_core", "phase_offload_nodes"):
    assert name not in sys.modules
{before}
spec = importlib.util.spec_from_file_location("/x/custom_nodes/pack_x_1", {door!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import offload_core, phase_offload_nodes, offload_core.errors
{after}
"""


def door(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Imports the pack in a fresh process that knows nothing of an installed copy."""
    code = DOOR.format(before=before, after=after, door=str(ROOT / "__init__.py"))
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120)


def test_the_door_works_where_the_pack_isnt_installed() -> None:
    result = door(after=f"assert offload_core.__path__ == [{str(ROOT / 'offload_core')!r}], offload_core.__path__")
    assert result.returncode == 0, result.stderr


def test_the_door_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'numpy', 'PIL', 'comfy', 'server', 'folder_paths'}"
    result = door(after=f"loaded = {heavy} & set(sys.modules)\nassert not loaded, loaded")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("version", "works"), [(offload_core.__version__, True), ("9.9.9", False)])
def test_another_copy_is_used_if_its_version_is_the_same(tmp_path: Path, version: str, works: bool) -> None:
    for name in ("offload_core", "phase_offload_nodes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (tmp_path / name / "errors.py").touch()
    result = door(before=f"sys.path.insert(0, {str(tmp_path)!r})\nimport offload_core, phase_offload_nodes")
    assert (result.returncode == 0) == works, result.stderr
    if not works:
        assert "ImportError: offload_core 9.9.9 was already imported from" in result.stderr
        assert "keep one copy of the pack" in result.stderr
