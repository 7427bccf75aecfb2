"""The benchmarks, run from the repository's root.

    python -m benchmarks                      lists the suites
    python -m benchmarks SUITE --help         says what a suite times, and its options
    python -m benchmarks SUITE [options]      runs it

With `--json FILE` a suite adds its rows to a file of results, in which the newest row of each case stays.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

SUITES = {
    "networks": ("networks.networks", "whole networks against XLA: precisions and batches"),
    "zoo": ("suites.zoo", "every layer of every network, and what loses"),
    "sweep": ("suites.sweep", "random layers against lax: what does None lose and win?"),
    "layers": ("suites.layers", "named sets of layers by any implementation"),
    "cpu": ("suites.cpu", "the CPU kernels, and what the cores can do at most"),
    "accuracy": ("suites.accuracy", "errors against float64 beside XLA's: kernels and networks"),
    "adaptive": ("suites.adaptive", "what choosing in the running program costs"),
    "calls": ("suites.calls", "what a call costs before it computes anything"),
    "host": ("networks.host", "what a call costs its host, by the way weights get in"),
    "latency": ("networks.latency", "what one call costs that is waited for"),
    "models": ("networks.models", "models that others wrote, by accelerate and jit_inference"),
    "packed": ("networks.packed", "networks with packed kernels as arguments"),
    "gradients": ("suites.gradients", "gradients of single layers, against lax's"),
    "peers": ("networks.peers", "CPU: whole networks beside other frameworks"),
    "training": ("networks.training", "a training step, against XLA and PyTorch"),
    "profile": ("networks.profile", "CPU: where a network's time goes, by operation"),
    "real_weights": ("networks.real_weights", "ImageNet weights on photographs: right, and faster?"),
    "scaling": ("suites.scaling", "the CPU kernels on 1 to 16 cores"),
    "loops": ("suites.loops", "CPU: what the choice between two loops loses"),
    "sorting": ("suites.sorting", "CPU: channels sorted by how often they fire"),
    "instructions": ("suites.instructions", "CPU: instructions counted by valgrind"),
    "cost_model": ("suites.cost_model", "COO*: the model's choice against all (cuSNN)"),
    "direct_ablation": ("suites.direct_ablation", "what each technique of Cheng et al. is worth"),
    "fuzz": ("fuzz.command", "random calls against NumPy in float64: right, and no crash?"),
    "tests": ("suites.tests", "the tests on this machine: what passed and what failed"),
    "paper": ("paper.command", "the papers' tables and figures"),
}
"""By name: the module, and a line."""

TOOLS = {
    "chain_tiles": ("tune.chain_tiles", "search for the fastest tiles of fused chains"),
    "crossover": ("suites.crossover", "plot of ratio against zeros, from results"),
    "document": ("document.command", "write the pages of figures from the results"),
    "check": ("document.check", "are figures in pages what the files say? ages, losses"),
    "zoo_current": ("suites.zoo_current", "drop rows of zoo whose kernel None does not run now"),
    "xla_times": ("tune.xla_times", "XLA's times of the suite zoo as raw times for tune --fit"),
    "regret": ("tune.regret", "what choices lose against the best measured, from raw times"),
    "cpu_regret": ("tune.cpu_regret", "the same of choices on a CPU"),
    "gradient_regret": ("tune.gradient_regret", "the same of choices of gradients (tune --gradients)"),
    "wins": ("tune.wins", "what each kernel alone wins, from raw times"),
    "merge": ("common.merge", "add the rows of files to a file of results"),
}
"""As SUITES: what searches, or measures nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the first argument names; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = SUITES | TOOLS
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name not in commands:
        print(f"benchmarks: there is no suite {name!r}; it is one of {', '.join(commands)}", file=sys.stderr)
        return 2
    os.environ.setdefault("JSC_TABLES", "shipped")  # what is measured does not depend on the user's own tables
    # Imported here: some suites set what JAX reads when it is imported, and some must not take the GPU.
    module = importlib.import_module(f"benchmarks.{commands[name][0]}")
    status: int = module.main(rest)
    return status


def overview() -> str:
    """The suites with a line each."""
    width = max(map(len, SUITES | TOOLS)) + 2
    sections = [f"  {name:{width}}{line}" for name, (_, line) in SUITES.items()]
    sections += ["", "search, or measure nothing:", *(f"  {name:{width}}{line}" for name, (_, line) in TOOLS.items())]
    ends = "python -m benchmarks SUITE --help says more, docs/design/measuring.md the rules."
    return "\n".join(["usage: python -m benchmarks SUITE [options]", "", "suites:", *sections, "", ends])


if __name__ == "__main__":
    sys.exit(main())
