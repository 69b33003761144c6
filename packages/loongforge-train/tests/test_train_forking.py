"""Forked workers of a process that uses the GPU: what they inherit is not theirs to free."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loongforge import session
from loongforge.config import TrainConfig
from loongforge.forking import protect_forked_children
from loongforge.ranks import Ranks
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader

SCRIPT = """
import gc, json, os, sys
from torch.utils.data import DataLoader, Dataset
from loongforge.forking import protect_forked_children

class Held:  # like an event of the GPU, whose destructor aborts a forked child
    def __init__(self, log):
        self.log, self.me = log, self
    def __del__(self):
        os.write(self.log, f"{os.getpid()} ".encode())

class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, at):
        mine = Held(own[1])  # made here: collected here
        del mine
        gc.collect()
        return at

def run():
    gc.collect()
    Held(inherited[1])
    os.write(inherited[1], b" ")  # or nothing to read would block
    assert sorted(int(i) for i in DataLoader(Data(), num_workers=2)) == [0, 1, 2, 3]
    found = [os.read(pipe[0], 4096).split() for pipe in (inherited, own)]
    return [sum(int(pid) != os.getpid() for pid in pids) for pids in found]

inherited, own = os.pipe(), os.pipe()
gc.disable()
without = run()
protect_forked_children()
protect_forked_children()  # once is enough, twice does no harm
print(json.dumps({"without": without, "with": run(), "frozen": gc.get_freeze_count()}))
"""


def test_workers_never_free_what_they_inherit_and_still_free_their_own(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["without"][0] > 0  # so the test sees what it is about
    assert found["with"] == [0, 4]
    assert found["frozen"] == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_fork_leaves_the_collector_of_the_parent_as_it_was(enabled):
    protect_forked_children()
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() == enabled and gc.get_freeze_count() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was else gc.disable)()


def test_a_session_protects_the_children_that_its_loaders_fork(tmp_path: Path, monkeypatch):
    called = []
    monkeypatch.setattr(session, "protect_forked_children", lambda: called.append(True))
    config = TrainConfig(output=str(tmp_path), steps=1, control=False)
    loader = DataLoader(ToyData(), batch_size=config.batch_size, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    session.Session(config, session.build_parts(config, ToyModel(), BatchSource(loader), ranks))
    assert called
