"""Distribute the suite over the processes of pytest-xdist (`--dist worksteal`), with groups that stay in one process.

A group is a mark of a whole file, `pytestmark = pytest.mark.xdist_group("name")`. `tests/conftest.py` uses this module.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler.worksteal import MIN_PENDING, WorkStealingScheduling  # type: ignore[import-untyped]


@cache
def group_of(path: Path) -> str:
    """Return the group of the tests in a file; "" without one."""
    found = re.search(r'pytest\.mark\.xdist_group\("(\w+)"\)', path.read_text(encoding="utf-8"))
    return found[1] if found is not None else ""


def order(path: Path) -> tuple[bool, str]:
    """Return the sort key of a test in this file. Groups come first, because other processes can take only the
    tests after them.
    """
    group = group_of(path)
    return not group, group


class GroupedStealing(WorkStealingScheduling):  # type: ignore[misc]  # untyped
    """Gives each process a part of the suite in order, so that it compiles its own kernels. A process that has ended
    its part takes tests from the end of another's, but no test of a group.
    """

    def check_schedule(self) -> None:
        """Hide tests of groups from pytest-xdist, which leaves the first `MIN_PENDING` of the tests that it sees."""
        hidden = {}
        for node, pending in self.node2pending.items():
            grouped = next((place for place, test in enumerate(pending) if not self._group(test)), len(pending))
            hidden[node] = pending[: max(grouped - MIN_PENDING, 0)]
            self.node2pending[node] = pending[len(hidden[node]) :]
        super().check_schedule()
        for node, pending in hidden.items():
            self.node2pending[node][:0] = pending

    def _send_tests(self, node: object, num: int) -> None:
        while (
            0 < num < len(self.pending) and self._group(self.pending[num - 1]) == self._group(self.pending[num]) != ""
        ):
            num += 1
        super()._send_tests(node, num)

    def _group(self, test: int) -> str:
        return group_of(self.config.rootpath / self.collection[test].partition("::")[0])
