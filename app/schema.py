"""POST /encode and POST /release on the wire: typed requests in, typed answers out.

Types are strict, unknown fields are ignored (SGLang adds some), every message names the field.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.errors import InvalidRequest
from app.items import Item, parse_items
from app.long_texts import SplitBody
from shm.messages import Handle, ItemAux

MAX_REQ_ID_CHARACTERS: Final = 512
MAX_RECEIVERS: Final = 64
MODALITIES: Final = ("image", "video", "audio")
Body = TypeVar("Body", bound=Struct)
_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _EncodeBody(Struct):
    req_id: str
    mm_items: Any
    modality: str | UnsetType = UNSET
    num_parts: int | UnsetType = UNSET
    part_idx: int | UnsetType = UNSET
    hashes: list[str] | None = None
    wait: Literal["ready", "shape"] = "ready"
    receive_count: int = 1


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A checked /encode body. modality is lower case; items are in order, nested lists flattened."""

    req_id: str
    items: list[Item]
    modality: str
    num_parts: int
    part_idx: int
    wait: Literal["ready", "shape"]
    receive_count: int


def parse_encode(body: SplitBody, max_items: int) -> EncodeRequest:
    """The body of POST /encode. InvalidRequest or InvalidItem, naming the field."""
    fields = _decode(body.json, _EncodeBody)
    # Only items may be long: a placeholder anywhere else stands for what is too long there.
    if fields.req_id in body.texts:
        raise InvalidRequest(f"req_id must have 1 to {MAX_REQ_ID_CHARACTERS} characters, has more")
    check_req_id(fields.req_id)
    num_parts, part_idx = _parts(fields)
    modality = _modality(fields)
    if not 1 <= fields.receive_count <= MAX_RECEIVERS:
        raise InvalidRequest(f"receive_count must be from 1 to {MAX_RECEIVERS}, is {fields.receive_count}")
    items = parse_items(fields.mm_items, max_items, body.texts, lists_are_videos=modality == "video")
    if fields.hashes is not None and len(fields.hashes) != len(items):
        raise InvalidRequest(f"hashes has {len(fields.hashes)} entries for {len(items)} items in mm_items")
    return EncodeRequest(
        fields.req_id,
        items,
        modality,
        num_parts,
        part_idx,
        fields.wait,
        fields.receive_count,
    )


class _OnlyReqId(Struct):
    req_id: str


def req_id_of(body: SplitBody) -> str:
    """The req_id of a body that parse_encode refused, so that the refusal can name it; empty if there is
    none that may be repeated."""
    try:
        req_id = _decode(body.json, _OnlyReqId).req_id
        check_req_id(req_id)
    except InvalidRequest:
        return ""
    return "" if req_id in body.texts else req_id


def check_req_id(req_id: str) -> None:
    """InvalidRequest if it cannot be one."""
    if not 1 <= len(req_id) <= MAX_REQ_ID_CHARACTERS:
        raise InvalidRequest(f"req_id must have 1 to {MAX_REQ_ID_CHARACTERS} characters, has {len(req_id)}")
    if _CONTROL_CHARACTER.search(req_id):
        raise InvalidRequest("req_id must not contain control characters")


def _parts(fields: _EncodeBody) -> tuple[int, int]:
    num_parts = 1 if fields.num_parts is UNSET else fields.num_parts
    part_idx = 0 if fields.part_idx is UNSET else fields.part_idx
    if num_parts < 1:
        raise InvalidRequest(f"num_parts must be at least 1, is {num_parts}")
    if not 0 <= part_idx < num_parts:
        raise InvalidRequest(f"part_idx must be from 0 to num_parts - 1 ({num_parts - 1}), is {part_idx}")
    return num_parts, part_idx


def _modality(fields: _EncodeBody) -> str:
    """Lower case. Left out it is image, unless the request says that it is a part: parts are split by
    modality, so a part without one is malformed and not a guess."""
    if fields.modality is UNSET:
        if fields.num_parts is not UNSET or fields.part_idx is not UNSET:
            raise InvalidRequest("modality is missing; a request with num_parts or part_idx must name it")
        return "image"
    modality = fields.modality.lower()
    check_modality(modality)
    return modality


def check_modality(modality: str) -> None:
    """InvalidRequest if there is no such modality."""
    if modality not in MODALITIES:
        raise InvalidRequest(f"modality must be one of: {', '.join(MODALITIES)}")


class ReleaseRequest(Struct):
    """POST /release: the handle's nonce, or the whole handle."""

    nonce: str = ""
    handle: Handle | None = None

    def wanted_nonce(self) -> str:
        """The nonce, wherever it stands."""
        nonce = self.handle.nonce if self.handle is not None else self.nonce
        if not nonce:
            raise InvalidRequest("nonce is missing: give nonce or handle")
        return nonce


def parse_release(body: bytes | bytearray) -> ReleaseRequest:
    """The body of POST /release."""
    return _decode(body, ReleaseRequest)


class AnswerItem(Struct, frozen=True, omit_defaults=True):
    """One item's rows in the block. grid_thw: [[t, h, w], ...] in patches, [[n]] mel frames for audio; width,
    height in pixels. aux: left out where there is nothing to say."""

    row_start: int
    row_count: int
    grid_thw: list[list[int]]
    width: int
    height: int
    aux: ItemAux | None = None


class AnswerTimings(Struct, frozen=True):
    """Milliseconds. ingest: body, fetch, decode into the arena; the rest are the worker's readings."""

    ingest: float
    queue: float
    preprocess: float
    forward: float
    copy: float
    total: float


class EncodeAnswer(Struct, frozen=True, omit_defaults=True):
    """The 200 of POST /encode. embedding_size/len/dim are SGLang's names for nbytes, rows, dim.

    The last are the items' aux as SGLang has it. The first three of them have an entry for each item, where
    every item has one. video_audio_* are there where some video has sound: rows of the whole tracks, rows of
    what each temporal patch of those videos hears, and how many such patches each video has (0: no sound).
    """

    req_id: str
    modality: str
    num_parts: int
    part_idx: int
    grid_thw: list[list[int]]
    rows: int
    dim: int
    embedding_size: int
    embedding_len: int
    embedding_dim: int
    dtype: str
    items: list[AnswerItem]
    timings: AnswerTimings
    state: Literal["ready", "shape"]
    handle: Handle
    handles: list[Handle] | UnsetType = UNSET
    video_timestamps: list[list[float]] | None = None
    second_per_grid_ts: list[float] | None = None
    audio_feature_lens_raw: list[int] | None = None
    video_audio_feature_lens: list[int] | None = None
    video_audio_segment_lens_flat: list[int] | None = None
    video_audio_per_video_num_units: list[int] | None = None


def _decode(body: bytes | bytearray, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body does not fit: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deep") from None
