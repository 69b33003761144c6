"""The command line: data on stdout, remarks on stderr, exit codes that mean something."""

import json
import subprocess
import sys

import numpy as np
import pytest
from loongforge_data.__main__ import main
from loongforge_data.dataset import open_dataset
from loongforge_data.synthetic import check_size, encode_video, write_dataset
from PIL import Image


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("cli") / "disc", episodes=2, frames=[9, 5], size=(64, 64))


def test_info_prints_text_and_json(root, capsys):
    assert main(["info", str(root)]) == 0
    text = capsys.readouterr().out
    assert "frames       14" in text
    assert "codec=h264" in text
    assert main(["info", str(root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["episodes"] == 2
    assert facts["fingerprint"] == open_dataset(root).fingerprint
    assert facts["cameras"]["observation.images.front"]["displayed_size"] == [64, 64]


def test_validate_exits_0_when_fine_and_1_on_errors(root, tmp_path, capsys):
    import shutil

    assert main(["validate", str(root), "--decode"]) == 0
    assert capsys.readouterr().err.strip() == "0 errors, 0 warnings"
    broken = shutil.copytree(root, tmp_path / "broken")
    (broken / "videos/chunk-000/observation.images.front/episode_000001.mp4").unlink()
    (broken / "videos/chunk-000/observation.images.wrist/episode_000000.mp4").write_bytes(b"")
    (broken / "data/chunk-000/episode_000000.parquet").write_bytes(b"PAR1")
    assert main(["validate", str(broken), "--json"]) == 1
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert len(found) == 3
    assert {(f["kind"], f["episode"]) for f in found} == {("files", 1), ("files", 0), ("rows", 0)}
    assert all(f["path"] for f in found)
    assert captured.err.strip() == "3 errors, 0 warnings"


def test_validate_decode_finds_damage_inside_a_file(root, tmp_path, capsys):
    import shutil

    import av

    broken = shutil.copytree(root, tmp_path / "broken")
    path = broken / "videos/chunk-000/observation.images.front/episode_000000.mp4"
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    with path.open("r+b") as file:
        file.seek(packets[4][0])
        file.write(b"\xff" * packets[4][1])
    assert main(["validate", str(broken)]) == 0
    assert main(["validate", str(broken), "--decode"]) == 1
    out = capsys.readouterr().out
    assert "video-damage" in out
    assert "without a picture: 4" in out


def test_preview_writes_a_sheet_and_a_plot(root, tmp_path, capsys):
    assert main(["preview", str(root), "--output", str(tmp_path), "--columns", "4", "--episode", "1"]) == 0
    written = capsys.readouterr().out.split()
    assert [name.rsplit("/", 1)[1] for name in written] == ["disc_frames.png", "disc_actions.png"]
    sheet = np.asarray(Image.open(written[0]))
    assert sheet.shape[1] == 4 * 164 + 4
    assert len(np.unique(sheet.reshape(-1, 3), axis=0)) > 50
    plot = np.asarray(Image.open(written[1]))
    assert (plot != 255).any()
    assert main(["preview", str(root), "--output", str(tmp_path), "--columns", "0"]) == 1


def test_convert_and_synthesize(tmp_path, capsys):
    made, target = tmp_path / "made", tmp_path / "target"
    arguments = ["--episodes", "2", "--frames", "4", "--size", "32", "64", "--gop", "3"]
    assert main(["synthesize", str(made), *arguments]) == 0
    assert main(["convert", str(made), str(target)]) == 0
    assert "2 episodes, 8 frames" in capsys.readouterr().out
    assert open_dataset(target).info.version == "3.0"
    assert main(["convert", str(made), str(target)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["convert", str(target), str(tmp_path / "again")]) == 1
    assert "v3.0 already" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_stats_are_printed_as_json(root, capsys):
    assert main(["stats", str(root)]) == 0
    stats = json.loads(capsys.readouterr().out)
    want = open_dataset(root, cameras=()).rows.arrays["action"].mean(axis=0)
    assert np.allclose(stats["action"]["mean"], want, atol=1e-6)
    assert "q99" in stats["observation.state"]


def test_usage_errors_exit_2(root):
    with pytest.raises(SystemExit) as caught:
        main(["polish", str(root)])
    assert caught.value.code == 2
    assert main(["info", str(root / "nowhere")]) == 1


def test_encoders_refuse_impossible_sizes_before_recording(tmp_path):
    """D43: odd sizes are refused up front with the way out; AV1 takes them and keeps the shape."""
    with pytest.raises(ValueError, match="needs even sizes, got 65 x 49; pad to 66 x 50"):
        check_size(65, 49, "h264")
    with pytest.raises(ValueError, match="needs even sizes"):
        write_dataset(tmp_path / "set", episodes=1, frames=2, size=(65, 49))
    with pytest.raises(ValueError, match="at least 16 x 16"):
        check_size(8, 32, "av1")
    from loongforge_data.video import VideoFile

    for codec, size in (("av1", (65, 49)), ("av1", (32, 32)), ("h264", (32, 32)), ("vp9", (65, 49))):
        path = tmp_path / f"{codec}_{size[0]}.mp4"
        encode_video(path, [np.zeros((*size, 3), np.uint8)] * 3, fps=30, codec=codec)
        with VideoFile(path) as video:
            assert video.displayed_size == size
            assert len(video) == 3


def test_a_written_clip_has_as_many_frames_as_rows(tmp_path):
    """D44: stamps are counted, never copied from a camera, so equal stamps cannot reach the muxer."""
    from loongforge_data.video import video_index

    path = tmp_path / "clip.mp4"
    encode_video(path, [np.full((32, 32, 3), n, np.uint8) for n in range(17)], fps=30, gop=5)
    index = video_index(path)
    assert len(index) == 17
    assert len(set(index.pts.tolist())) == 17


def test_import_is_light_and_starts_nothing():
    """Importing opens no file of its own, starts no thread and loads neither torch nor av."""
    script = (
        "import sys, threading, loongforge_data\n"
        "assert 'torch' not in sys.modules and 'av' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "from loongforge_data import open_dataset, RobotDataset, VideoFile, DecoderPool\n"
        "assert 'torch' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_stats_can_be_written_with_pictures(tmp_path, capsys):
    """What a GR00T loader demands: meta/stats.json with q01 and q99 for every float feature."""
    root = write_dataset(tmp_path / "set", episodes=2, frames=6, size=(64, 64))
    assert main(["stats", str(root), "--images", "5", "--write"]) == 0
    assert capsys.readouterr().out.strip() == str(root / "meta/stats.json")
    dataset = open_dataset(root)
    assert {"mean", "std", "min", "max", "q01", "q99"} <= set(dataset.stats["action"])
    picture = dataset.stats["observation.images.front"]
    assert picture["mean"].shape == (3, 1, 1)
    assert picture["count"].tolist() == [5]
    shown = np.stack([dataset[i]["observation.images.front"] for i in (0, 3, 6, 8, 11)]) / 255
    assert np.allclose(picture["mean"].reshape(3), shown.mean((0, 1, 2)), atol=0.05)
    from loongforge_data.stats import image_stats

    with pytest.raises(ValueError, match="no uint8 pictures"):
        image_stats(dataset, "action")
