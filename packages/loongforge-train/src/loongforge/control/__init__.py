"""Talking to a running training: a Unix socket per process, owned by its user."""

from __future__ import annotations
