"""What a running session answers: profile, communication, fusion trace, switch, checkpoint, stacks."""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from loongforge.control.server import ControlServer, Request
from loongforge.engine import StepEngine
from loongforge.errors import ConfigError, LoongForgeError
from loongforge.records import StepRecord
from loongforge.report.summary import summarise
from loongforge.watchdog import Watchdog

SWITCH_CODES = {1: "simple", 2: "hybrid"}
CHECKPOINT_CODE = 3
END_CODE = 4
KEPT_RECORDS = 4096
LONGEST_PROFILE_S = 3600.0
BORDER_TIMEOUT_S = 120.0
RECORDS_TIMEOUT_S = 1.0
"""Longest wait for records that a GPU run has gathered but not written."""


class Owner(Protocol):
    """The session as the control needs it."""

    engine: StepEngine
    watchdog: Watchdog
    run_dir: Path

    def save(self, *, background: bool | None = None) -> None:
        """Write a checkpoint of the present step."""
        ...

    def end(self) -> None:
        """End the run at this step border."""
        ...


class Live:
    """Connects a control server with a session.

    Requests are answered from records already written; what must happen in the training thread waits in a
    queue for the next step border, and what must happen on all ranks goes through the vote of the next step.

    Args:
        owner: The session.
        rank: This rank.
    """

    def __init__(self, owner: Owner, *, rank: int) -> None:
        self._owner = owner
        self._rank = rank
        self._records: deque[dict[str, object]] = deque(maxlen=KEPT_RECORDS)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._agreed = threading.Condition()
        self._done_codes: dict[int, tuple[int, str]] = {}
        self.server = ControlServer(
            owner.run_dir,
            rank=rank,
            handlers={
                "status": self._status,
                "profile": self._profile,
                "comm": self._comm,
                "switch": self._switch,
                "checkpoint": self._checkpoint,
                "stop": self._stop,
                "dmf": self._dmf,
                "stacks": self._stacks,
            },
        )

    def on_record(self, record: StepRecord, sample_ids: Sequence[Sequence[int]]) -> None:
        """Keep the record for clients (a reference, no copy)."""
        self._records.append(vars(record))

    def at_border(self) -> None:
        """Run what waits for the training thread; called between two steps."""
        while not self._tasks.empty():
            self._tasks.get()()
        agreed = self._owner.engine.at.agreed
        if agreed is not None and agreed.command:
            self._apply(agreed.command)

    def close(self) -> None:
        """Close the socket."""
        self.server.close()

    def _apply(self, code: int) -> None:
        """Do an agreed command; all ranks are here at the same step."""
        try:
            if code == CHECKPOINT_CODE:
                self._owner.save()
            elif code == END_CODE:
                self._owner.end()
            else:
                self._owner.engine.parts.parallel.switch(SWITCH_CODES[code])
            outcome = ""
        except (LoongForgeError, KeyError) as error:
            outcome = str(error)
        with self._agreed:
            self._done_codes[code] = (self._owner.engine.at.step, outcome)
            self._agreed.notify_all()

    def _command(self, code: int) -> int:
        """Put a command into the next vote and wait until it was done; return the step."""
        with self._agreed:
            self._done_codes.pop(code, None)
            self._owner.engine.at.commands.append(code)
            if not self._agreed.wait_for(lambda: code in self._done_codes, BORDER_TIMEOUT_S):
                msg = f"no step ended within {BORDER_TIMEOUT_S:.0f} s"
                raise RuntimeError(msg)
            step, outcome = self._done_codes[code]
        if outcome:
            raise ConfigError(outcome)
        return step

    # -- answers -----------------------------------------------------------------------------------

    def _status(self, request: Request) -> Mapping[str, object]:
        last = self._records[-1] if self._records else {}
        return {
            "pid": os.getpid(),
            "rank": self._rank,
            "step": self._owner.engine.at.step,
            "run": str(self._owner.run_dir.resolve()),
            "last": clean(last),
        }

    def _profile(self, request: Request) -> Mapping[str, object]:
        duration = seconds(request, "duration_s", LONGEST_PROFILE_S)
        trace = request.get("trace")
        first = self._owner.engine.at.step
        if isinstance(trace, str):
            self._trace(duration, Path(trace))
        else:
            time.sleep(duration)
        self._bring_records()
        records = [r for r in list(self._records) if isinstance(r["step"], int) and r["step"] > first]
        if not records:
            msg = f"no step ended within {duration:.1f} s: ask for a longer duration"
            raise ValueError(msg)
        summary = dataclasses.asdict(summarise(records))
        return {"rank": self._rank, "duration_s": duration, "summary": clean(summary), "trace": trace}

    def _trace(self, duration: float, path: Path) -> None:
        """Record a torch profiler trace, started and stopped at step borders in the training thread."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._owner.engine.parts.ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        self._in_training_thread(profiler.start)
        time.sleep(duration)

        def stop() -> None:
            profiler.stop()
            profiler.export_chrome_trace(str(path))

        self._in_training_thread(stop)

    def _bring_records(self) -> None:
        """Let the training thread write the steps that have ended, where it comes to a border soon.

        On a GPU their values start on their way at one border, and have arrived at the next.
        """
        for _ in range(2):
            written = threading.Event()
            self._tasks.put(partial(self._write_records, written))
            if not written.wait(RECORDS_TIMEOUT_S) or not self._owner.engine.parts.recorder.unread:
                return

    def _write_records(self, written: threading.Event) -> None:
        self._owner.engine.parts.recorder.write_passed()
        written.set()

    def _in_training_thread(self, task: Callable[[], None]) -> None:
        done, failed = threading.Event(), []

        def run() -> None:
            try:
                task()
            except (RuntimeError, OSError) as error:
                failed.append(error)
            finally:
                done.set()

        self._tasks.put(run)
        if not done.wait(BORDER_TIMEOUT_S):
            msg = f"no step ended within {BORDER_TIMEOUT_S:.0f} s"
            raise RuntimeError(msg)
        if failed:
            raise failed[0]

    def _comm(self, request: Request) -> Mapping[str, object]:
        recent = list(self._records)[-50:]
        names = ("step", "comm_exposed_ms", "comm_overlap", "backward_ms", "heartbeat")
        return {
            "rank": self._rank,
            "stats": clean(self._owner.engine.parts.parallel.stats()),
            "recent": [clean({name: record[name] for name in names}) for record in recent],
        }

    def _switch(self, request: Request) -> Mapping[str, object]:
        wanted = request.get("strategy")
        codes = {name: code for code, name in SWITCH_CODES.items()}
        if not isinstance(wanted, str) or wanted not in codes:
            msg = f"strategy is {wanted!r}: allowed are {', '.join(codes)}"
            raise ConfigError(msg)
        return {"strategy": wanted, "from_step": self._command(codes[wanted]) + 1}

    def _checkpoint(self, request: Request) -> Mapping[str, object]:
        return {"step": self._command(CHECKPOINT_CODE)}

    def _stop(self, request: Request) -> Mapping[str, object]:
        return {"step": self._command(END_CODE)}

    def _dmf(self, request: Request) -> Mapping[str, object]:
        last = int(seconds(request, "last", KEPT_RECORDS, default=100))
        names = ("step", "fused", "fusion_reason", "graph", "graph_reason", "micro_losses", "samples")
        recent = list(self._records)[-last:]
        summary = summarise(recent) if recent else None
        return {
            "rank": self._rank,
            "fused_share": summary.fused_share if summary else None,
            "fusion_reasons": dict(summary.fusion_reasons) if summary else {},
            "graph_share": summary.graph_share if summary else None,
            "graph_reasons": dict(summary.graph_reasons) if summary else {},
            "trace": [clean({name: record[name] for name in names}) for record in recent],
        }

    def _stacks(self, request: Request) -> Mapping[str, object]:
        return {"file": str(self._owner.watchdog.dump("asked for over the control socket").resolve())}


def seconds(request: Request, name: str, most: float, *, default: float | None = None) -> float:
    """Return a positive number of a request, or fail saying what is allowed."""
    value = request.get(name, default)
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or not 0 < float(value) <= most:  # type: ignore[arg-type]
        msg = f"{name} is {value!r}: allowed is a number above 0 and at most {most:g}"
        raise ConfigError(msg)
    return float(value)  # type: ignore[arg-type]


def clean(value: object) -> object:
    """Return plain JSON data: numbers that are not finite become None, objects their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int, bool, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return str(value)
