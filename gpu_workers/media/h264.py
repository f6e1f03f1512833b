"""The little of H.264's syntax that FFmpeg does not say: whether a packet holds an IDR picture.

Called by `frame_table`.
"""

from collections.abc import Iterator
from typing import Final

_NAL_TYPE: Final = 0x1F
_IDR_SLICE: Final = 5
_START_CODE: Final = b"\0\0\1"


def holds_idr(packet: bytes, extradata: bytes | None) -> bool:
    """extradata: the codec's, which says how the packet's parts are told apart."""
    return any(head & _NAL_TYPE == _IDR_SLICE for head in _nal_heads(packet, extradata))


def _nal_heads(packet: bytes, extradata: bytes | None) -> Iterator[int]:
    """First byte of every NAL unit: behind a length in MP4 and Matroska, a start code elsewhere."""
    if not extradata or extradata[0] != 1 or len(extradata) < 5:
        position = packet.find(_START_CODE)
        while 0 <= position < len(packet) - len(_START_CODE):
            yield packet[position + len(_START_CODE)]
            position = packet.find(_START_CODE, position + len(_START_CODE))
        return
    length_bytes = (extradata[4] & 3) + 1
    position = 0
    while position + length_bytes < len(packet):
        length = int.from_bytes(packet[position : position + length_bytes], "big")
        yield packet[position + length_bytes]
        position += length_bytes + length
