"""Every experiment by its name."""

from __future__ import annotations

from benchmarks.paper import algorithms, cusparse, memory, ocpa, shares, transfer, whole, zeros
from benchmarks.paper.cusnn import density, figures, microkernel, searched
from benchmarks.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (
        *(zeros, transfer, ocpa, algorithms, whole, cusparse, memory, shares),
        *(microkernel, figures, searched, density),
    )
    for experiment in module.EXPERIMENTS
}
