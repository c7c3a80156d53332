"""The command line: generate, demo, plan, models, bench, families, presets and purge; the nodes add run.

A thin door: it turns arguments into calls of the library, shows progress, writes files, and turns every error into
one sentence and an exit code. Numbers are checked by the library, file names here, before anything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import __version__, demo
from . import _picture_files as files
from ._console import InterruptFlag, Terminal, quiet_libraries
from ._memory_options import add_memory_arguments, add_preset_argument, memory_settings
from .errors import InputError, InsufficientMemoryError, OffloadError

#: Exit code -> what it means, as --help and the README list them.
EXIT_CODES = {
    0: "done",
    1: "something unforeseen: a full disk, or a fault in this program (--debug shows where)",
    2: "an argument or an input that can't be used",
    3: "not enough memory on the device or in the machine",
    4: "a model that can't be used: missing, incomplete, damaged, or it wants pickles or code",
    130: "stopped by Ctrl-C",
}


_DEBUG_HELP = "show log messages, and tracebacks of errors"


@dataclass(frozen=True)
class Command:
    """One subcommand. `run` raises OffloadError for what a person can put right. has_report: it takes --report."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Terminal], None]
    has_report: bool = True


def main(argv: Sequence[str] | None = None, extra_commands: Iterable[Command] = ()) -> int:
    """Runs one command and returns its exit code. Argument errors leave through SystemExit(2), as argparse does."""
    own = (PLAN, MODELS, BENCH, FAMILIES, PRESETS, PURGE)
    commands = {command.name: command for command in (GENERATE, DEMO, *extra_commands, *own)}
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser(commands.values(), words).parse_args(words)
    interrupt = InterruptFlag()
    try:
        with interrupt.listening():
            quiet_libraries(args.debug)
            commands[args.command].run(args, Terminal(interrupt))
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if interrupt.pressed:  # a library turned the interrupt into an error of its own
            return _interrupted()
        if args.debug:
            import traceback

            traceback.print_exc()
        return _failed(error)
    return 0


def finish(terminal: Terminal, report: Any, report_file: Path | None, written: Sequence[Path] = ()) -> None:
    """Ends a command: shows the report's table, writes its JSON if asked, and says where the pictures are."""
    terminal.say(report.table())
    if report_file is not None:
        written = [*written, *files.write_files([(report_file, files.text_writer(report.to_json() + "\n"))])]
    for path in written:
        terminal.say(f"Wrote {path}")


# ------------------------------------------------------------------------------------------------- generate


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    from . import _generate_command

    _generate_command.add_arguments(parser)
    add_preset_argument(parser)
    add_memory_arguments(parser)


def _generate(args: argparse.Namespace, terminal: Terminal) -> None:
    from . import _generate_command

    report, written = _generate_command.run(args, terminal)
    finish(terminal, report, args.report, written)


GENERATE = Command("generate", "make pictures or sound from a prompt with a model", _generate_arguments, _generate)


# ----------------------------------------------------------------------------------------------------- demo


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("phase-offload-demo"),
        metavar="DIR",
        help="folder for the pictures, made if it isn't there (phase-offload-demo)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other pictures (0)")
    parser.add_argument("--captions", nargs="+", metavar="TEXT", help="your own captions instead of the six built in")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ... (auto)")
    add_preset_argument(parser)
    add_memory_arguments(parser)


def _demo(args: argparse.Namespace, terminal: Terminal) -> None:
    made = _make_folder(args.output_dir)
    try:
        _run_demo(args, terminal)
    except BaseException:
        if made:
            args.output_dir.rmdir()
        raise


def _run_demo(args: argparse.Namespace, terminal: Terminal) -> None:
    captions = args.captions or _example_captions()
    _remark_on_captions(captions, terminal)
    with terminal.session() as session:
        import offload_core
        from offload_core.demo import contact_sheet

        handle = offload_core.load(demo.MODEL, device=args.device, settings=memory_settings(args))
        embeds = offload_core.encode(handle, captions, session=session)
        latents = offload_core.denoise(handle, embeds, seed=args.seed, session=session)
        images = offload_core.decode(handle, latents, output_type="pil", session=session)

    names = [args.output_dir / f"{i}-{_file_name(caption)}.png" for i, caption in enumerate(captions, 1)]
    sheet_file = args.output_dir / "captions.png"
    sheet = contact_sheet.draw(captions, images, title=f"phase-offload demo, seed {args.seed}")
    pictures = [*zip(names, images, strict=True), (sheet_file, sheet)]
    files.write_files([writer for name, image in pictures for writer in files.picture_writers(name, [image])])

    terminal.say("One model, three phases, each with only its own weights in memory, all captions at once:\n")
    finish(terminal, session.report, args.report)
    terminal.say("")
    for caption, name in zip(captions, names, strict=True):
        terminal.say(f"{caption}\n    {name}")
    terminal.say(f"\nCaptions beside pictures: {sheet_file}")


def _example_captions() -> list[str]:
    """The captions that the demo model's own defaults file suggests."""
    return json.loads((demo.MODEL / "phase_offload.json").read_text("utf-8"))["example_prompts"]


def _make_folder(folder: Path) -> bool:
    """Makes the folder if it isn't there; True if it did. Its parent has to exist."""
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"Can't make the folder {folder} ({error.strerror}); give another --output-dir.") from None
    files.check_writable(folder / "captions.png")
    return made


def _remark_on_captions(captions: Sequence[str], terminal: Terminal) -> None:
    from offload_core.demo import scenes

    for caption in captions:
        try:
            scenes.parse_caption(caption)
        except ValueError as error:
            terminal.note(f"The demo model may miss this one: {error}")


def _file_name(caption: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in caption.lower()).split()
    return "-".join(words)[:60] or "empty"


DEMO = Command("demo", "draw six captions with the small model that comes along", _demo_arguments, _demo)


# ---------------------------------------------------------------------------------------------------- bench


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from .bench import foresight, offload, seeds

    subjects = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, room, says in (
        ("offload", offload, "this engine beside others, on a model made for it"),
        ("foresight", foresight, "what is foretold of a job beside what happens, on tiny models of many families"),
        ("seeds", seeds, "one job, prompt to picture, beside diffusers and Diffusers Dynamic Offloader"),
    ):
        subject = subjects.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
        room.add_arguments(subject)
        subject.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
        subject.set_defaults(bench=room.run)


def _bench(args: argparse.Namespace, terminal: Terminal) -> None:
    args.bench(args, terminal)


BENCH = Command("bench", "measure this engine on models made for it", _bench_arguments, _bench, has_report=False)


# ------------------------------------------------------------------------------------------------- families


def _families_arguments(parser: argparse.ArgumentParser) -> None:
    from .bench import families

    families.add_arguments(parser)


def _families(args: argparse.Namespace, terminal: Terminal) -> None:
    from .bench import families

    families.run(args, terminal)


FAMILIES = Command(
    "families",
    "run a tiny model of every family in phases, and say what works",
    _families_arguments,
    _families,
    has_report=False,
)


# ----------------------------------------------------------------------------------------------------- plan


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from . import _plan_command

    _plan_command.add_arguments(parser)
    add_preset_argument(parser)
    add_memory_arguments(parser)


def _plan(args: argparse.Namespace, terminal: Terminal) -> None:
    from . import _plan_command

    _plan_command.run(args, terminal)


PLAN = Command("plan", "say what a job will take, before anything is loaded", _plan_arguments, _plan, has_report=False)


# ---------------------------------------------------------------------------------------------------- purge


def _purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="a model folder whose files leave the page cache (Linux), may be given again",
    )
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ... (auto)")


def _purge(args: argparse.Namespace, terminal: Terminal) -> None:
    import offload_core

    report = offload_core.purge(args.device, files=args.model, standby=True)
    terminal.say(report.table())
    terminal.say(report.sentence())


PURGE = Command(
    "purge",
    "give back what caches keep: of model files (--model), and the Windows standby list (elevated)",
    _purge_arguments,
    _purge,
    has_report=False,
)


# -------------------------------------------------------------------------------------------------- presets


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def _presets(args: argparse.Namespace, terminal: Terminal) -> None:
    import os

    from .ddo import variables_table
    from .presets import presets_table

    terminal.say(presets_table())
    terminal.say("")
    terminal.say(variables_table(os.environ))


PRESETS = Command(
    "presets",
    "list the presets, and the DDO_... variables that are honoured",
    _no_arguments,
    _presets,
    has_report=False,
)


# --------------------------------------------------------------------------------------------------- models


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    from . import _models_command

    _models_command.add_arguments(parser)


def _models(args: argparse.Namespace, terminal: Terminal) -> None:
    from . import _models_command

    _models_command.run(args, terminal)


MODELS = Command("models", "list, fetch or check models", _models_arguments, _models, has_report=False)


# -------------------------------------------------------------------------------------- parser, errors, exit


def _parser(commands: Iterable[Command], words: Sequence[str]) -> argparse.ArgumentParser:
    """A parser for `words`. Only the command among them gets its arguments: `bench` imports its rooms for them."""
    commands = list(commands)
    names = {command.name for command in commands}
    chosen = next((word for word in words if word in names), None)
    epilog = "exit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="phase-offload",
        description="Runs diffusers models in phases (encode, denoise, decode), each with its own weights only.",
        epilog=epilog,
        formatter_class=shape,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=epilog,
            formatter_class=shape,
            allow_abbrev=False,
        )
        if command.name == chosen:
            command.add_arguments(sub)
        if command.has_report:
            sub.add_argument("--report", type=_report_file, metavar="FILE.json", help="write the phase report as JSON")
        sub.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    return parser


def _report_file(text: str) -> Path:
    path = Path(text)
    try:
        files.check_writable(path)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _interrupted() -> int:
    _complain("Stopped by Ctrl-C. Nothing was written.")
    return 130


def _failed(error: Exception) -> int:
    """Says in one sentence what went wrong and returns the exit code."""
    if isinstance(error, OffloadError):
        _complain(str(error))
        return error.exit_code
    if isinstance(error, MemoryError):
        _complain("The machine ran out of memory. Close other programs, or ask for fewer or smaller pictures.")
        return InsufficientMemoryError.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror}{where}.")
        return 1
    first_line = str(error).strip().partition("\n")[0]
    _complain(f"Unexpected {type(error).__name__}: {first_line} (run again with --debug to see where).")
    return 1


def _complain(sentence: str) -> None:
    sys.stderr.write(f"phase-offload: {sentence}\n")
