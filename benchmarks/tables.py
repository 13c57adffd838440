"""Print the records as one page of tables: python benchmarks/tables.py [--to build/benchmarks.md]"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from records import MADE_BY, RESULTS, ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "benchmarks.md")
    place = parser.parse_args().to
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("# Benchmarks\n" + "".join(section(path) for path in sorted(RESULTS.glob("*.csv"))))
    print(place)


def section(path: Path) -> str:
    """The table of one file: how it was made, then a row per configuration without the columns that are empty."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    made = [f"{name} {value}" for name in MADE_BY if (value := rows[0].get(name))]
    text = f"\n## {path.stem}\n\n{'; '.join(made)}\n"
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:  # those with the same numbers below each other
        groups.setdefault(tuple(n for n, v in row.items() if v and n not in ("table", *MADE_BY)), []).append(row)
    for names, some in groups.items():
        text += f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
        text += "".join(f"| {' | '.join(row[name] for name in names)} |\n" for row in some)
    return text


if __name__ == "__main__":
    main()
