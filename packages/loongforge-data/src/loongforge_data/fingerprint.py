"""A digest of what decides which sample an index means."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loongforge_data.contracts import DatasetView
from loongforge_data.files import file_state

FORMAT = 1


def fingerprint(dataset: DatasetView) -> str:
    """Return a hex digest over layout, features, episodes, tasks, file names and sizes, and the options.

    File contents and times of modification are left out: a copy of the data set on another machine has the
    same fingerprint. The directory it lies in does not matter either.
    """
    root = Path(dataset.root)
    files: set[str] = {episode.data_path for episode in dataset.episodes}
    for episode in dataset.episodes:
        files |= {episode.videos[camera].path for camera in (*dataset.cameras, *dataset.depth_cameras)}
    content = {
        "format": FORMAT,
        "version": dataset.info.version,
        "fps": str(dataset.info.fps),
        "features": {key: [f.dtype, list(f.shape)] for key, f in dataset.features.items()},
        "episodes": [[episode.index, episode.length] for episode in dataset.episodes],
        "tasks": sorted(dataset.tasks.items()),
        "files": sorted([str(Path(path).relative_to(root)), file_state(path).size] for path in files),
        "options": [
            dataset.options.window,
            dataset.cameras,
            dataset.options.columns,
            dataset.image_size,
            dataset.options.depth,
        ],
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
