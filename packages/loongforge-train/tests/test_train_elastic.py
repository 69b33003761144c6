"""A run goes on without a rank that is gone and lets a new one in, equal to checkpoints and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.config import ElasticConfig, PillarConfig, TrainConfig
from loongforge.elastic.notice import Change, Notice, read
from loongforge.errors import ConfigError, ControlError
from loongforge.optim import build_schedule, default_groups, go_on_schedule
from loongforge.rank_testing import RankOutcome
from loongforge.records import read_metrics
from loongforge.testing import ToyModel

pytest.importorskip("loongforge_data")
pytest.importorskip("loongforge_comm")

LOST_AT = 4
"""Last step of the rank that is lost."""
SCRIPT = """
import json, logging, os, signal, sys, time
logging.basicConfig(level=logging.INFO)
from pathlib import Path
import torch
torch.set_num_threads(1)
from loongforge_comm import Membership, RankFailureError, RemovedError
from loongforge.config import CheckpointConfig, ElasticConfig, PillarConfig, TrainConfig
from loongforge.elastic import supervise
from loongforge.elastic.notice import read
from loongforge.optim import default_groups
from loongforge.pillars import NoMemoryPillar
from loongforge.ranks import join
from loongforge.runs import Prepared, assemble
from loongforge.testing import ToyData, ToyModel, collate

settings = json.loads(sys.argv[1])
case, dropout = settings.pop("case", ""), settings.pop("dropout", 0.0)
rank = int(os.environ["RANK"])
config = TrainConfig(
    learning_rate=1e-2, schedule="constant", control=False, log_interval=1000, probe_interval=0,
    batch_size=2, workers=0, ema_decay=0.9, pillars=PillarConfig(comm="simple"),
    checkpoint=CheckpointConfig(every=0),
    elastic=ElasticConfig(
        enabled=bool(case), check_every=5, heartbeat_s=1.5, min_ranks=settings.pop("min_ranks", 1)
    ),
    **settings,
)
quick = supervise.settings_of(config)
folder = Path(config.output)
folder.mkdir(parents=True, exist_ok=True)

class ToyRecipe:
    def param_groups(self, model, weight_decay, learning_rate):
        return default_groups(model, weight_decay)

class Lossy(ToyModel):
    '''Its rank is lost in the middle of a forward.'''
    calls = 0
    def forward(self, batch):
        self.calls += 1
        if rank == 2 and self.calls == 5 and case in ("kill", "stop", "join"):
            (folder / "lost.pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP if case == "stop" else signal.SIGKILL)
        return super().forward(batch)

def between(run):
    '''The last transfer of step 5 ends on rank 0 and fails on rank 1, as rank 2 dies.'''
    ranks, engine = run.ranks, run.session.engine
    commit = ranks.commit
    def failing():
        if engine.at.step == 4 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine.at.step == 4 and rank == 1:
            raise RankFailureError("the last transfer failed")
        commit()
    ranks.commit = failing

def watched(*arguments, **named):
    run = assemble(*arguments, **named)
    def note(record, ids):
        with (folder / f"ids.{os.getpid()}").open("a") as file:
            file.write(json.dumps([record.step, record.epoch, [i for group in ids for i in group]]) + "\\n")
        if record.step == 4 and (case == "all_leave" or (case == "leave" and rank == 2)):
            os.kill(os.getpid(), signal.SIGTERM)
        if case == "join" and record.step == 9 and rank == 0:
            (folder / "ask").touch()
            limit = time.monotonic() + 60
            while not supervisor.members._board.waiting()[1] and time.monotonic() < limit:
                time.sleep(0.02)
    run.session.parts.recorder.listeners.append(note)
    if case == "between" and run.ranks.world_size == 3:
        between(run)
    return run

supervise.assemble = watched
prepared = Prepared(
    recipe=ToyRecipe(), options=None, memory=NoMemoryPillar(), model=Lossy(dropout=dropout),
    dataset=ToyData(100), collate=collate,
)
if case == "":
    ranks = join("cpu", timeout_s=60)
    run = watched(config, prepared, ranks)
    result, parts, name = run.session.train(), run.session.parts, ranks.rank
    ranks.close()
else:
    if case == "join" and rank == 3:
        limit = time.monotonic() + 60
        while not (folder / "ask").exists() and time.monotonic() < limit:
            time.sleep(0.02)
        members = Membership.join("gloo", address=read(folder).address, config=quick, limit_s=60.0)
    else:
        os.environ["WORLD_SIZE"] = "3"
        members = Membership.found("gloo", config=quick)
    supervisor = supervise.Supervisor(config, members, prepared)
    try:
        result = supervisor.train()
    except RemovedError as error:
        (folder / "removed").write_text(str(error))
        raise
    parts, name = supervisor.run.session.parts, members.member
torch.save(
    {"model": prepared.model.state_dict(), "average": parts.average.state_dict(),
     "optimizer": parts.optimizer.state_dict()["state"]}, folder / f"final.{name}.pt",
)
if case != "" and supervisor.left:
    sys.exit(result.exit_code)
if case == "stop" and rank == 0:
    # The lost rank wakes up when the others are done; this process has the store it asks.
    os.kill(int((folder / "lost.pid").read_text()), signal.SIGCONT)
    limit = time.monotonic() + 30
    while not (folder / "removed").exists() and time.monotonic() < limit:
        time.sleep(0.02)
"""

Start = Callable[..., list[RankOutcome]]


def go(run_ranks: Start, run: Path, ranks: int, *, lost: tuple[int, ...] = (), **settings: object) -> None:
    done = run_ranks(SCRIPT, json.dumps({"output": str(run), **settings}), ranks=ranks, timeout=90)
    for rank, outcome in enumerate(done):
        assert (outcome.returncode == 0) != (rank in lost), (rank, outcome.stderr[-3000:])


def final(run: Path, member: int) -> dict[str, object]:
    return torch.load(run / f"final.{member}.pt", weights_only=True)


def assert_equal(left: object, right: object) -> None:
    """Bit for bit, through nested tables."""
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run, rank=0)}


def delivered(run: Path) -> dict[int, list[int]]:
    """Samples of each epoch that were trained on, over all processes."""
    found: dict[int, list[int]] = {}
    for path in run.glob("ids.*"):
        for line in path.read_text().splitlines():
            _, epoch, ids = json.loads(line)
            found.setdefault(epoch, []).extend(ids)
    return found


@pytest.mark.parametrize("case", ["kill", "stop"])
def test_a_run_without_its_lost_rank_equals_a_resume_with_fewer_ranks(
    tmp_path: Path, run_ranks: Start, case: str
) -> None:
    go(run_ranks, tmp_path / "elastic", 3, lost=(2,), case=case, steps=30, dropout=0.3)
    go(run_ranks, tmp_path / "fixed", 3, steps=LOST_AT, dropout=0.3)
    go(run_ranks, tmp_path / "fixed", 2, steps=30, dropout=0.3)
    assert losses(tmp_path / "elastic") == losses(tmp_path / "fixed")
    for member in (0, 1):
        assert_equal(final(tmp_path / "elastic", member), final(tmp_path / "fixed", member))
    changes = read(tmp_path / "elastic").changes
    assert [(c.ranks, c.step, c.left, c.joined) for c in changes] == [(3, 0, (), ()), (2, LOST_AT, (2,), ())]
    if case == "stop":
        assert "went on without it" in (tmp_path / "elastic" / "removed").read_text()
    first = delivered(tmp_path / "elastic")[0]
    assert len(first) == 100
    assert sorted(first) == list(range(100))


def test_a_rank_that_had_not_finished_the_last_step_takes_the_state_of_one_that_had(
    tmp_path: Path, run_ranks: Start
) -> None:
    go(run_ranks, tmp_path / "elastic", 3, lost=(2,), case="between", steps=12)
    go(run_ranks, tmp_path / "fixed", 3, steps=5)
    go(run_ranks, tmp_path / "fixed", 2, steps=12)
    assert losses(tmp_path / "elastic") == losses(tmp_path / "fixed")
    for member in (0, 1):
        assert_equal(final(tmp_path / "elastic", member), final(tmp_path / "fixed", member))


def test_a_rank_that_is_asked_to_stop_leaves_and_the_others_go_on(tmp_path: Path, run_ranks: Start) -> None:
    go(run_ranks, tmp_path / "elastic", 3, lost=(2,), case="leave", steps=12, dropout=0.3)
    go(run_ranks, tmp_path / "fixed", 3, steps=5, dropout=0.3)
    go(run_ranks, tmp_path / "fixed", 2, steps=12, dropout=0.3)
    assert losses(tmp_path / "elastic") == losses(tmp_path / "fixed")
    for member in (0, 1):
        assert_equal(final(tmp_path / "elastic", member), final(tmp_path / "fixed", member))
    assert [(c.ranks, c.step, c.left) for c in read(tmp_path / "elastic").changes] == [
        (3, 0, ()),
        (2, 5, (2,)),
    ]


@pytest.mark.parametrize("settings", [{"case": "all_leave"}, {"case": "leave", "min_ranks": 3}])
def test_a_run_that_is_left_by_all_or_by_too_many_ends_with_a_checkpoint(
    tmp_path: Path, run_ranks: Start, settings: dict[str, object]
) -> None:
    script = SCRIPT + "\nsys.exit(result.exit_code)\n"
    done = run_ranks(script, json.dumps({"output": str(tmp_path), "steps": 12, **settings}), ranks=3)
    assert [p.returncode for p in done] == [143, 143, 143], done[0].stderr[-2000:]
    assert len(read(tmp_path).changes) == 1
    assert (tmp_path / "epoch_0_step_5").is_dir()


def test_a_process_that_joins_gets_all_of_the_state_and_its_share_of_the_data(
    tmp_path: Path, run_ranks: Start
) -> None:
    go(run_ranks, tmp_path / "elastic", 4, lost=(2,), case="join", epochs=3)
    changes = read(tmp_path / "elastic").changes
    assert [(c.ranks, c.step, c.left, c.joined) for c in changes] == [
        (3, 0, (), ()),
        (2, LOST_AT, (2,), ()),
        (3, 10, (), (3,)),
    ]
    go(run_ranks, tmp_path / "fixed", 3, steps=LOST_AT, epochs=3)
    go(run_ranks, tmp_path / "fixed", 2, steps=10, epochs=3)
    go(run_ranks, tmp_path / "fixed", 3, epochs=3)
    assert losses(tmp_path / "elastic") == losses(tmp_path / "fixed")
    for member, rank in ((0, 0), (1, 1), (3, 2)):
        assert_equal(final(tmp_path / "elastic", member), final(tmp_path / "fixed", rank))
    for epoch, ids in delivered(tmp_path / "elastic").items():
        assert set(ids) == set(range(100)), epoch
        assert len(ids) - 100 < 3, "more repeats than the tail of an epoch has"


def test_the_schedule_ends_with_the_run_when_the_number_of_steps_has_changed() -> None:
    config = TrainConfig(steps=100, learning_rate=1.0, warmup_ratio=0.0)
    model = ToyModel()
    optimizer = torch.optim.AdamW(default_groups(model, 0.0), lr=1.0)  # type: ignore[arg-type]
    schedule = build_schedule(optimizer, config, 100)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    unchanged = optimizer.param_groups[0]["lr"]
    again = go_on_schedule(optimizer, config, 100, schedule.state_dict())
    assert optimizer.param_groups[0]["lr"] == unchanged
    longer = go_on_schedule(optimizer, config, 160, again.state_dict())
    assert optimizer.param_groups[0]["lr"] > unchanged
    for _ in range(119):
        optimizer.step()
        longer.step()
    assert 0 < optimizer.param_groups[0]["lr"] < 1e-3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"strategy": "zero1"}, "strategy zero1: allowed is ddp"),
        ({"compile": True}, "compile True: allowed is off"),
        ({"pillars": PillarConfig(data="off")}, "pillars.data off: allowed is on"),
        ({"elastic": ElasticConfig(enabled=True, heartbeat_s=0.5)}, "heartbeat_s is 0.5: allowed is 1"),
        ({"elastic": ElasticConfig(enabled=True, min_ranks=0)}, "elastic.min_ranks is 0"),
    ],
)
def test_what_cannot_outlive_a_rank_is_refused_with_the_way_out(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainConfig(**{"steps": 1, "elastic": ElasticConfig(enabled=True), **settings})


def test_an_elastic_run_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loongforge.elastic.supervise import Supervisor

    monkeypatch.delenv("RANK", raising=False)
    config = TrainConfig(steps=1, dataset=str(tmp_path), elastic=ElasticConfig(enabled=True), device="cpu")
    with pytest.raises(ConfigError, match=r"RANK.* is not set: start with torchrun"):
        Supervisor.found(config)


def test_a_notice_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="started with --elastic"):
        read(tmp_path)
    (tmp_path / "members.json").write_text('{"address": "127.0.0.1:1/x/0"}')
    with pytest.raises(ControlError, match="cannot be read"):
        read(tmp_path)


def test_who_wants_to_join_a_run_that_is_over_is_told_at_once(tmp_path: Path) -> None:
    from loongforge.elastic.supervise import check_store
    from loongforge_comm.testing import free_port

    port = free_port()
    config = TrainConfig(steps=1, elastic=ElasticConfig(enabled=True))
    change = Change(generation=0, step=0, ranks=2, left=(), joined=(), time_unix=0.0)
    notice = Notice(address=f"127.0.0.1:{port}/x/0", backend="gloo", config=config, changes=(change,))
    with pytest.raises(ControlError, match=f"no store answers at 127.0.0.1:{port}"):
        check_store(notice)
