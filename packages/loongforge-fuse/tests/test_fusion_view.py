"""The fusion trace as a table and as a picture."""

import json

import pytest
import torch
from loongforge_fuse import FusionConfig, MicroBatchFuser
from loongforge_fuse.fusion.view import as_rows, timeline, trace_table
from loongforge_fuse.testing import TinyVLA, tiny_batch


@pytest.fixture
def fuser():
    model = TinyVLA()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2, accumulation_steps=2))
    for step in range(6):
        window = [model.draw(tiny_batch(2, seed=i, size=16 if step % 3 or i else 20)) for i in range(2)]
        fuser.run(window, drawn=True)
    return fuser


def test_rows_are_plain_data_and_the_table_names_reasons_with_their_share(fuser):
    rows = as_rows(fuser.trace.records())
    json.dumps(rows)
    assert [row["fused"] for row in rows] == [False, True, True, False, True, True]
    table = trace_table(rows, fuser.trace.summary())
    assert "[shapes_differ] 'images' comes in shapes" in table
    assert "12 micro-batches in 8 passes, fused: 66.7%" in table
    assert "33.3%  shapes_differ" in table
    assert trace_table([], {"micro_batches": 0, "passes": 0, "fused_share": None}).endswith("none yet")


def test_the_timeline_is_a_picture(fuser, tmp_path):
    pytest.importorskip("matplotlib")
    path = timeline(as_rows(fuser.trace.records()), tmp_path / "sub" / "trace.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="empty"):
        timeline([], tmp_path / "none.png")


def test_reading_the_trace_while_it_is_written_is_safe():
    import threading

    model = TinyVLA()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2, probe="off", trace_length=4))
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                fuser.trace.summary()
                fuser.trace.records(2)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        fuser.run([model.draw(tiny_batch(1, seed=i)) for i in range(2)], drawn=True)
    stop.set()
    thread.join(timeout=10)
    assert not errors
    assert torch.isfinite(fuser.trace.records()[-1].losses).all()
