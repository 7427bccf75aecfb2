"""Writes the shipped constants of models and planners (dispatch/model.json) as a C++ header, for the build."""

import json
import re
import sys
from pathlib import Path


def header(model: dict) -> str:
    """What is fitted, and may be another GPU's, as numbers in their order; of all other groups named constants.

    Groups of kernels lie one behind the other: where each begins, how many constants a kind has, how many kinds.
    """
    groups, values = [], []
    for name, group in model["kernels"].items():
        size, kinds = len(group["names"]), list(group["kinds"].values())
        if any(len(kind) != size for kind in kinds):
            raise ValueError(f"{name}: every kind must have {size} constants, one for each name")
        groups.append(f"inline constexpr ModelGroup k{_camel(name)}{{{len(values)}, {size}, {len(kinds)}}};")
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
        *(line for name, group in model["others"].items() for line in named(name, group)),
        f"inline constexpr int kCount = {len(values)};",
        f"inline constexpr double kShipped[kCount] = {{{', '.join(map(repr, values))}}};",
        "}  // namespace jsc::model",
        "#endif  // JSC_MODEL_CONSTANTS_H_",
    ]
    return "\n".join(lines) + "\n"


def named(name: str, group: dict) -> list[str]:
    """A namespace of a group of one kind: "list, tap" of "cpu windows" is cpu_windows::kListTap."""
    (values,) = group["kinds"].values()
    constants = {"k" + _camel(each): float(value) for each, value in zip(group["names"], values, strict=True)}
    if len(constants) < len(values):
        raise ValueError(f"{name}: names that differ must differ as names of C++, too")
    lines = [f"inline constexpr double {each} = {value!r};" for each, value in constants.items()]
    return [f"namespace {'_'.join(re.findall('[a-z0-9]+', name.lower()))} {{", *lines, "}"]


def _camel(name: str) -> str:
    return "".join(word[0].upper() + word[1:] for word in re.findall("[A-Za-z0-9]+", name))


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(header(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")
