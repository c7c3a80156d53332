"""The command ``bench seeds``: one job beside the projects that this one comes from, each way in a fresh process.

The seeds are diffusers, Diffusers Dynamic Offloader and vLLM-Omni. A job is prompt, steps and picture on a FLUX-like
model that is made for it; a row has the seconds of its stages, its peaks, and whether the picture is that of plain
diffusers, bit for bit. What a swap of the sequential backend costs is measured beside one that copies back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _picture_files as files
from ..errors import InputError
from .job import Job
from .model import drop_from_page_cache
from .offload import answer_of, machine, parse_size
from .pipeline_model import flux_pipeline, make_pipeline
from .seed_ways import SEED_WAYS

if TYPE_CHECKING:
    from .._console import Terminal

DEFAULT_SIZE = 512 << 20


@dataclass
class SeedRow:
    """One way, as measured. status: "ok", "skipped" (can't run here) or "failed" (it tried); `reason` says why.

    setup_s: loading and attaching, in all passes; of phases what their reports say of it. resident_peak_bytes: the peak
    resident set, mapped file pages included. private_peak_bytes: of memory that no file backs. Baselines are after the
    imports. same_picture: as plain diffusers, every bit. others_cpus: CPUs that other processes kept busy.
    """

    way: str
    status: str = "ok"
    reason: str = ""
    setup_s: float | None = None
    encode_s: float | None = None
    denoise_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    baseline_resident_bytes: int | None = None
    resident_peak_bytes: int | None = None
    baseline_private_bytes: int | None = None
    private_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    others_cpus: float | None = None
    picture_digest: str | None = None
    same_picture: bool | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench seeds``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and the summary here")
    parser.add_argument("--model-dir", type=Path, metavar="DIR", help="keep the made model here and use it again")
    parser.add_argument("--size", type=parse_size, default=DEFAULT_SIZE, metavar="BYTES", help="of the model (512M)")
    parser.add_argument(
        "--budget", type=parse_size, metavar="BYTES", help="device_memory of phases and of the DDO names (auto)"
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="denoising steps (4)")
    parser.add_argument(
        "--tokens", nargs=2, type=int, default=(64, 64), metavar=("IMAGE", "TEXT"), help="of one step (64 64)"
    )
    parser.add_argument("--ways", nargs="+", choices=SEED_WAYS, metavar="WAY", help=f"some of: {', '.join(SEED_WAYS)}")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for each process (600)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, ... (auto)")
    parser.add_argument("--no-swap", action="store_true", help="leave out the cost of a swap")


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Runs the benchmark, shows a table on stdout and progress on stderr. Raises InputError for its arguments."""
    from ..devices import resolve_device
    from . import seed_table as table

    if args.steps < 1 or min(args.tokens) < 1:
        raise InputError("A job has one step and one token or more: give --steps and --tokens from 1 on.")
    if args.json is not None:
        files.check_writable(args.json)
    home = args.model_dir or Path(tempfile.gettempdir()) / "phase-offload-bench"
    terminal.note("making the model, if it isn't there yet")
    folder = make_pipeline(flux_pipeline(args.size), home / "pipeline")
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    job = Job(
        "", "flux", str(folder), device=str(resolve_device(args.device)), budget_bytes=args.budget, steps=args.steps,
        image_tokens=args.tokens[0], text_tokens=args.tokens[1],
    )  # fmt: skip
    rows = []
    for name in args.ways or SEED_WAYS:
        terminal.note(f"measuring {SEED_WAYS[name].title}")
        rows.append(SeedRow(name, **_ask("seed", replace(job, way=name), args.timeout)))
    compare(rows)
    swap: dict[str, Any] = {"status": "skipped", "reason": "--no-swap"}
    if not args.no_swap:
        terminal.note("measuring a swap")
        swap = _ask("swap", job, args.timeout)
    summary = summarise(rows, swap, size)
    terminal.say(table.render(rows) + "\n\n" + table.render_swap(swap))
    if args.json is not None:
        found = {"machine": machine(), "model_bytes": size, "job": asdict(job), "swap": swap}
        result = {**found, "rows": [row.to_dict() for row in rows], "summary": summary}
        files.write_files([(args.json, files.text_writer(json.dumps(result, indent=2) + "\n"))])
        terminal.say(f"Wrote {args.json}")


def _ask(task: str, job: Job, timeout: float) -> dict[str, Any]:
    """What a fresh process answers, with the model's files out of the page cache where the system allows it; never
    raises for what goes wrong in it."""
    for component in filter(Path.is_dir, Path(job.folder).iterdir()):
        drop_from_page_cache(component)
    return answer_of([sys.executable, "-m", f"{__package__}._worker", task, job.to_json()], timeout)


# --------------------------------------------------------------------------------------------------- ratios


def compare(rows: Sequence[SeedRow]) -> None:
    """Says of every row that ran whether its picture is plain diffusers'. Nothing if that didn't run."""
    plain = next((row for row in rows if row.way == "plain" and row.ok), None)
    for row in rows:
        if row.ok and plain is not None:
            row.same_picture = row.picture_digest == plain.picture_digest


def summarise(rows: Sequence[SeedRow], swap: dict[str, Any], model_bytes: int) -> dict[str, Any]:
    """Each way's figures against plain diffusers', and what a swap costs against one that copies back.

    A ratio is None if one of its two numbers wasn't measured, or if they aren't of one thing (seconds of a swap on the
    CPU, see `swap_cost`). resident_growth and private_growth: what came after the
    imports, against the model's bytes.
    """
    by_way = {row.way: row for row in rows if row.ok}
    plain = by_way.get("plain")
    ways = {}
    for row in rows:
        ways[row.way] = {
            "status": row.status,
            "same_picture": row.same_picture,
            "total_to_plain": _ratio(row.total_s, plain.total_s if plain else None),
            "denoise_to_plain": _ratio(row.denoise_s, plain.denoise_s if plain else None),
            "resident_growth": _growth(row.resident_peak_bytes, row.baseline_resident_bytes, model_bytes),
            "private_growth": _growth(row.private_peak_bytes, row.baseline_private_bytes, model_bytes),
        }
    ours = [row.same_picture for row in rows if SEED_WAYS[row.way].ours and row.ok]
    found: dict[str, Any] = {"model_bytes": model_bytes, "ways": ways}
    found["ours_same_picture"] = all(ours) if ours and None not in ours else None
    found["swap"] = None
    if swap.get("status") == "ok":
        here, back = swap["ours"], swap["copy_back"]
        found["swap"] = {
            "bytes_to_copy_back": _ratio(_moved(here), _moved(back)),
            "seconds_to_copy_back": _ratio(here["swap_s"], back["swap_s"]) if swap["link"] else None,
            "bytes_to_weights": _ratio(_moved(here), here["weight_bytes"]),
            "link": swap["link"],
        }
    return found


def _moved(swap: dict[str, Any]) -> int:
    return swap["bytes_in"] + swap["bytes_back"]


def _growth(peak: int | None, baseline: int | None, model_bytes: int) -> float | None:
    return None if peak is None or baseline is None else _ratio(peak - baseline, model_bytes)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
