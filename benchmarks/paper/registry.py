"""Every experiment by its name."""

from __future__ import annotations

from benchmarks.paper import cusnn, cusparse, memory, ocpa, whole, zeros
from benchmarks.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (zeros, ocpa, whole, cusparse, memory, cusnn)
    for experiment in module.EXPERIMENTS
}
