"""Files of cases to skip or known to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmtune.conformance.runs.files import CaseList
from gemmtune.errors import ConformanceError

IDS = ["bound:mm-f16-1x2x3", "bound:mm-f32-1x2x3-a.row+8@3", "nan:bmm-f16-2x1x2x3-a.col~0"]


@pytest.fixture
def case_list(tmp_path: Path) -> CaseList:
    path = tmp_path / "list.txt"
    path.write_text("# half precision\nbound:mm-f16-*   # issue 12\n\nbound:mm-f32-1x2x3-a.row+8@3\nnan:*-f?4-*  # no such dtype\n")
    return CaseList.read(str(path))


def test_a_line_is_an_id_or_a_pattern_with_a_reason(case_list: CaseList) -> None:
    assert [case_list.reason(i) for i in IDS] == ["issue 12", "no reason is given", None]


def test_no_file_lists_nothing() -> None:
    assert CaseList.read(None).reason(IDS[0]) is None
    assert CaseList.read(None).complaints() == []


def test_lines_that_match_no_case_are_reported_with_their_number(case_list: CaseList) -> None:
    [complaint] = case_list.unmatched(IDS).complaints()
    assert complaint.endswith("list.txt:5: no case has the id 'nan:*-f?4-*'; correct the line or remove it")
    assert len(case_list.unmatched([]).lines) == 3


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="expected a text file of case ids"):
        CaseList.read(str(tmp_path / "missing.txt"))
