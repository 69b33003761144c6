"""Shared parts of the benchmark scripts: arguments, environment description, JSON result, printed table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numpy", "av", "pyarrow", "numba", "numba-cuda", "transformers", "triton")
OURS = ("loongforge-comm", "loongforge-mem", "loongforge-data", "loongforge-fuse", "loongforge-train")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the argument parser every benchmark shares: ``--quick`` and ``--json OUT``."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="fewer repetitions and smaller inputs")
    result.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    return result


def hardware() -> dict[str, object]:
    """Describe the machine: processor, cores, memory, and the GPU when torch sees one."""
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    result: dict[str, object] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        prop = torch.cuda.get_device_properties(0)
        result["gpu"] = prop.name
        result["gpu_count"] = torch.cuda.device_count()
        result["gpu_memory_gib"] = round(prop.total_memory / 2**30, 1)
    return result


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that matter and of our own."""
    result = {"python": platform.python_version()}
    for name in PACKAGES + OURS:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        result["cuda"] = torch.version.cuda
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum, maximum and count of repeated measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": float(len(values)),
    }


def result(
    name: str,
    *,
    rows: Sequence[Mapping[str, object]],
    figures: Mapping[str, float | int | bool | str | None],
    repetitions: int,
    notes: Sequence[str] = (),
) -> dict[str, object]:
    """Assemble the result object that every benchmark writes."""
    return {
        "name": name,
        "hardware": hardware(),
        "versions": versions(),
        "command": "uv run benchmarks/" + Path(sys.argv[0]).name + "".join(" " + a for a in _arguments()),
        "repetitions": repetitions,
        "rows": [dict(row) for row in rows],
        "figures": dict(figures),
        "notes": list(notes),
    }


def _arguments() -> list[str]:
    """Return the command line without the output path, which is a fact of the machine, not of the run."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip:
            skip = False
        elif argument == "--json":
            skip = True
        elif not argument.startswith("--json="):
            kept.append(argument if not argument.startswith("/") else Path(argument).name)
    return kept


def finish(outcome: Mapping[str, object], path: Path | None) -> None:
    """Print the table and the figures, and write the JSON file when a path was given."""
    rows = outcome["rows"]
    if isinstance(rows, list) and rows:
        print(table(rows))
    print(f"\n{outcome['name']}: figures")
    figures = outcome["figures"]
    if isinstance(figures, Mapping):
        for key, value in figures.items():
            print(f"  {key} = {_cell(value)}")
    for note in outcome.get("notes", ()):  # type: ignore[attr-defined]
        print(f"  note: {note}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows with the union of their keys as aligned columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True))]
    lines += ["  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and "median" in value:
        return f"{value['median']:.4g} [{value['min']:.4g}, {value['max']:.4g}]"
    return str(value)
