"""What workers are asked to do, as bytes on the board."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PAYLOAD_BYTES = 10240
"""Room for a decode job: 128 targets, and a path of any length the system allows."""
STORED, FAILED = 1, 2
MAX_MESSAGE = 600


def payload_bytes(batch_size: int) -> int:
    """Return the bytes that the largest job needs: one that decodes, or one that lists a batch's samples."""
    return max(PAYLOAD_BYTES, 8 * batch_size + 1024)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Decode frames of one file; ``targets`` as in `planning.FrameJob`."""

    key: str
    path: str
    targets: bytes


@dataclass(frozen=True, slots=True)
class TableJob:
    """Read everything but frames of a batch and pack it at ``offset``."""

    slot: int
    sequence: int
    item: int
    offset: int
    indices: bytes
    stack: bool
    """True: collate to arrays; False: keep one dict per sample for the collate job."""


@dataclass(frozen=True, slots=True)
class CollateJob:
    """Run the user's collate function over a filled slot."""

    slot: int
    sequence: int
    item: int
    samples: int


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Take samples from a map-style data set, collate them, and pack the result."""

    slot: int
    sequence: int
    item: int
    epoch: int
    indices: bytes


Job: TypeAlias = DecodeJob | TableJob | CollateJob | SampleJob


def encode(job: Job) -> bytes:
    """Return the job as a payload."""
    kind = type(job)
    return pickle.dumps((kind.__name__, *(getattr(job, name) for name in kind.__slots__)), protocol=5)


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (DecodeJob, TableJob, CollateJob, SampleJob)}


def decode(payload: bytes) -> Job:
    """Return the job that a payload holds."""
    name, *fields = pickle.loads(payload)
    job: Job = _KINDS[name](*fields)
    return job


def indices_to_bytes(indices: npt.NDArray[np.int64] | Sequence[int]) -> bytes:
    """Return sample indices as bytes."""
    return np.asarray(indices, dtype=np.int64).tobytes()


def indices_from_bytes(raw: bytes) -> list[int]:
    """Return sample indices from bytes."""
    return [int(i) for i in np.frombuffer(raw, dtype=np.int64)]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Items that could not be made, and why."""

    items: tuple[tuple[int, int, int], ...]
    """(slot, sequence, item) each."""
    message: str
    """Type and text of the error."""


def encode_failures(failures: Sequence[Failure]) -> bytes:
    """Return failures as bytes that fit a payload; long texts are cut, no item is left out."""
    budget = MAX_MESSAGE
    while True:
        rows = [(np.asarray(f.items, np.int64).tobytes(), f.message[:budget]) for f in failures]
        data = pickle.dumps(rows, protocol=5)
        if len(data) <= PAYLOAD_BYTES or budget < 20:
            return data
        budget //= 2


def decode_failures(data: bytes) -> list[Failure]:
    """Return what `encode_failures` was given."""
    result = []
    for raw, message in pickle.loads(data):
        items = np.frombuffer(raw, np.int64).reshape(-1, 3).tolist()
        result.append(Failure(items=tuple((int(a), int(b), int(c)) for a, b, c in items), message=message))
    return result


def describe(error: BaseException) -> str:
    """Return type and text of an error, with its place in the user's code."""
    place = ""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        place = f" [{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}]"
    return f"{type(error).__name__}: {error}{place}"
