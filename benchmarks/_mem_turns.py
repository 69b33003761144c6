"""Eager steps of several allocators measured in turns.

A host-bound step follows the clock and the load of the machine, which change by tens of per cent within a
minute. So every column is a process that stays resident, and the columns take turns of a few steps, over and
over; figures are ratios within one round. A process also has luck of its own (where its memory and code lie),
which lasts as long as it lives and is as large as what is measured: so all columns are started afresh several
times, and the generations count alike. Two kinds of step: one batch of 16, and four micro-batches of 4.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30
KINDS = {"step": (1, 16), "step44": (4, 4)}
REPORTED = (
    "step_source", "placement", "placement_reason", "planned_hit_rate", "step_allocations", "step_survivors",
    "step_device_calls",
)  # fmt: skip
COUNTED = (
    "alloc.p50_ns", "alloc.p99_ns", "alloc.p999_ns", "alloc.within_10us", "free.p99_ns", "plans",
    "plan_bytes", "placement", "placement_reason", "stream_transfers", "deferred_frees", "dissolved_plans",
    "resyncs", "unknown_frees",
    "misses.larger", "misses.busy", "misses.beyond_end", "misses.unplanned", "misses.extra",
    "persistent_bytes.current", "migratable_bytes.current", "ephemeral_bytes.peak",
)  # fmt: skip


class Column:
    """A resident process; answers one JSON line per command."""

    def __init__(
        self, script: Path, job: dict[str, Any], environment: dict[str, str], cores: set[int]
    ) -> None:
        self.name = str(job["column"])
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by stop()
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--worker", json.dumps(job)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(line)
        self.lines.put("{}")

    def ask(self, command: str, timeout_s: float) -> dict[str, Any]:
        """Send a command and return the answer; an answer with ``error`` when there is none in time."""
        assert self.process.stdin is not None
        try:
            if command:
                self.process.stdin.write(command + "\n")
                self.process.stdin.flush()
            answer = json.loads(self.lines.get(timeout=timeout_s))
        except (queue.Empty, OSError):
            answer = {"error": f"no answer to {command or 'the start'!r} in {timeout_s:.0f} s"}
        if not answer:
            self.errors.seek(0)
            answer = {"error": self.errors.read()[-1500:]}
        return answer

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait(10)
        self.errors.close()


def idle_cores(count: int) -> set[int]:
    """Return the ``count`` cores that did least in a third of a second (all of them on a small machine)."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2 * count:
        return allowed

    def busy() -> dict[int, int]:
        out = {}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                out[int(name[3:])] = sum(map(int, fields[:3] + fields[5:8]))
        return out

    before = busy()
    time.sleep(0.35)
    after = busy()
    return set(sorted(allowed, key=lambda c: (after.get(c, 0) - before.get(c, 0), -c))[:count])


def measure(
    script: Path,
    columns: list[str],
    *,
    environment: Callable[[str], dict[str, str]],
    generations: list[dict[str, int]],
    end: float,
    rehearse: bool,
) -> list[dict[str, Any]]:
    """Run the turns: for every generation the rounds of each kind; returns one row per column and kind."""
    cores = idle_cores(4)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for number, rounds in enumerate(generations):
        if number and time.monotonic() > end:
            break
        last = number + 1 == len(generations)
        # Another order of starting and of turns, so that no column always follows the same one.
        order = columns[number % len(columns) :] + columns[: number % len(columns)]
        running = [
            Column(script, {"section": "turns", "column": c, "rehearse": rehearse}, environment(c), cores)
            for c in order
        ]
        try:
            _generation(running, rounds, end, rows, last=last)
        finally:
            for column in running:
                column.stop()
    return [_summary(row) for row in rows.values()]


def _generation(
    running: list[Column],
    rounds: dict[str, int],
    end: float,
    rows: dict[tuple[str, str], dict[str, Any]],
    *,
    last: bool,
) -> None:
    ready = []
    for column in running:
        answer = column.ask("", 120)
        if "error" in answer:
            _row(rows, next(iter(rounds)), column.name)["error"] = answer["error"]
        else:
            ready.append(column)
    for kind, count in rounds.items():
        _rounds(ready, kind, count, end, rows)
        for column in ready:
            detail = "profile" if last and kind == "step" else "count"
            answer = column.ask(f"close {kind} {detail}", 90)
            row = _row(rows, kind, column.name)
            for worst in ("driver_calls_after_step2", "peak_reserved_gb"):
                answer[worst] = max(answer.get(worst, 0), row.get(worst, 0))
            row.update(answer)


def _row(rows: dict[tuple[str, str], dict[str, Any]], kind: str, column: str) -> dict[str, Any]:
    empty: dict[str, Any] = {"section": kind, "column": column, "generations": [], "host": [], "cpu": []}
    return rows.setdefault((kind, column), empty)


def _rounds(
    columns: list[Column], kind: str, count: int, end: float, rows: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for column in columns:
        row = _row(rows, kind, column.name)
        row["first_steps_ms"] = [round(t, 1) for t in column.ask(f"{kind} 5", 60).get("times", [])]
        row["generations"].append([])
    for number in range(count):
        if time.monotonic() > end:
            break
        for column in columns if number % 2 == 0 else columns[::-1]:
            row = _row(rows, kind, column.name)
            # One untimed step wakes clocks and caches after the other columns' turns.
            answer = column.ask(f"{kind} 4", 60)
            if "error" in answer:
                row["error"] = answer["error"]
            else:
                row["generations"][-1].append(answer["times"][1:])
                row["host"] += answer["host"][1:]
                row["cpu"] += answer["cpu"][1:]


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    """Turn the raw times of a row into its figures."""
    generations = [g for g in row.pop("generations") if g]
    host, cpu = row.pop("host"), row.pop("cpu")
    turns = [turn for generation in generations for turn in generation]
    flat = [t for turn in turns for t in turn]
    out: dict[str, Any] = {"section": row.pop("section"), "column": row.pop("column"), "rounds": len(turns)}
    if flat:
        out |= {"step_ms": statistics.median(flat), "step_fastest_ms": min(flat)}
        out["step_ms_spread"] = {
            "median": statistics.median(flat), "min": min(flat), "max": max(flat), "n": len(flat),
        }  # fmt: skip
        # Until the last kernel is enqueued; the rest of a step is waiting for the GPU.
        out["host_ms"] = statistics.median(host)
        # Of all threads of the process up to then: what other users of the machine take is not in it.
        out["cpu_ms"] = statistics.median(cpu)
    out["turn_ms"] = [round(statistics.median(t), 2) for t in turns]
    out["generation_ms"] = [round(statistics.median([t for turn in g for t in turn]), 2) for g in generations]
    return out | row


def serve(job: dict[str, Any], make_orchestrator: Callable[[dict[str, Any]], Any]) -> None:
    """The process of one column: build the model, then answer commands on standard input."""
    import torch
    from _groot_shape import FULL, TINY, GrootShape, make_batch

    rehearse = bool(job.get("rehearse"))
    device, shape = ("cpu", TINY) if rehearse else ("cuda", FULL)
    orchestrator = make_orchestrator(job)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = GrootShape(shape)
    torch.set_default_dtype(torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=not rehearse)
    if orchestrator is not None:
        orchestrator.attach(model, optimizer)
    batches = {k: make_batch(shape, n, device, torch.bfloat16) for k, (_, n) in KINDS.items()}
    worker = _Worker(torch, orchestrator, model, optimizer, batches, cuda=not rehearse)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, argument, *more = line.split()
        if command == "close":
            answer = worker.close(argument, profile=more == ["profile"])
        else:
            answer = worker.steps(command, int(argument))
        print(json.dumps(answer), flush=True)


class _Worker:
    def __init__(self, torch, orchestrator, model, optimizer, batches, *, cuda: bool) -> None:
        self.torch, self.orchestrator, self.cuda = torch, orchestrator, cuda
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.done: dict[str, int] = {}
        self.calls_after_two: dict[str, float] = {}
        self.reports: dict[str, list[dict[str, object]]] = {}
        self.loss = 0.0

    def steps(self, kind: str, count: int) -> dict[str, Any]:
        times, host, cpu = [], [], []
        for _ in range(count):
            self._wait()
            begin, worked = time.perf_counter(), time.process_time()
            self._step(kind)
            host.append((time.perf_counter() - begin) * 1e3)
            cpu.append((time.process_time() - worked) * 1e3)
            self._wait()
            times.append((time.perf_counter() - begin) * 1e3)
            number = self.done[kind] = self.done.get(kind, 0) + 1
            if number == 2:
                self.calls_after_two[kind] = self.memory()["driver_calls"]
            if self.orchestrator is not None and number <= 3:
                stats = self.orchestrator.stats()
                self.reports.setdefault(kind, []).append({k: stats.get(k) for k in REPORTED})
        return {"times": times, "host": host, "cpu": cpu}

    def close(self, kind: str, *, profile: bool) -> dict[str, Any]:
        """Figures of the process after its measured steps."""
        memory = self.memory()
        row: dict[str, Any] = {
            "driver_calls_after_step2": memory["driver_calls"] - self.calls_after_two.get(kind, 0.0),
            "fragmentation": 1 - memory["peak_requested_gb"] / (memory["peak_reserved_gb"] or 1.0),
            "loss_last": float(self.loss),
            **memory,
        }
        if self.orchestrator is not None:
            from loongforge_mem import _core

            # The clock of our calls runs only here, after the measured steps.
            _core.set_timing(True)
            self.steps(kind, 3)
            _core.set_timing(False)
            stats = self.orchestrator.stats()
            row |= {"reports": self.reports.get(kind, []), "alloc_ms": stats["alloc_ms"]}
            row |= {key: stats.get(key) for key in COUNTED}
        if profile and self.cuda:
            row |= self._kernels(kind)
        return row

    def _kernels(self, kind: str) -> dict[str, Any]:
        """Time of the kernels alone, as the device counts it: whether placement changes what the GPU does."""
        from torch.profiler import ProfilerActivity, profile

        steps = 3
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                self.steps(kind, steps)
            events = [e for e in trace.events() or () if e.device_time_total > 0]
        except Exception as error:
            return {"kernel_error": repr(error)[:300]}
        total_us = sum(e.device_time_total for e in events)
        return {"kernel_ms": total_us / steps / 1e3, "kernels": len(events) // steps}

    def memory(self) -> dict[str, float]:
        if self.orchestrator is not None:
            raw = self.orchestrator.stats()
            calls = raw["device_allocs"] + raw["device_commits"]
        elif self.cuda:
            raw = self.torch.cuda.memory_stats()
            raw = {k.replace(".all.", "."): v for k, v in raw.items()}
            calls = raw["num_device_alloc"]
        else:
            return {"peak_reserved_gb": 0.0, "peak_requested_gb": 0.0, "driver_calls": 0}
        return {
            "peak_reserved_gb": raw["reserved_bytes.peak"] / GIB,
            "peak_requested_gb": raw["requested_bytes.peak"] / GIB,
            "driver_calls": calls,
        }

    def _wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def _step(self, kind: str) -> None:
        if self.orchestrator is None:
            self._train(kind)
        else:
            with self.orchestrator.step():
                self._train(kind)

    def _train(self, kind: str) -> None:
        micro_batches = KINDS[kind][0]
        for _ in range(micro_batches):
            loss = self.model(self.batches[kind])["loss"] / micro_batches
            loss.backward()
            self.loss = loss.detach()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
