"""What a comparison found: the arithmetic of its pairs, and its result as Markdown, JSON and a picture.

Measures nothing and starts nothing. A result drawn again from its JSON:

    python benchmarks/compare_report.py RESULT.json [OUT.png]

A result is one JSON object, format `fuel-compare/1`:

- `facts`: date, command, commit, machine (CPU, flags, cores, memory, system), model (file, bytes, SHA-256);
- `settings`: threads, pairs, tokens and the rest of what was asked for;
- `engines`: what each engine that took part says of itself (versions, formats, features);
- `left_out`: engines, or single cells of them, that could not be measured, each with the reason;
- `cells`: one for each scenario, condition and group of engines: `reference`, `fields` (name and unit of what was
  measured), `pairs` (`{"engine", "order", "reference": {field: value}, "other": {field: value}}`), `engines` (each
  field's median over the turns; its least value where the name starts with `best`), `ratios` (see `ratios`) and, where
  text was generated, `tokens` (see `tokens_part`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = "fuel-compare/1"

Turn = Mapping[str, float]
"""One engine's turn: a value for each field."""


QUIET = 0.25
"""A pair is quiet if others used no more than this part of the machine's CPU time in either of its turns."""


def is_quiet(pair: Mapping[str, Any]) -> bool:
    return all(pair[side].get("others_cpu", 0.0) <= QUIET for side in ("reference", "other"))


def ratios(pairs: Sequence[Mapping[str, Any]], field: str) -> dict[str, dict[str, float]]:
    """Engine -> median, least and greatest of its own value over the reference's, pair by pair.

    The median of ratios, not the ratio of medians: the two turns of a pair follow each other at once, so what slows the
    machine for a while slows both. It need not slow both alike (an engine whose threads wait for each other by spinning
    loses most), so only quiet pairs count where there are three of them; `quiet` says how many there were.
    """
    found: dict[str, dict[str, float]] = {}
    for engine in dict.fromkeys(pair["engine"] for pair in pairs):
        own = [pair for pair in pairs if pair["engine"] == engine]
        quiet = [pair for pair in own if is_quiet(pair)]
        each = [pair["other"][field] / pair["reference"][field] for pair in (quiet if len(quiet) >= 3 else own)]
        found[engine] = {
            "median": statistics.median(each),
            "least": min(each),
            "greatest": max(each),
            "pairs": len(each),
            "measured": len(own),
            "quiet": len(quiet),
        }
    return found


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """One value a field: the least where its name starts with `best`, else the median."""
    return {
        field: min(turn[field] for turn in turns)
        if field.startswith("best")
        else statistics.median(turn[field] for turn in turns)
        for field in turns[0]
    }


def order_of(turn: int) -> tuple[str, str]:
    """Who is first in pair number `turn`: each as often as the other, so that going second favours neither."""
    return ("reference", "other") if turn % 2 == 0 else ("other", "reference")


def tokens_part(reference: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
    """Whether two greedy continuations are equal, and after how many tokens they part where they are not."""
    same = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    if same is None and len(reference) != len(other):
        same = min(len(reference), len(other))
    return {"equal": same is None, "compared": len(reference), "part_after": same}


# ---- Markdown -------------------------------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page: facts, one table a cell, what was left out."""
    facts, settings = result["facts"], result["settings"]
    machine, model = facts["machine"], facts["model"]
    lines = [
        f"# Comparison: {model['name']}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['date']}, commit {facts['commit']}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB, {machine['system']}; threads an engine: {settings['threads']}, batch of 1, "
        f"greedy. CPU flags: {' '.join(machine['flags']) or 'unknown'}. Load average while measuring: "
        f"{_span(cell['load_average'] for cell in result['cells'])}; part of the CPU that others used during a turn: "
        f"{_span(_others(result))}.",
        "",
        "`ratio` is the engine's value over the reference's, the median of pairs measured one right after the other "
        "(least to greatest in brackets); above 1 the engine needs more than the reference. Absolute numbers move with "
        "what else the machine does; ratios are what to compare. A pair is quiet where others used at most "
        f"{QUIET:.0%} of the machine's CPU meanwhile; where three or more are, only they count, and a ratio without "
        "them is marked `disturbed`.",
    ]
    for cell in result["cells"]:
        lines += ["", f"## {cell['title']}", "", *_table(cell)]
    if result["left_out"]:
        lines += ["", "## Left out", ""]
        lines += [
            f"- `{each['engine']}`{', ' + each['cell'] if each.get('cell') else ''}: {each['why']}"
            for each in result["left_out"]
        ]
    lines += ["", "## Engines", ""]
    for name, about in result["engines"].items():
        facts_of = ", ".join(f"{package} {version}" for package, version in about.get("versions", {}).items())
        rest = "; ".join(f"{key} {_plain(about[key])}" for key in ("parameters", "activations", "file") if key in about)
        lines.append(f"- `{name}`: {facts_of}{'; ' + rest if rest else ''}")
    features = {about["features"] for about in result["engines"].values() if "features" in about}
    lines += [f"- llama.cpp was built with: {each}" for each in sorted(features)]
    idle = sum(about.get("idle_cpu_s", 0.0) for about in result["engines"].values())
    lines.append(f"- CPU time that waiting engines spent while another was measured: {idle:.2f} s in all")
    return "\n".join(lines) + "\n"


def _table(cell: Mapping[str, Any]) -> list[str]:
    fields: Mapping[str, str] = cell["fields"]
    compared = list(cell["ratios"])
    head = ["engine", *(f"{_words(name)} ({unit})" for name, unit in fields.items())]
    head += [f"ratio of {_words(name)}" if len(compared) > 1 else "ratio" for name in compared]
    if cell["tokens"]:
        head.append("tokens")
    rows = [head, ["---"] * len(head)]
    for engine, values in cell["engines"].items():
        row = [f"`{engine}`", *(f"{values[name]:.{_digits(values[name])}f}" for name in fields)]
        for name in compared:
            ratio = cell["ratios"][name].get(engine)
            row.append(
                "reference"
                if ratio is None
                else f"**{ratio['median']:.2f}** ({ratio['least']:.2f}-{ratio['greatest']:.2f}, {_count(ratio)})"
            )
        if cell["tokens"]:
            row.append(_tokens(cell["tokens"].get(engine)))
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def _words(field: str) -> str:
    """The name of a field as words, without the unit at its end, which is said beside it."""
    return field.removesuffix("_ms").removesuffix("_mib").replace("_", " ")


def _tokens(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "reference"
    return f"equal ({found['compared']})" if found["equal"] else f"part after {found['part_after']}"


def _count(ratio: Mapping[str, float]) -> str:
    if ratio["quiet"] == ratio["measured"]:
        return f"{ratio['pairs']} pairs"
    if ratio["quiet"] >= 3:
        return f"{ratio['quiet']} quiet of {ratio['measured']} pairs"
    return f"{ratio['pairs']} pairs, disturbed"


def _digits(value: float) -> int:
    return 2 if abs(value) < 100 else 0


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _others(result: Mapping[str, Any]) -> list[float]:
    pairs = [pair for cell in result["cells"] for pair in cell["pairs"]]
    sides = [pair[side] for pair in pairs for side in ("reference", "other")]
    return [side["others_cpu"] for side in sides if "others_cpu" in side]


def _span(values: Iterable[float]) -> str:
    each = list(values)
    return f"{min(each):.2f} to {max(each):.2f}" if each else "unknown"


# ---- files ----------------------------------------------------------------------------------------------------------


def write(result: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    """Write `name`.json and `name`.md into `folder`; an older result of that name stays, the new one gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    free, number = name, 1
    while (folder / f"{free}.json").exists():
        number += 1
        free = f"{name}-{number}"
    paths = [folder / f"{free}.json", folder / f"{free}.md"]
    paths[0].write_text(json.dumps(result, indent=1) + "\n")
    paths[1].write_text(markdown(result))
    return paths


def plot(result: Mapping[str, Any], path: Path) -> None:
    """One row of bars a cell: each engine's first field, with its ratio. Raises ImportError without matplotlib."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = result["cells"]
    heights = [0.7 + 0.3 * len(cell["engines"]) for cell in cells]
    figure, rows = pyplot.subplots(
        len(cells), 1, figsize=(8, sum(heights) + 0.5), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, cell in zip(rows[:, 0], cells, strict=True):
        field = next(iter(cell["ratios"]))
        engines = list(cell["engines"])
        values = [cell["engines"][engine][field] for engine in engines]
        colours = ["#c2571a" if engine.startswith("fuel:") else "#7a8794" for engine in engines]
        axes.barh(engines, values, color=colours, height=0.7)
        axes.invert_yaxis()
        for row, (engine, value) in enumerate(zip(engines, values, strict=True)):
            ratio = cell["ratios"][field].get(engine)
            note = "reference" if ratio is None else f"x {ratio['median']:.2f}"
            axes.text(value, row, f" {value:.{_digits(value)}f}  {note}", va="center", fontsize=8)
        axes.set_xlim(0, max(values) * 1.3)
        axes.set_title(cell["title"], fontsize=9, loc="left")
        axes.set_xlabel(f"{_words(field)} ({cell['fields'][field]}), less is better", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    facts = result["facts"]
    figure.suptitle(
        f"{facts['model']['name']}, {facts['machine']['cpu']}, {result['settings']['threads']} threads, "
        f"{facts['date'][:10]}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("RESULT.json [OUT.png] expected")
    source = Path(sys.argv[1])
    result = json.loads(source.read_text())
    if result.get("format") != FORMAT:
        sys.exit(f"{source.name}: format {FORMAT} expected, found {result.get('format')!r}")
    try:
        plot(result, Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_suffix(".png"))
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed (pip install matplotlib)")


if __name__ == "__main__":
    main()
