"""The episode table: lengths, tasks, and where the rows and frames of each episode lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loongforge_data.errors import LayoutError
from loongforge_data.formats.info import DatasetInfo, read_jsonl
from loongforge_data.formats.tables import read_table


@dataclass(frozen=True, kw_only=True)
class VideoSpan:
    """Where the frames of one episode and camera lie.

    Attributes:
        path: The video file.
        from_timestamp: Start inside that file in seconds as the metadata has it; None means frame 0.
    """

    path: str
    from_timestamp: float | None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode as the metadata describes it.

    Attributes:
        index: Episode index.
        length: Number of rows.
        tasks: Task texts.
        data_path: Parquet file with the rows.
        videos: Span per camera; a camera is absent when the metadata has no file for it.
    """

    index: int
    length: int
    tasks: tuple[str, ...]
    data_path: str
    videos: Mapping[str, VideoSpan]


class EpisodeTable(Sequence[Episode]):
    """Episodes by position, ascending in episode index."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = tuple(episodes)
        self._position = {episode.index: i for i, episode in enumerate(self._episodes)}

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, position):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return self._episodes[position]

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)

    def by_index(self, index: int) -> Episode:
        """Return the episode with an episode index.

        Raises:
            LayoutError: There is none.
        """
        position = self._position.get(index)
        if position is None:
            have = f"{self._episodes[0].index} to {self._episodes[-1].index}" if self._episodes else "none"
            msg = f"episode {index} does not exist (episodes: {have})"
            raise LayoutError(msg)
        return self._episodes[position]

    @property
    def indices(self) -> tuple[int, ...]:
        """Episode indices in order."""
        return tuple(episode.index for episode in self._episodes)


def read_episodes(root: Path, info: DatasetInfo) -> EpisodeTable:
    """Read the episode table of either layout.

    Raises:
        LayoutError: The table is missing although rows are declared, an index occurs twice, the indices have
            a hole, or the files on disk are of another layout than info.json says.
    """
    episodes = _read_v3(root, info) if info.version == "3.0" else _read_v2(root, info)
    episodes.sort(key=lambda episode: episode.index)
    indices = [episode.index for episode in episodes]
    twice = sorted({i for i, j in pairwise(indices) if i == j})
    if twice:
        msg = f"episode_index occurs twice in the episode table: {twice[:10]}"
        raise LayoutError(msg, path=root / "meta")
    if indices and indices != list(range(indices[0], indices[0] + len(indices))):
        holes = sorted(set(range(indices[0], indices[-1] + 1)) - set(indices))
        msg = f"episode_index is missing in the episode table: {holes[:10]}"
        raise LayoutError(msg, path=root / "meta")
    return EpisodeTable(episodes)


def _whole(row: Mapping[str, object], key: str, path: Path) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"episode table needs a whole number in {key!r}, found {value!r}"
        raise LayoutError(
            msg,
            path=path,
            episode=row["episode_index"] if isinstance(row.get("episode_index"), int) else None,  # type: ignore[arg-type]
        )
    return value


def _texts(value: object) -> tuple[str, ...]:
    """One text is one task: it is never taken apart into letters."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else (str(value),)


def _read_v2(root: Path, info: DatasetInfo) -> list[Episode]:
    path = root / "meta" / "episodes.jsonl"
    if not path.exists():
        if (root / "meta" / "episodes").is_dir():
            msg = (
                f"layout mismatch: info.json says v{info.version}, but the files are laid out as v3.0 "
                "(meta/episodes/ is there, meta/episodes.jsonl is not)"
            )
            raise LayoutError(
                msg,
                path=root,
            )
        if info.raw.get("total_episodes") == 0:
            return []
    episodes = []
    for row in read_jsonl(path):
        index = _whole(row, "episode_index", path)
        chunk = index // info.chunks_size
        videos = {}
        if info.video_path is not None:
            for key in info.cameras:
                name = info.video_path.format(episode_chunk=chunk, episode_index=index, video_key=key)
                videos[key] = VideoSpan(path=str(root / name), from_timestamp=None)
        episodes.append(
            Episode(
                index=index,
                length=_whole(row, "length", path),
                tasks=_texts(row.get("tasks")),
                data_path=str(root / info.data_path.format(episode_chunk=chunk, episode_index=index)),
                videos=videos,
            )
        )
    return episodes


def _read_v3(root: Path, info: DatasetInfo) -> list[Episode]:
    folder = root / "meta" / "episodes"
    files = sorted(folder.glob("**/*.parquet"))
    if not files:
        if (root / "meta" / "episodes.jsonl").exists():
            msg = (
                "layout mismatch: info.json says v3.0, but the files are laid out as v2 "
                "(meta/episodes.jsonl is there, meta/episodes/ has no tables)"
            )
            raise LayoutError(msg, path=root)
        if info.raw.get("total_episodes") == 0:
            return []
        msg = "no episode tables found"
        raise LayoutError(msg, path=folder)
    episodes: list[Episode] = []
    for path in files:
        table = read_table(path)
        wanted = [n for n in table.column_names if not n.startswith("stats/")]
        episodes += [_episode_v3(root, info, row, path) for row in table.select(wanted).to_pylist()]
    return episodes


def _episode_v3(root: Path, info: DatasetInfo, row: Mapping[str, object], path: Path) -> Episode:
    index = _whole(row, "episode_index", path)
    videos = {}
    for key in info.cameras:
        if info.video_path is None or row.get(f"videos/{key}/file_index") is None:
            continue
        name = info.video_path.format(
            video_key=key,
            chunk_index=_whole(row, f"videos/{key}/chunk_index", path),
            file_index=_whole(row, f"videos/{key}/file_index", path),
        )
        start = row.get(f"videos/{key}/from_timestamp")
        if not isinstance(start, int | float):
            msg = f"camera {key!r} has no from_timestamp"
            raise LayoutError(msg, path=path, episode=index)
        videos[key] = VideoSpan(path=str(root / name), from_timestamp=float(start))
    name = info.data_path.format(
        chunk_index=_whole(row, "data/chunk_index", path), file_index=_whole(row, "data/file_index", path)
    )
    return Episode(
        index=index,
        length=_whole(row, "length", path),
        tasks=_texts(row.get("tasks")),
        data_path=str(root / name),
        videos=videos,
    )
