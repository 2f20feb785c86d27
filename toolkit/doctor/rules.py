"""From observations to findings; pure."""

from __future__ import annotations

from toolkit.bench.machine import conditions
from toolkit.doctor import rules_memory, rules_storage, rules_system
from toolkit.doctor.finding import Finding, Severity
from toolkit.doctor.observe import Measured, Settings
from toolkit.doctor.predict import Prediction


def findings(seen: Settings, measured: Measured, prediction: Prediction | None, model: str | None) -> list[Finding]:
    """Everything there is to say, worst first; `model` is its path as a command takes it."""
    said = conditions(seen.facts)
    found = [
        *rules_storage.model(seen, prediction, model),
        rules_storage.filesystem(seen, said),
        rules_storage.disk(seen, said),
        rules_storage.read_ahead(seen, said),
        rules_storage.disk_speed(seen, measured),
        rules_memory.page_size(seen),
        rules_memory.memory(seen),
        rules_memory.budget(seen),
        rules_memory.swap(seen, said),
        rules_memory.huge_pages(seen),
        rules_memory.lock_limit(seen, said, prediction),
        rules_system.governor(seen, said),
        rules_system.power(seen),
        rules_system.cores(seen, said),
        rules_system.numa(seen, said, model),
        *rules_system.kernel(seen),
        rules_system.virtualization(seen, said),
        *rules_system.others(measured),
    ]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))
