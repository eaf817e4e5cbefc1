"""docs/grafana.json is valid, and the server exports every metric and label that the dashboard uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.top.asking import Sample, samples_of
from localllm.generation.interfaces import Load, Replicas
from localllm.generation.statistics import Usage
from localllm.server.metrics import Metrics
from tests.localllm.support import REPOSITORY

PATH = REPOSITORY / "docs" / "grafana.json"
NAME = re.compile(r"\b(?:localllm_|llamacpp:)[a-z_:]*[a-z]")


@pytest.fixture(scope="module")
def exported() -> dict[str, list[Sample]]:
    """Return the server's metrics after one request of each kind."""
    metrics = Metrics(lambda: (1, 1))
    load = Load((), 0, kept_tokens=40, kept_blocks=3, free_blocks=5, blocks=8, replicas=Replicas(2, 2, 1, 0.0, 0, 0))
    metrics.loads = lambda: {"tiny": load}
    metrics.step(1, 1)
    metrics.token(0.01)
    metrics.evaluated(3)
    metrics.answered(Usage(10, 4, 6, 0.5, 1.0, 2.0, 5.0, drafted=8, accepted=7), "end")
    metrics.responded("/v1/messages", 200, 0.1)
    return samples_of(metrics.text())


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported(
    dashboard: dict[str, Any], exported: dict[str, list[Sample]]
) -> None:
    variables = [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    named = {name for text in (*expressions(dashboard), *variables) for name in NAME.findall(text)}
    assert len(named) >= 15
    assert named - exported.keys() == set()


def test_every_label_of_the_dashboard_is_exported(dashboard: dict[str, Any], exported: dict[str, list[Sample]]) -> None:
    chosen = 0
    for text in expressions(dashboard):
        for name, labels in re.findall(rf"({NAME.pattern})\{{([^}}]*)\}}", text):
            wanted = dict(re.findall(r'(\w+)=~?"([^"]*)"', labels))
            assert wanted.pop("instance") == "$instance", text  # Prometheus adds this label
            assert any(wanted.items() <= each.labels.items() for each in exported[name]), text
            chosen += len(wanted)
        for label in re.findall(r"by \((\w+)\)", text):
            (name,) = set(NAME.findall(text))
            assert any(label in each.labels for each in exported[name]), text
    assert chosen >= 4


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert (dashboard["title"], dashboard["uid"], dashboard["schemaVersion"] >= 39) == (
        "localllm serve",
        "localllm",
        True,
    )
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers) >= 12
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(each["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for each in panel["targets"])
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_parentheses_of_expressions_match(dashboard: dict[str, Any]) -> None:
    for text in expressions(dashboard):
        for left, right in ("()", "{}", "[]"):
            depth = 0
            for letter in text:
                depth += (letter == left) - (letter == right)
                assert depth >= 0, text
            assert depth == 0, text


def test_the_page_names_what_is_exported(exported: dict[str, list[Sample]]) -> None:
    page = Path(REPOSITORY / "docs" / "monitor.md").read_text(encoding="utf-8")
    named = set(NAME.findall(page)) - {"llamacpp:spec_decode_num_draft_tokens_total"}
    known = {*exported, *(name.removesuffix("_bucket") for name in exported)}
    assert len(named) > 10
    assert named - known == set()
