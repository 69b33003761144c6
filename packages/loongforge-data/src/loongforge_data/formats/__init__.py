"""Readers of the on-disk layouts: LeRobot v2.0, v2.1, v3.0 and the GR00T flavour."""
