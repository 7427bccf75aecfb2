"""What `run --html` writes: one page of one comparison, which loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dense: #8a94a0; --sparse: #2a78b8; --zeros: #7fa8c9; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.bars { width: 32%; } .scroll { overflow-x: auto; }
.bar { height: 0.5rem; margin: 0.2rem 0; min-width: 1px; border-radius: 2px; }
.zeros { background: var(--zeros); } .dense { background: var(--dense); } .sparse { background: var(--sparse); }
.key { display: inline-block; width: 0.8rem; height: 0.6rem; margin: 0 0.3rem 0 0.9rem; }
tfoot td { font-weight: 600; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.2rem; }
dt { opacity: 0.75; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
_RUN = ("network", "images", "batch", "size", "dtype", "precision", "implementation", "plan", "weights", "seed",
        "repeats", "device", "date", "command", "xla_flags")  # fmt: skip


def of(content: Mapping[str, Any]) -> str:
    """The page of what `run --json` writes."""
    title = f"{content['network']} on {content['device']}"
    network = content["totals"]["network"]
    summary = (
        f"The whole network took {_milliseconds(network['dense_us'])} with dense layers and "
        f"{_milliseconds(network['sparse_us'])} skipping zeros: a ratio of {network['ratio']:.2f}. The largest "
        f"relative difference of the outputs is {content['difference']['max_relative']:.1e}."
    )
    parts = [
        f"{_HEAD}<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{_text(title)}</h1>\n<p>{_text(summary)}</p>",
        *(f"<p>{_text(note)}</p>" for note in content["notes"]),
        f"<h2>Layers</h2>\n{_layers(content['layers'], content['totals'])}",
        f"<h2>Best five classes</h2>\n{_classes(content)}",
        f"<h2>What ran</h2>\n{_facts((name.replace('_', ' '), content.get(name)) for name in _RUN)}",
        f"<h2>Versions and devices</h2>\n{_facts(_flat(content['environment']))}",
    ]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _layers(layers: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> str:
    longest = max(max(row["dense_us"], row["sparse_us"]) for row in layers)
    keys = "".join(
        f'<span class="key {kind}"></span>{text}'
        for kind, text in (("zeros", "zeros in the input"), ("dense", "dense time"), ("sparse", "time skipping zeros"))
    )
    names = ("layer", "input", "output", "ran", "", "zeros %", "dense ms", "sparse ms", "ratio")
    numbers = names[5:]
    head = "".join(f"<th{_NUMBER if name in numbers else ''}>{name}</th>" for name in names)
    rows = "\n".join(f"<tr>{_layer(row, longest)}</tr>" for row in layers)
    foot = "\n".join(
        f'<tr><td colspan="6">{name}</td>{_times(total)}</tr>'
        for name, total in (("sum of the layers", totals["layers"]), ("whole network", totals["network"]))
    )
    return (
        f'<p>{keys}</p>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n<tfoot>\n{foot}\n</tfoot>\n</table></div>"
    )


_NUMBER = ' class="number"'


def _layer(row: Mapping[str, Any], longest: float) -> str:
    shapes = ("x".join(map(str, row[name])) for name in ("input_shape", "output_shape"))
    cells = "".join(f"<td>{_text(each)}</td>" for each in (row["path"], *shapes, row["implementation"]))
    shares = {
        "zeros": row["zeros_percent"],
        "dense": 100 * row["dense_us"] / longest,
        "sparse": 100 * row["sparse_us"] / longest,
    }
    bars = "".join(f'<div class="bar {kind}" style="width:{share:.1f}%"></div>' for kind, share in shares.items())
    return f'{cells}<td class="bars">{bars}</td><td{_NUMBER}>{row["zeros_percent"]:.1f}</td>{_times(row)}'


def _times(row: Mapping[str, float]) -> str:
    numbers = (f"{row['dense_us'] / 1e3:,.3f}", f"{row['sparse_us'] / 1e3:,.3f}", f"{row['ratio']:.2f}")
    return "".join(f"<td{_NUMBER}>{number}</td>" for number in numbers)


def _classes(content: Mapping[str, Any]) -> str:
    """Of each photograph, not of its mirrored and shifted copies."""
    images, top = content["images"], content["top5"]
    rows = []
    for index, image in enumerate(images):
        for side, found in top.items():
            best = found[index * (len(found) // len(images))]
            names = ", ".join(f"{each['name']} {100 * each['probability']:.1f} %" for each in best)
            rows.append(f"<tr><td>{_text(image)}</td><td>{_text(side)}</td><td>{_text(names)}</td></tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _facts(facts: Iterable[tuple[str, Any]]) -> str:
    said = ((name, _said(value)) for name, value in facts)
    return "<dl>\n" + "\n".join(f"<dt>{_text(n)}</dt><dd>{_text(v)}</dd>" for n, v in said if v) + "\n</dl>"


def _flat(environment: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for section, value in environment.items():
        title = section.replace("_", " ")
        if isinstance(value, Mapping):
            yield from ((f"{title}: {name}", entry) for name, entry in value.items())
        else:
            yield title, value


def _said(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.3f} ms"


def _text(value: str) -> str:
    return html.escape(str(value))
