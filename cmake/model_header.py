"""Writes the shipped constants of the planners' models (dispatch/model.json) as a C++ header, for the build."""

import json
import sys
from pathlib import Path


def header(model: dict) -> str:
    """Groups in their order, one behind the other: where each begins, how many constants a kind has, how many kinds."""
    groups, values = [], []
    for name, group in model["kernels"].items():
        camel = "".join(word.capitalize() for word in name.split("_"))
        size, kinds = len(group["names"]), list(group["kinds"].values())
        if any(len(kind) != size for kind in kinds):
            raise ValueError(f"{name}: every kind must have {size} constants, one for each name")
        groups.append(f"inline constexpr ModelGroup k{camel}{{{len(values)}, {size}, {len(kinds)}}};")
        values += [float(value) for kind in kinds for value in kind]
    lines = [
        "// Made from jax_sparse_conv/_src/dispatch/model.json by cmake/model_header.py.",
        "#ifndef JSC_MODEL_CONSTANTS_H_",
        "#define JSC_MODEL_CONSTANTS_H_",
        "namespace jsc::model {",
        "struct ModelGroup {",
        "  int first, size, kinds;",
        "};",
        *groups,
        f"inline constexpr int kCount = {len(values)};",
        f"inline constexpr double kShipped[kCount] = {{{', '.join(map(repr, values))}}};",
        "}  // namespace jsc::model",
        "#endif  // JSC_MODEL_CONSTANTS_H_",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(header(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")
