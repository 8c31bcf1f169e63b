import pytest

from launch.tools.report import timeline_rounds, timeline_spans
from launch.tools.report.panels import REWARD, SECTIONS, Panel
from learner.metrics.metric_names import FAMILIES, METRICS

PANELS = [REWARD, *(panel for panels in SECTIONS.values() for panel in panels)]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_each_line_is_of_a_known_metric_in_the_figures_unit(panel: Panel):
    for line in panel.lines:
        if "*" in line.metric:
            assert line.metric.replace("*", "?*") in FAMILIES
            continue
        said = METRICS[line.metric]
        for unit in ("seconds", "nats", "steps", "fraction"):
            if said.startswith(unit):
                assert unit in panel.y_label, line
        for unit in ("seconds", "nats", "steps"):
            if unit in panel.y_label:
                assert said.startswith(unit), line


def test_what_is_counted_as_a_fault_is_a_known_metric():
    assert set(timeline_rounds._COUNTS) <= set(METRICS)


def test_what_is_said_of_a_round_is_a_known_metric():
    names = {name: 1.0 for name in METRICS if name.startswith("round/")}
    assert set(timeline_spans._of_round(names)) == {"waiting", "waiting_eq4", "dispatch", "wait", "compute"}
