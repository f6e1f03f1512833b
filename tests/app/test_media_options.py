"""--mm-process-config: parsed at the edge, and what a worker is told of it."""

import argparse

import pytest

from app.cli import parse_media_options
from shm.messages import MediaOptions


@pytest.mark.parametrize(
    "text",
    [
        '{"video": {"fps": 1.5}, "image": {"max_pixels": 9}}',
        '{"vision_config": {"video": {"fps": 1.5}, "image": {"max_pixels": 9}}}',
    ],
)
def test_options_come_by_modality_in_sglangs_envelope_or_without(text: str) -> None:
    assert parse_media_options(text) == MediaOptions(image={"max_pixels": 9}, video={"fps": 1.5})


@pytest.mark.parametrize("text", ["", "7", '{"smell": {}}', '{"video": 7}', '{"vision_config": []}'])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_media_options(text)
