"""Precision per module."""
