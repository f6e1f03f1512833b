"""The report that every benchmark prints: its format, not anybody's speed."""

import json

import pytest

from tests.bench.report import PLOTS, Report, Target


@pytest.fixture
def report() -> Report:
    report = Report("example")
    report.add_row("the fast one", p50_us=0.91234, p99_us=None)
    report.add_row("slow", p50_us=81.5, messages_per_second=123456.0)
    report.add_target(Target("times faster", 89.33333, ">=", 50))
    report.add_target(Target("MB of memory", 70.0, "<=", 60))
    return report


@pytest.mark.parametrize(
    ("value", "op", "reached"),
    [(2.0, ">=", True), (1.9, ">=", False), (2.0, "<=", True), (2.1, "<=", False)],
)
def test_a_target_is_reached_at_its_value_or_beyond(value: float, op: str, reached: bool) -> None:
    target = Target("name", value, op, 2.0)  # type: ignore[arg-type]
    assert target.reached is reached


def test_the_last_line_is_one_json_object(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.finish()
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(answer) == ["bench", "commit", "machine", "results", "targets"]
    assert answer["bench"] == "example"
    assert answer["commit"]
    assert answer["machine"]["cores"] >= 1
    assert answer["results"][0] == {"name": "the fast one", "p50_us": 0.9123, "p99_us": None}
    assert answer["targets"][0] == {
        "name": "times faster",
        "value": 89.33,
        "op": ">=",
        "target": 50,
        "reached": True,
    }
    assert answer["targets"][1]["reached"] is False


def test_the_table_is_aligned_and_says_what_was_missed(report: Report) -> None:
    assert report.table().splitlines() == [
        "name          p50_us  p99_us  messages_per_second",
        "the fast one   0.912       -                    -",
        "slow            81.5       -              123,456",
        "reached: times faster: 89.3 >= 50",
        "MISSED: MB of memory: 70 <= 60",
    ]


def test_a_plot_lies_beside_the_documentation(report: Report) -> None:
    assert report.plot_path() == PLOTS / "example.png"
