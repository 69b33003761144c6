"""Convert a v2.0 or v2.1 data set to v3.0: tables concatenated, videos joined by copying packets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loongforge_data.errors import LayoutError, TableError
from loongforge_data.formats.episodes import Episode, EpisodeTable, read_episodes
from loongforge_data.formats.info import DatasetInfo, read_info, read_json, read_jsonl
from loongforge_data.formats.remux import StreamKind, join_videos, stream_kind
from loongforge_data.formats.statfiles import read_stats
from loongforge_data.formats.tables import read_table
from loongforge_data.formats.tasks import read_tasks

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FileSlot:
    """A file of the new layout: chunk and file number."""

    chunk: int
    file: int


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion has written."""

    episodes: int
    frames: int
    data_files: int
    video_files: int


def convert_to_v30(
    source: str | Path,
    target: str | Path,
    *,
    data_file_mb: float = 100.0,
    video_file_mb: float = 200.0,
    chunks_size: int = 1000,
) -> Conversion:
    """Convert a v2.0 or v2.1 directory into a new v3.0 directory.

    Frames are not encoded again. A new file begins when the next episode would bring it to the size limit, or
    when a video is of another kind (codec, size, parameters) than the file so far. The target appears under
    its name only when it is complete.

    Args:
        source: Directory of the old set.
        target: Directory to create; it must not exist or be empty.
        data_file_mb: Size limit of parquet files, in MB.
        video_file_mb: Size limit of video files, in MB.
        chunks_size: Files per chunk folder.

    Raises:
        LayoutError: The source is not v2.0 or v2.1, or the target is not empty.
        TableError, VideoError: A source file does not fit its metadata.
    """
    source, target = Path(source), Path(target)
    info = read_info(source)
    if info.version == "3.0":
        msg = "data set is v3.0 already; only v2.0 and v2.1 are converted"
        raise LayoutError(msg, path=source)
    if target.exists() and any(target.iterdir()):
        msg = "target directory is not empty; choose a new one or remove it first"
        raise LayoutError(msg, path=target)
    table = EpisodeTable([e for e in read_episodes(source, info) if e.length > 0])
    if [e.index for e in table] != list(range(len(table))):
        msg = f"v3.0 needs episodes numbered from 0 without holes, found {table.indices[:10]}"
        raise LayoutError(msg, path=source)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        result = _convert(source, partial, info, table, data_file_mb, video_file_mb, chunks_size)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return result


def _convert(
    source: Path,
    target: Path,
    info: DatasetInfo,
    table: EpisodeTable,
    data_mb: float,
    video_mb: float,
    chunks_size: int,
) -> Conversion:
    rows: list[dict[str, object]] = [{"episode_index": e.index} for e in table]
    data_files = _write_data(target, table, rows, data_mb, chunks_size)
    video_files = 0
    for camera in info.cameras:
        if info.video_path is not None:
            video_files += _write_videos(target, camera, table, info.fps, rows, video_mb, chunks_size)
    stats = _episode_stats(source)
    for episode, row in zip(table, rows, strict=True):
        row["tasks"] = list(episode.tasks)
        row["length"] = episode.length
        for feature, values in stats.get(episode.index, {}).items():
            for name, value in values.items():
                row[f"stats/{feature}/{name}"] = value
        row["meta/episodes/chunk_index"] = 0
        row["meta/episodes/file_index"] = 0
    _write_meta(source, target, info, table, rows, data_mb, video_mb, chunks_size)
    frames = sum(episode.length for episode in table)
    return Conversion(episodes=len(table), frames=frames, data_files=data_files, video_files=video_files)


def _groups(sizes: Sequence[int], limit: float, kinds: Sequence[StreamKind] | None = None) -> list[list[int]]:
    """Split positions into runs: a new one starts at the size limit or where the kind changes."""
    groups: list[list[int]] = []
    total = 0
    for position, size in enumerate(sizes):
        changed = kinds is not None and position > 0 and kinds[position] != kinds[position - 1]
        if not groups or total + size >= limit or changed:
            groups.append([])
            total = 0
        groups[-1].append(position)
        total += size
    return groups


def _slot(number: int, chunks_size: int) -> FileSlot:
    return FileSlot(chunk=number // chunks_size, file=number % chunks_size)


def _write_data(
    target: Path, table: EpisodeTable, rows: list[dict[str, object]], limit_mb: float, chunks_size: int
) -> int:
    sizes = [Path(e.data_path).stat().st_size if Path(e.data_path).exists() else 0 for e in table]
    groups = _groups(sizes, limit_mb * _MB)
    first = 0
    schema: pa.Schema | None = None
    for number, group in enumerate(groups):
        slot = _slot(number, chunks_size)
        path = target / DATA_PATH.format(chunk_index=slot.chunk, file_index=slot.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        writer: pq.ParquetWriter | None = None
        try:
            for position in group:
                episode = table[position]
                part = _episode_rows(episode, first, schema)
                schema = part.schema
                writer = writer or pq.ParquetWriter(path, schema, compression="snappy")
                writer.write_table(part)
                rows[position].update(
                    {
                        "data/chunk_index": slot.chunk,
                        "data/file_index": slot.file,
                        "dataset_from_index": first,
                        "dataset_to_index": first + episode.length,
                    }
                )
                first += episode.length
        finally:
            if writer is not None:
                writer.close()
    return len(groups)


def _episode_rows(episode: Episode, first: int, schema: pa.Schema | None) -> pa.Table:
    """Read an episode's rows; `index` is made anew so that it counts over the data set."""
    part = read_table(episode.data_path)
    if part.num_rows != episode.length:
        msg = f"episode has {part.num_rows} rows, the episode table says {episode.length}"
        raise TableError(msg, path=episode.data_path, episode=episode.index)
    if "index" in part.column_names:
        column = pa.array(range(first, first + episode.length), pa.int64())
        part = part.set_column(part.column_names.index("index"), "index", column)
    if schema is None:
        return part
    try:
        return part.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, KeyError) as error:
        msg = f"columns differ from those of the first episode: {str(error).splitlines()[0]}"
        raise TableError(msg, path=episode.data_path, episode=episode.index) from error


def _write_videos(
    target: Path,
    camera: str,
    table: EpisodeTable,
    fps: Fraction,
    rows: list[dict[str, object]],
    limit_mb: float,
    chunks_size: int,
) -> int:
    paths = [episode.videos[camera].path for episode in table]
    if not any(Path(path).exists() for path in paths):
        return 0
    groups = _groups(
        [Path(path).stat().st_size for path in paths], limit_mb * _MB, [stream_kind(path) for path in paths]
    )
    for number, group in enumerate(groups):
        slot = _slot(number, chunks_size)
        path = target / VIDEO_PATH.format(video_key=camera, chunk_index=slot.chunk, file_index=slot.file)
        counts = join_videos([paths[position] for position in group], path, fps=fps)
        start = 0
        for position, count in zip(group, counts, strict=True):
            episode = table[position]
            if count != episode.length:
                msg = f"episode has {episode.length} rows but camera {camera!r} has {count} frames"
                raise TableError(msg, path=paths[position], episode=episode.index)
            rows[position].update(
                {
                    f"videos/{camera}/chunk_index": slot.chunk,
                    f"videos/{camera}/file_index": slot.file,
                    f"videos/{camera}/from_timestamp": float(start / fps),
                    f"videos/{camera}/to_timestamp": float((start + count) / fps),
                }
            )
            start += count
    return len(groups)


def _episode_stats(source: Path) -> Mapping[int, Mapping[str, Mapping[str, object]]]:
    path = source / "meta" / "episodes_stats.jsonl"
    if not path.exists():
        return {}
    return {row["episode_index"]: row["stats"] for row in read_jsonl(path)}  # type: ignore[misc]


def _write_meta(
    source: Path,
    target: Path,
    info: DatasetInfo,
    table: EpisodeTable,
    rows: Sequence[Mapping[str, object]],
    data_mb: float,
    video_mb: float,
    chunks_size: int,
) -> None:
    meta = target / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    if rows:
        (target / _EPISODES_PATH).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), target / _EPISODES_PATH)
    write_tasks(meta / "tasks.parquet", read_tasks(source))
    stats = {
        key: {name: value.tolist() for name, value in entry.items()}
        for key, entry in read_stats(source, info).items()
    }
    (meta / "stats.json").write_text(json.dumps(stats, indent=4) + "\n")
    raw = read_json(source / "meta" / "info.json")
    (meta / "info.json").write_text(
        json.dumps(_new_info(raw, info, table, data_mb, video_mb, chunks_size), indent=4) + "\n"
    )
    modality = source / "meta" / "modality.json"
    if modality.exists():
        shutil.copyfile(modality, meta / "modality.json")


def _new_info(
    raw: dict[str, object],
    info: DatasetInfo,
    table: EpisodeTable,
    data_mb: float,
    video_mb: float,
    chunks_size: int,
) -> dict[str, object]:
    fps: int | float = int(info.fps) if info.fps.denominator == 1 else float(info.fps)
    result = {key: value for key, value in raw.items() if key not in ("total_chunks", "total_videos")}
    features = {}
    declared = raw["features"]
    for key, value in declared.items() if isinstance(declared, dict) else ():
        features[key] = value if value.get("dtype") == "video" else {**value, "fps": fps}
    result.update(
        codebase_version="v3.0",
        total_episodes=len(table),
        total_frames=sum(episode.length for episode in table),
        chunks_size=chunks_size,
        fps=fps,
        splits={"train": f"0:{len(table)}"},
        data_path=DATA_PATH,
        video_path=VIDEO_PATH if info.video_path is not None else None,
        features=features,
        data_files_size_in_mb=data_mb,
        video_files_size_in_mb=video_mb,
    )
    return result


def write_tasks(path: Path, tasks: Mapping[int, str]) -> None:
    """Write `tasks.parquet` as pandas would: the text as index, so that pandas readers find it there."""
    indices = sorted(tasks)
    index_name = "__index_level_0__"
    pandas = {
        "index_columns": [index_name],
        "column_indexes": [],
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {"name": None, "field_name": index_name, "pandas_type": "unicode", "numpy_type": "object"},
        ],
    }
    table = pa.table(
        {
            "task_index": pa.array(indices, pa.int64()),
            index_name: pa.array([tasks[i] for i in indices], pa.string()),
        }
    )
    metadata = {b"pandas": json.dumps(pandas).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
