"""The command ``bench offload``: every way in every case, each in a fresh process, then the ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import accelerator, table
from .floor import floor_s
from .job import Job, Row
from .memory_limit import MemoryGroup, NoMemoryLimit
from .model import ModelSpec, drop_from_page_cache, flux_like, make_model, weight_bytes
from .ways import WAYS, Way

if TYPE_CHECKING:
    from .._console import Terminal

DEFAULT_SIZE = 2 << 30
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    """`limit`: the control group's limit as a share of the model. `budget`: ours, likewise; where there is only a
    limit, the worker works out what it leaves for weights."""

    name: str
    title: str
    limit: float | None = None
    budget: float | None = None


CASES = {
    case.name: case
    for case in (
        Case("a", "(a) unlimited RAM; phase-offload with a budget of 40 % of the model", budget=0.40),
        Case("b60", "(b) memory limit of 60 % of the model, cold page cache", limit=0.60),
        Case("b35", "(b) memory limit of 35 % of the model, cold page cache", limit=0.35),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench offload``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and the summary here")
    parser.add_argument("--model-dir", type=Path, metavar="DIR", help="keep the made models here and use them again")
    parser.add_argument("--size", type=parse_size, default=DEFAULT_SIZE, metavar="BYTES", help="of the model (2G)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps after the first one (5)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=f"some of: {', '.join(WAYS)}")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--tokens", nargs=2, type=int, metavar=("IMAGE", "TEXT"), help="of one step (64 64)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for each process (600)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, ... (auto)")
    parser.add_argument("--no-micro", action="store_true", help="leave out the cost of one access")


def parse_size(text: str) -> int:
    """Bytes from ``2G``, ``512M``, ``1048576``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size; write for example 2G or 512M")
    return int(float(match[1]) * UNITS[match[2].upper()])


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    """Runs the benchmark, shows tables on stdout and progress on stderr."""
    from ..devices import resolve_device

    device = str(resolve_device(args.device))
    on_device = device != "cpu"
    known = accelerator.CASES if on_device else CASES
    wrong = [name for name in args.cases or () if name not in known]
    if wrong:
        raise InputError(f"There is no case {wrong[0]} on {device}; the cases are {', '.join(known)}.")
    if args.steps < 1:
        raise InputError("At least one step has to be timed: give --steps 1 or more.")
    bench = Bench(args, terminal, device)
    result = bench.on_accelerator(args.cases) if on_device else bench.on_cpu(args.cases)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
        terminal.say(f"Wrote {args.json}")


class Bench:
    """One run of the command: its options, and where it keeps models."""

    def __init__(self, args: argparse.Namespace, terminal: Terminal, device: str) -> None:
        self._args, self._terminal, self._device = args, terminal, device
        self._home = args.model_dir or Path(tempfile.gettempdir()) / "phase-offload-bench"

    def on_cpu(self, chosen: Sequence[str] | None) -> dict[str, Any]:
        folder = self._model("flux", flux_like(self._args.size))
        size = weight_bytes(folder)
        cases = [CASES[name] for name in chosen or CASES]
        tokens = self._args.tokens or (64, 64)
        template = Job("", "flux", str(folder), steps=self._args.steps, image_tokens=tokens[0], text_tokens=tokens[1])
        floor = self._ask("floor", template)
        twin = self._reference(template)
        if twin.step_s is not None and floor["status"] == "ok":
            floor["compute_s"] = min(floor["compute_s"], twin.step_s)  # a busy neighbour only ever adds
        self._terminal.say(table.render_floor(floor))
        rows: list[Row] = []
        for case in cases:
            here = self._run_case(case, template, size, twin)
            seconds = _add_floor(here, floor, cached=case.limit is None)
            title = case.title if seconds is None else f"{case.title}; floor {seconds:.2f} s"
            self._terminal.say("\n" + table.render(title, here, seconds))
            rows += here
        micro: dict[str, Any] = {"status": "skipped", "reason": "--no-micro"}
        if not self._args.no_micro:
            micro = self._ask("micro", Job("", "flux", str(self._home / "tiny")))
        self._terminal.say("\n" + table.render_micro(micro))
        summary = summarise(rows, floor, size)
        self._terminal.say("\n" + table.render_summary(summary))
        found = {"machine": machine(), "model_bytes": size, "floor": floor, "micro": micro}
        return {**found, "rows": [row.to_dict() for row in rows], "summary": summary}

    def on_accelerator(self, chosen: Sequence[str] | None) -> dict[str, Any]:
        link = self._ask("link", Job("", "flux", "", device=self._device))
        rows: list[Row] = []
        for case in (accelerator.CASES[name] for name in chosen or accelerator.CASES):
            folder = self._model(case.model, case.spec)
            tokens = accelerator.TOKENS[case.model]
            template = Job(
                "", case.spec.family, str(folder), device=self._device, steps=self._args.steps,
                budget_bytes=int(case.share * weight_bytes(folder)), image_tokens=tokens[0], text_tokens=tokens[1],
            )  # fmt: skip
            ways = [WAYS[name] for name in self._args.ways or accelerator.WAYS]
            here = [self._row(case.name, way, template, None, None) for way in ways]
            twin = next((row for row in here if row.way == "resident" and row.ok), None)
            for row in here:
                _compare(row, twin)
            seconds = None
            ours = next((row for row in here if row.way == "ours" and row.ok), None)
            if twin and ours and link["status"] == "ok":
                floor = {"compute_s": twin.step_s, "read_beside": link["link_rate"]}
                seconds = _add_floor(here, {"status": "ok", **floor}, cached=False)
            self._terminal.say("\n" + table.render(f"{case.name}: {case.share:.0%} of the weights", here, seconds))
            rows += here
        summary = summarise(rows, link, 0)
        self._terminal.say("\n" + table.render_summary(summary))
        return {"machine": machine(), "link": link, "rows": [row.to_dict() for row in rows], "summary": summary}

    # ------------------------------------------------------------------------------------------ one process

    def _run_case(self, case: Case, template: Job, size: int, twin: Row) -> list[Row]:
        limit = None if case.limit is None else int(case.limit * size)
        budget = None if case.budget is None else int(case.budget * size)
        ways = [WAYS[name] for name in self._args.ways] if self._args.ways else list(WAYS.values())
        rows = []
        for way in ways:
            if way.where == "accelerator":
                continue
            if way.name == "resident" and limit is None:
                row = Row(**{**twin.to_dict(), "case": case.name})
            else:
                row = self._row(case.name, way, template, limit, budget if way.name == "ours" else None)
            _compare(row, twin)
            rows.append(row)
        return rows

    def _reference(self, template: Job) -> Row:
        """The resident twin, which every other output is compared with."""
        return self._row("a", WAYS["resident"], template, None, None)

    def _row(self, case: str, way: Way, template: Job, limit: int | None, budget: int | None) -> Row:
        from dataclasses import replace

        row = Row(case, way.name, limit_bytes=limit)
        if way.holds_all and limit is not None and limit < weight_bytes(Path(template.folder)):
            row.status, row.reason = "skipped", "the limit is smaller than the weights that it holds"
            return row
        job = replace(template, way=way.name, limit_bytes=limit, budget_bytes=budget or template.budget_bytes)
        try:
            group = MemoryGroup(limit)
        except NoMemoryLimit as error:
            if limit is not None:
                row.status, row.reason = "skipped", str(error)
                return row
            row.fill(self._ask("way", job, case=case))
            return row
        with group:
            row.fill(self._ask("way", job, group, case))
            row.group_peak_bytes = group.peak_bytes()
            if group.kills():
                row.status, row.reason = "failed", "killed for memory: it doesn't fit the limit"
        return row

    def _ask(self, task: str, job: Job, group: MemoryGroup | None = None, case: str = "") -> dict[str, Any]:
        """What a fresh process answers; never raises for what goes wrong in it."""
        from dataclasses import replace

        self._terminal.note("measuring " + (f"{case}: {WAYS[job.way].title}" if job.way else task))
        folder = Path(job.folder)
        if job.folder and folder.is_dir():
            drop_from_page_cache(folder)
        self._home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=self._home) as scratch:
            job = replace(job, scratch=scratch, group=None if group is None else str(group.folder))
            command = [sys.executable, "-m", f"{__package__}._worker", task, job.to_json()]
            if group is not None:
                command = group.wrap(command)
            return answer_of(command, self._args.timeout)

    def _model(self, name: str, spec: ModelSpec) -> Path:
        folder = self._home / name

        def shard(done: int, total: int) -> None:
            self._terminal.note(f"making the model {name}: {done} of {total} files")

        return make_model(spec, folder, shard)


def answer_of(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """The last line that a fresh process prints, as JSON; a row with the reason if it fails or takes too long."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {timeout:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"status": "failed", "reason": f"the process ended with {how}: {last}"}


# --------------------------------------------------------------------------------------------------- ratios


def _compare(row: Row, twin: Row | None) -> None:
    if row.ok and twin is not None and twin.ok:
        row.same_sum = row.output_sum == twin.output_sum
        row.same_bits = row.output_digest == twin.output_digest


def _add_floor(rows: Sequence[Row], floor: dict[str, Any], *, cached: bool) -> float | None:
    """Fills in the floor of a case: that of what our row streamed. None if one of the two wasn't measured."""
    ours = next((row for row in rows if row.way == "ours" and row.ok), None)
    if ours is None or ours.streamed_bytes_per_step is None or floor.get("status") != "ok":
        return None
    seconds = floor_s(floor, ours.streamed_bytes_per_step, cached=cached)
    for row in rows:
        row.floor_s = seconds
    return seconds


def summarise(rows: Sequence[Row], floor: dict[str, Any], model_bytes: int) -> dict[str, Any]:
    """The headline ratios of each case; a ratio is None if one of its two numbers wasn't measured."""
    cases: dict[str, dict[str, Any]] = {}
    for case in dict.fromkeys(row.case for row in rows):
        here = {row.way: row for row in rows if row.case == case and row.ok}
        ours = here.get("ours")
        peers = [row for row in here.values() if WAYS[row.way].peer and row.step_s]
        best = min(peers, key=lambda row: row.step_s or 0.0, default=None)
        resident = here["resident"].step_s if "resident" in here else floor.get("compute_s")
        step = ours.step_s if ours else None
        cases[case] = {
            "best_peer": best.way if best else None,
            "best_peer_s": best.step_s if best else None,
            "ours_s": step,
            "ours_to_floor": _ratio(step, ours.floor_s if ours else None),
            "ours_to_best_peer": _ratio(step, best.step_s if best else None),
            "ours_to_resident": _ratio(step, resident),
            "ours_extra_disk_bytes": ours.extra_disk_bytes if ours else None,
            "ours_same_bits": ours.same_bits if ours else None,
            "private_growth_to_budget": _growth(ours) if ours else None,
            "ledger_peak_to_budget": _ratio(ours.ledger_peak_bytes, ours.budget_bytes) if ours else None,
            "group_peak_to_limit": _ratio(ours.group_peak_bytes, ours.limit_bytes) if ours else None,
        }
    return {"model_bytes": model_bytes, "cases": cases}


def _growth(row: Row) -> float | None:
    """Private memory that came after the imports, activations included, against the budget."""
    if row.private_peak_bytes is None or row.baseline_private_bytes is None:
        return None
    return _ratio(row.private_peak_bytes - row.baseline_private_bytes, row.budget_bytes)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def machine() -> dict[str, Any]:
    """What it was measured on."""
    import diffusers
    import torch

    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "load_average": load,
    }
