"""The life of one encode request, told once: permit, body, items, block, worker, answer.

Called by `app.routes.encode` and `app.routes.health`. Whatever is acquired on the way down is given back on
the way up, in every outcome: answer, error, deadline, a client that went away, the end of the drain.
"""

import time
from typing import Final, TypeVar

from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.requests import Request

from app.body import announced_media_bytes, check_headers, read_body
from app.config import ServeConfig
from app.errors import InvalidRequest, RequestError
from app.jobs import Encoded, EncodeJob
from app.logs import RequestNote
from app.long_texts import split_body
from app.schema import AnswerItem, AnswerTimings, EncodeAnswer, EncodeRequest, parse_encode, req_id_of
from app.services import Services
from app.sources import InlineItem
from shm.messages import Handle, ItemAux, ItemRows

TIMEOUT_HEADER: Final = "x-request-timeout-ms"
Value = TypeVar("Value")


async def encode(services: Services, request: Request, note: RequestNote) -> EncodeAnswer:
    """POST /encode. Raises one of `app.errors`; the response is `app.application`'s."""
    deadline_ns = note.started_ns + timeout_ns(request.headers, services.config)
    check_headers(request.headers, services.config.max_body_bytes)
    announced_bytes = announced_media_bytes(request.headers)
    async with services.admission.permit(deadline_ns, announced_bytes) as lifetime:
        body = await read_body(
            request.receive, request.headers, services.config, services.config.max_body_bytes
        )
        lifetime.watch_for_disconnect(request.receive)
        wanted = await _parse(body, services.config.max_items, note)
        note.fields |= {"modality": wanted.modality, "items": len(wanted.items), "bytes_in": len(body)}
        del body
        services.engine.check_served(wanted.modality)
        async with services.ingest.pack(wanted.modality, wanted.items, services.engine.arena) as packed:
            services.admission.resize(lifetime, packed.block.nbytes)
            job = EncodeJob(
                req_key=f"{wanted.part_idx}/{wanted.req_id}",
                modality=wanted.modality,
                block=packed.block.hand_over(),
                metadata_bytes=packed.metadata_bytes,
                item_count=packed.item_count,
                deadline_ns=deadline_ns,
                wait=wanted.wait,
                digest=packed.digest,
            )
            handed_over_ns = time.monotonic_ns()
            encoded = await services.engine.encode(job)
    handles = services.engine.handles(encoded.handle, wanted.receive_count)
    answer = _answer(wanted, encoded, handles, note.started_ns, handed_over_ns)
    note.fields |= {"rows": answer.rows, "worker": encoded.worker, "queue_ms": answer.timings.queue}
    return answer


async def probe(services: Services, modality: str, sample: str, timeout_s: float) -> None:
    """Encode a built-in sample and let it go: /health_generate. Takes no permit and is not counted."""
    deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    item = InlineItem(sample, 0, is_base64=True)
    async with services.ingest.pack(modality, [item], services.engine.arena) as packed:
        job = EncodeJob(
            req_key=f"health-{time.monotonic_ns()}",
            modality=modality,
            block=packed.block.hand_over(),
            metadata_bytes=packed.metadata_bytes,
            item_count=1,
            deadline_ns=deadline_ns,
            wait="ready",
            digest=packed.digest,
        )
        encoded = await services.engine.encode(job)
    services.engine.release(encoded.handle.nonce)


async def _parse(body: bytearray, max_items: int, note: RequestNote) -> EncodeRequest:
    split = await split_body(body)
    try:
        wanted = parse_encode(split, max_items)
    except RequestError:
        note.req_id = req_id_of(split)
        raise
    note.req_id = wanted.req_id
    return wanted


def timeout_ns(headers: Headers, config: ServeConfig) -> int:
    """X-Request-Timeout-Ms, at most --request-timeout, which is also the default."""
    limit_ms = int(config.request_timeout_s * 1000)
    text = headers.get(TIMEOUT_HEADER, str(limit_ms))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise InvalidRequest("X-Request-Timeout-Ms must be a positive number of milliseconds")
    return min(int(text), limit_ms) * 1_000_000


def _answer(
    wanted: EncodeRequest, encoded: Encoded, handles: list[Handle], started_ns: int, handed_over_ns: int
) -> EncodeAnswer:
    times = encoded.timings
    return EncodeAnswer(
        req_id=wanted.req_id,
        modality=wanted.modality,
        num_parts=wanted.num_parts,
        part_idx=wanted.part_idx,
        grid_thw=[grid for item in encoded.metadata.items for grid in item.grids],
        rows=encoded.rows,
        dim=encoded.dim,
        embedding_size=encoded.nbytes,
        embedding_len=encoded.rows,
        embedding_dim=encoded.dim,
        dtype=encoded.dtype.label,
        items=[_answer_item(item) for item in encoded.metadata.items],
        timings=AnswerTimings(
            ingest=_milliseconds(handed_over_ns - started_ns),
            queue=times.queue_us / 1000,
            preprocess=times.preprocess_us / 1000,
            forward=times.forward_us / 1000,
            copy=times.copy_us / 1000,
            total=_milliseconds(time.monotonic_ns() - started_ns),
        ),
        state=encoded.state,
        handle=encoded.handle,
        handles=handles if len(handles) > 1 else UNSET,
        video_timestamps=_of_all([item.aux.video_timestamps for item in encoded.metadata.items]),
        second_per_grid_ts=_of_all([item.aux.second_per_grid_ts for item in encoded.metadata.items]),
        audio_feature_lens_raw=_of_all([item.aux.audio_feature_length for item in encoded.metadata.items]),
        **_sound_of_videos([item.aux for item in encoded.metadata.items]),
    )


def _sound_of_videos(items: list[ItemAux]) -> dict[str, list[int]]:
    """The answer's video_audio_* fields; none where no video has sound."""
    segments = [aux.video_audio_segment_lens for aux in items]
    if all(lengths is None for lengths in segments):
        return {}
    return {
        "video_audio_feature_lens": [
            aux.video_audio_feature_length for aux in items if aux.video_audio_feature_length is not None
        ],
        "video_audio_segment_lens_flat": [length for lengths in segments for length in lengths or ()],
        "video_audio_per_video_num_units": [len(lengths or ()) for lengths in segments],
    }


def _answer_item(item: ItemRows) -> AnswerItem:
    aux = item.aux if item.aux != ItemAux() else None
    return AnswerItem(item.row_start, item.row_count, item.grids, item.width, item.height, aux)


def _of_all(values: list[Value | None]) -> list[Value] | None:
    """The values, if every item has one."""
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else None


def _milliseconds(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)
