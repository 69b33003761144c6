"""Traces, snapshots, reports, the command line, addresses and what importing the package does."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loongforge_mem import Trace, _core, analyse, load_snapshot, load_trace, plan_trace, policies, simulate
from loongforge_mem.__main__ import main

README = Path(__file__).parents[1] / "README.md"
MIB = 1 << 20


def _trace() -> Trace:
    events, live = [], []
    for index in range(400):
        size = (index * 7919 % 37 + 1) * 64 * 1024 + index % 3
        events.append((True, index, size))
        live.append(index)
        if len(live) > 12:
            events.append((False, live.pop(index * 5 % 12), 0))
    events += [(False, block, 0) for block in live[2:]]
    owners = {0: "head", 1: "head"}
    return Trace(events=tuple(events), source="made up", owners=owners)


def test_a_trace_survives_its_file(tmp_path):
    trace = _trace()
    trace.save(tmp_path / "t.json")
    back = load_trace(tmp_path / "t.json")
    assert back.events == trace.events
    assert back.owners == trace.owners


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has format None; allowed: 'loongforge-trace/1'"),
        ("nonsense", "is not JSON"),
        ('{"format":"loongforge-trace/1","events":[["x",1]]}', r"event 0 is \['x', 1\]; allowed"),
        ('{"format":"loongforge-trace/1","events":{}}', "has no list of events"),
    ],
)
def test_a_bad_trace_file_is_refused_with_its_reason(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_trace(tmp_path / "t.json")


def test_a_trace_that_contradicts_itself_names_the_event():
    with pytest.raises(ValueError, match="trace event 1: block 5 is allocated while it is live"):
        simulate(Trace(events=((True, 5, 10), (True, 5, 10))))
    with pytest.raises(ValueError, match='policy "tlsf" is unknown; allowed'):
        simulate(_trace(), "tlsf")


def test_every_policy_holds_the_peak_and_the_plan_needs_least():
    trace = _trace()
    rows = {name: simulate(trace, name) for name in policies()}
    assert all(r["high_water_bytes"] >= r["peak_requested_bytes"] for r in rows.values())
    assert min(rows.values(), key=lambda r: r["high_water_bytes"])["policy"] == "plan"
    assert rows["plan"]["reserve_overhead"] < 0.1
    plan = plan_trace(trace)
    plan.verify()
    with pytest.raises(ValueError, match="overlap"):
        _core.verify_plan((*plan.parts()[:2], [0 if o >= 0 else -1 for o in plan.offsets], *plan.parts()[3:]))


def test_recordings_of_different_steps_do_not_share_a_plan():
    with pytest.raises(ValueError, match="recording 2 has 1 allocations but the first has 400"):
        plan_trace(_trace(), Trace(events=((True, 1, 5), (False, 1, 0))))


def test_twenty_thousand_events_are_planned_in_less_than_a_second():
    sizes = [(index * 2654435761 % 997 + 1) * 4096 for index in range(10_000)]
    ends = [min(index + 1 + index * 40503 % 300, 10_000) for index in range(10_000)]
    import time

    best = 9.0
    for _ in range(3):
        begin = time.perf_counter()
        parts, _ = _core.make_plan(sizes, ends)
        best = min(best, time.perf_counter() - begin)
    assert parts[3] > 0
    assert best < 1.0, f"{best:.2f} s"


def _snapshot(path, **more):
    frames = [
        {"filename": "/x/torch/nn/f.py", "line": 1, "name": "f"},
        {"filename": "/x/run.py", "line": 9, "name": "g"},
    ]
    entries = [
        {"action": "segment_alloc", "addr": 1, "size": 99},
        {"action": "free_completed", "addr": 77, "size": 5},
    ]
    entries += [
        {"action": "alloc", "addr": 4096 * n, "size": 1000 * n, "frames": frames} for n in range(1, 6)
    ]
    entries += [
        {"action": "free_requested", "addr": 4096, "size": 1},
        {"action": "free_completed", "addr": 4096, "size": 1},
    ]
    path.write_bytes(pickle.dumps({"device_traces": [[], entries], "segments": [], **more}))


def test_a_torch_snapshot_is_read_as_a_trace(tmp_path):
    _snapshot(tmp_path / "s.pickle")
    trace = load_snapshot(tmp_path / "s.pickle")
    assert trace.num_allocations == 5
    assert trace.events[-1] == (False, 0, 0)
    assert trace.owners[0] == "run.py:9 g"
    with pytest.raises(ValueError, match="records no allocation on device 0"):
        load_snapshot(tmp_path / "s.pickle", device=0)


def test_a_snapshot_that_names_a_class_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    (tmp_path / "s.pickle").write_bytes(pickle.dumps({"device_traces": [[Evil()]]}))
    with pytest.raises(
        ValueError, match=r"names the class builtins\.print; a memory snapshot holds plain data only"
    ):
        load_snapshot(tmp_path / "s.pickle")
    (tmp_path / "s.pickle").write_bytes(b"\x80\x04cut")
    with pytest.raises(ValueError, match="is not a readable memory snapshot"):
        load_snapshot(tmp_path / "s.pickle")


def test_a_report_names_peak_holders_and_advice(tmp_path):
    report = analyse(_trace(), top=3)
    assert report.peak_bytes == max(report.timeline)
    assert report.staying_bytes == report.timeline[-1] > 0
    assert len(report.holders) <= 3
    assert "largest holders" in report.text()
    assert report.advice


def test_the_command_line_replays_and_reports(tmp_path, capsys):
    _trace().save(tmp_path / "t.json")
    assert main(["replay", str(tmp_path / "t.json"), "--policy", "plan"]) == 0
    assert re.search(r"plan +\d+\.\d MiB", capsys.readouterr().out)
    pytest.importorskip("matplotlib")
    assert main(["report", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    _snapshot(tmp_path / "s.pickle")
    assert main(["report", str(tmp_path / "s.pickle")]) == 0
    assert main(["report", str(tmp_path / "missing.json")]) == 2
    assert "error:" in capsys.readouterr().err


def test_importing_the_package_loads_neither_torch_nor_a_driver():
    code = (
        "import sys, os, threading; import loongforge_mem; "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules; "
        "assert threading.active_count() == 1; "
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_readme_example_runs():
    pytest.importorskip("torch")
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    assert len([line for line in block.group(1).splitlines() if line and "import" not in line]) <= 5
    exec(compile(block.group(1), str(README), "exec"), {})


def test_moved_weights_are_named():
    torch = pytest.importorskip("torch")
    from loongforge_mem import AddressBook, MemoryConfig, MemoryOrchestrator
    from loongforge_mem.addresses import named_tensors

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    orchestrator = MemoryOrchestrator(MemoryConfig(mode="advisor")).attach(model)
    book = AddressBook(named_tensors(model))
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    assert orchestrator.moved() == []
    book.check(dict(named_tensors(model)))
    model[1].weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert orchestrator.moved() == ["1.weight"]
    with pytest.raises(RuntimeError, match=r"1 tensors moved since the capture \(1.weight\)"):
        book.check(dict(named_tensors(model)))


def test_fake_tensors_give_a_trace_without_memory():
    torch = pytest.importorskip("torch")
    from loongforge_mem.synthetic import TransformerShape, concatenate, record_steps, transformer

    shape = TransformerShape(layers=2, width=1024, heads=8, mlp=4096, vocabulary=1000, causal=True)
    batches = [lambda n=n: {"tokens": torch.empty(8, n, dtype=torch.long)} for n in (512, 256, 384)]
    traces = record_steps(lambda: transformer(shape), batches, source="test")
    assert len({t.num_allocations for t in traces}) == 1, "same operators, other sizes"
    plan = plan_trace(*traces)
    peak = max(t.items()[2] for t in traces)
    assert peak > 100 * MIB
    assert 1 - peak / plan.high_water <= 0.011
    assert simulate(concatenate(traces), "run_fit")["high_water_bytes"] >= peak
