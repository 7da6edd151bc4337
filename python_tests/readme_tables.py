"""The README's generated tables. `python python_tests/readme_tables.py` writes them into it."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

from badam_kernels import formats

ROOT = Path(__file__).resolve().parent.parent


def formats_table() -> str:
    """Every format and parameter dtype it holds beyond fp32, with bytes per element from the codecs."""
    lines = ["| format | weight | extends it to fp32 | resident | idle | moved |", "| --- | --- | --- | --- | --- | --- |"]
    for held in (formats.MASTER, formats.SPLIT):
        for dtype, codec in held.weight.items():
            auxiliary = str(codec.auxiliary).removeprefix("torch.") if codec.auxiliary else "nothing, it is fp32"
            numbers = held.resident_bytes(dtype), held.idle_bytes(dtype), held.moved_bytes(dtype)
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| `{held.name}` | {name} | {auxiliary} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def measured(name: str) -> str:
    """The rows of a file in benchmarks/results, as a benchmark wrote them."""
    with open(ROOT / "benchmarks" / "results" / f"{name}.csv", newline="") as file:
        rows = list(csv.reader(file))
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def measured_often() -> str:
    """The median of each step's times in the files of several runs, the least and the most of them, and the like shares."""
    steps: dict[str, list[dict]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("run_*/step_cpu.csv")):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                steps.setdefault(row["step"], []).append(row)

    def spread(rows: list[dict], column: str, digits: int) -> str:
        values = [float(row[column]) for row in rows]
        return " | ".join(f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))

    columns = ["step", "bytes/param", "ns/param", "least", "most", "% of in-place", "least", "most"]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, rows in steps.items():
        numbers = spread(rows, "ns/param", 3), spread(rows, "% of in-place", 0)
        lines.append(f"| {name} | {rows[0]['bytes/param']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


TABLES = {"formats": formats_table, "cpu": measured_often, "host": lambda: measured("host_cpu")}


def filled(text: str) -> str:
    """README `text` with every generated table as it should be."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found: found[1] + table() + "\n" + found[2], text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the README must have one place for the table {name!r}; it has {count}")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
