"""The `phase-offload` command: what the engine's command line has, plus `run` for graphs of nodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offload_core._memory_options import add_memory_arguments
from offload_core.cli import Command, Terminal, finish
from offload_core.cli import main as cli_main
from offload_core.errors import InputError

DEFAULT_MODELS = Path("models/diffusers")
DEFAULT_LORAS = Path("models/loras")
DEFAULT_FILES = Path("models")
DEFAULT_TOKENIZERS = Path("comfy")
# As ComfyUI has them: two kinds have folders by an older name, too.
FILE_FOLDERS = {
    "checkpoints": ("checkpoints",),
    "diffusion_models": ("unet", "diffusion_models"),
    "text_encoders": ("text_encoders", "clip"),
    "clip_vision": ("clip_vision",),
    "controlnet": ("controlnet", "t2i_adapter"),
    "ipadapter": ("ipadapter",),
    "vae": ("vae",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    return cli_main(argv, extra_commands=[RUN])


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", type=Path, metavar="GRAPH.json", help="a graph exported with Workflow > Export (API)")
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="where SaveImage writes; made if it isn't there"
    )
    parser.add_argument(
        "--models-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder of model folders, may be given again; the demo model is always there "
        f"(default: {DEFAULT_MODELS.as_posix()} if it exists)",
    )
    parser.add_argument(
        "--input-dir", type=Path, metavar="DIR", help="where LoadImage finds pictures (default: the graph's folder)"
    )
    parser.add_argument(
        "--loras",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"a folder of LoRA files, may be given again (default: {DEFAULT_LORAS.as_posix()} if it exists)",
    )
    parser.add_argument(
        "--files-dir",
        type=Path,
        default=DEFAULT_FILES,
        metavar="DIR",
        help="ComfyUI's models folder, for models made of files: those in its checkpoints, diffusion_models, unet, "
        "text_encoders, clip and vae folders, and what is in its clip_vision, controlnet and ipadapter folders "
        f"(default: {DEFAULT_FILES.as_posix()})",
    )
    parser.add_argument(
        "--tokenizers",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder to look for the tokenizers of such models in, may be given again "
        f"(default: {DEFAULT_TOKENIZERS.as_posix()}, where ComfyUI has them, if it exists)",
    )
    parser.add_argument(
        "--allow-downloads", action="store_true", help="let Download Model nodes fetch models from the Hub"
    )
    add_memory_arguments(
        parser, "They are for Load nodes that say auto; a node that says anything else keeps its own budget."
    )


def _run(args: argparse.Namespace, terminal: Terminal) -> None:
    from .graph import read_graph

    prompt = read_graph(args.graph)
    roots = _roots(args.models_dir, DEFAULT_MODELS, "models", "model folders")
    loras = _roots(args.loras, DEFAULT_LORAS, "loras", "LoRA files")
    tokenizers = _roots(args.tokenizers, DEFAULT_TOKENIZERS, "tokenizers", "tokenizers")
    files = {kind: [args.files_dir.absolute() / name for name in names] for kind, names in FILE_FOLDERS.items()}
    _check_output_dir(args.output_dir)
    budgets = {"device_memory": args.device_memory, "host_memory": args.host_memory}

    from offload_core.limits import check_budget

    from .graph_runner import GraphRunner
    from .local_host import LocalHost

    for name, budget in budgets.items():
        check_budget(budget, name)
    with terminal.session() as session:
        host = LocalHost(
            roots,
            listener=session.observer,
            budgets=budgets,
            folders={"loras": loras, **files},
            tokenizers=tokenizers,
        )
        runner = GraphRunner(
            host, output_dir=args.output_dir, input_dir=args.input_dir or args.graph.parent, cache="none"
        )
        runner.state.defaults = replace(runner.state.defaults, downloads=args.allow_downloads)
        result = runner.run(prompt)
    for node_id, shown in result.ui.items():
        for text in shown.get("text", ()):
            terminal.say(f"Node {node_id}: {text}")
    finish(terminal, runner.state.report, args.report, result.images)


def _roots(given: Sequence[Path] | None, default: Path, kind: str, holds: str) -> list[Path]:
    if given is None:
        return [default.absolute()] if default.is_dir() else []
    for folder in given:
        if not folder.is_dir():
            raise InputError(f"The {kind} folder {folder} isn't there: give the folder that holds the {holds}.")
    return [folder.absolute() for folder in given]


def _check_output_dir(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"The output folder {folder} is a file: choose another name.")


RUN = Command("run", "run a ComfyUI API-format graph without ComfyUI", _add_arguments, _run)
