"""Helper processes that fill the ring: decoding and user code never run in the trainer's process."""
