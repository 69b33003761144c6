"""Reports over step records: where the time goes, what to change, and what that would gain."""

from __future__ import annotations
