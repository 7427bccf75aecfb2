"""Every experiment by its name."""

from __future__ import annotations

from benchmarks.paper import (
    algorithms,
    cusnn,
    cusparse,
    density,
    memory,
    microkernel,
    ocpa,
    searched,
    shares,
    transfer,
    whole,
    zeros,
)
from benchmarks.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (
        *(zeros, transfer, ocpa, algorithms, whole, cusparse, memory, shares, microkernel, cusnn, searched, density),
    )
    for experiment in module.EXPERIMENTS
}
