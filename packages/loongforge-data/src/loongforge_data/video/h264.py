"""Which H.264 packets no other frame refers to: they are decoded only when their own picture is wanted."""

from __future__ import annotations

_SLICES = (1, 2, 5)  # coded slice, data partition A, slice of a key picture


def length_size(extradata: bytes | None) -> int:
    """Return how many bytes give the length of a unit in an mp4 or mkv packet; 0 for other framings."""
    if extradata is None or len(extradata) < 7 or extradata[0] != 1:
        return 0
    return (extradata[4] & 3) + 1


def is_disposable(data: memoryview, size: int) -> bool:
    """Return whether no slice of a packet is marked as a reference (nal_ref_idc is 0 in all of them).

    Args:
        data: The packet, each unit with its length in front.
        size: Bytes of that length, from `length_size`.
    """
    position, seen = 0, False
    while position + size < len(data):
        length = int.from_bytes(data[position : position + size], "big")
        header = data[position + size]
        if header & 31 in _SLICES:
            if header & 0x60:
                return False
            seen = True
        position += size + length
    return seen
