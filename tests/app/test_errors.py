"""app.errors and app.problem: one table, and bodies that both kinds of clients can read."""

from __future__ import annotations

import json

import pytest

from app import errors
from app.errors import CAUSES, ItemUndecodable, RequestError, cause_of, from_worker
from app.problem import error_for_status, problem_response
from shm.errors import ErrorCode, TensorFault


def test_every_cause_has_a_row_and_every_row_a_code_of_its_own() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, RequestError) and value is not RequestError
    }
    assert classes == set(CAUSES)
    assert len({cause.code for cause in CAUSES.values()}) == len(CAUSES)


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.NONE])
def test_every_worker_code_becomes_one_error(code: ErrorCode) -> None:
    error = from_worker(code, 3, 50, 40)
    assert cause_of(error).status >= 400
    assert error.message
    assert (error.item_index == 3) == (code < ErrorCode.SEGMENT_FULL)


def test_a_limit_is_named_with_both_numbers() -> None:
    error = from_worker(ErrorCode.TOO_MANY_PIXELS, 1, 40_000_000, 33_554_432)
    assert isinstance(error, ItemUndecodable)
    assert error.message == "mm_items[1] has 40000000 pixels; the limit is 33554432"


@pytest.mark.parametrize(
    ("code", "fault", "limit", "text"),
    [
        (
            ErrorCode.TENSOR_MISSING,
            TensorFault("image_grid_thw"),
            0,
            "lacks the processed tensor image_grid_thw",
        ),
        (
            ErrorCode.TENSOR_TYPE,
            TensorFault("pixel_values"),
            0,
            "has pixel_values of a type that is not float32, float16 or bfloat16",
        ),
        (
            ErrorCode.TENSOR_TYPE,
            TensorFault("image_sizes"),
            1,
            "has image_sizes of a type that is not integer",
        ),
        (
            ErrorCode.TENSOR_DIMENSIONS,
            TensorFault("input_features", 0, 2),
            3,
            "has input_features of 2 dimensions; the model takes 3",
        ),
        (
            ErrorCode.TENSOR_SIZE,
            TensorFault("input_features", 1, 80),
            128,
            "has input_features of size 80 on axis 1; the model takes 128",
        ),
        (
            ErrorCode.TENSOR_VALUE,
            TensorFault("video_grid_thw", 0, 1 << 44),
            1 << 20,
            "has 17592186044416 in video_grid_thw; the limit is 1048576",
        ),
        (
            ErrorCode.TENSOR_NOT_FINITE,
            TensorFault("no such name"),
            0,
            "has numbers in a tensor that are not finite",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    code: ErrorCode, fault: TensorFault, limit: int, text: str
) -> None:
    error = from_worker(code, 2, fault.pack(), limit)
    assert error.message == f"mm_items[2] {text}"
    assert cause_of(error).status == 400


def test_a_code_that_nobody_knows_is_a_fault_of_ours() -> None:
    assert cause_of(from_worker(9999, 0, 0, 0)).status == 500


@pytest.mark.parametrize("error_class", CAUSES)
def test_a_problem_body_serves_rfc_9457_and_sglang(error_class: type[RequestError]) -> None:
    response = problem_response(error_class("what happened", item_index=2), "request-1", "r1")
    cause = CAUSES[error_class]
    body = json.loads(bytes(response.body))
    assert response.status_code == cause.status
    assert response.headers["content-type"] == "application/problem+json"
    assert body["status"] == "error"
    assert (body["status_code"], body["code"]) == (cause.status, cause.code)
    assert body["message"] == body["detail"] == "what happened"
    assert (body["req_id"], body["instance"], body["item_index"]) == ("r1", "request-1", 2)
    assert ("retry-after" in response.headers) == (cause.status in (429, 503))


def test_the_routers_own_errors_have_the_same_shape() -> None:
    assert [cause_of(error_for_status(status)).status for status in (404, 405)] == [404, 405]
