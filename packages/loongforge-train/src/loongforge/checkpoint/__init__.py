"""Checkpoints: written beside the run, complete or not there at all, found again with reasons."""

from __future__ import annotations

from loongforge.checkpoint.find import Found, find_newest, inspect
from loongforge.checkpoint.layout import Manifest, folder_name
from loongforge.checkpoint.validate import Finding, validate_checkpoint
from loongforge.checkpoint.write import CheckpointWriter

__all__ = [
    "CheckpointWriter",
    "Finding",
    "Found",
    "Manifest",
    "find_newest",
    "folder_name",
    "inspect",
    "validate_checkpoint",
]
