"""Every command of docs/tutorial.md, as the page has it: its times, its figures and its pictures.

    python benchmarks/tutorial.py --work /tmp/tutorial [--out benchmarks/results/tutorial-2-cores.csv] [--pictures]

400 generated photographs (support/photographs.py), one thread. Seconds are of the processor, since others may use the
machine; `wall` holds the clock's. Stopped, it goes on: a command that is done is not given again. `--pictures` writes
docs/tutorial/*.png, the report's by chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE / "tests" / "support"), str(HERE / "benchmarks")]

from PIL import Image  # noqa: E402

from pages import DOCS, commands  # noqa: E402
from photographs import CLASSES, write_photographs  # noqa: E402
from records import scores_of, write_record  # noqa: E402

SHOWN = 8  # photographs of a class in the picture of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    if not (work / "photos").exists():
        write_photographs(work / "photos")
    record = {
        "command": " ".join(["python benchmarks/tutorial.py", *sys.argv[1:]]),
        "commands": [given(words, work) for words in commands(DOCS / "tutorial.md") if words[0] != "run"],
        **figures(work / "runs" / "photos"),
    }
    print(json.dumps(record, indent=1))
    if arguments.out is not None:
        write_record(arguments.out, record)
    if arguments.pictures:
        paint(work, DOCS / "tutorial")


def given(words: list[str], work: Path) -> dict[str, Any]:
    """Give a command, unless it was given before; how long it took."""
    line = f"atoll {' '.join(words)}"
    ledger = work / "given.json"
    before = json.loads(ledger.read_text()) if ledger.exists() else {}
    if line not in before:
        print(line, file=sys.stderr, flush=True)
        environment = {**os.environ, "PYTHONPATH": str(HERE / "src"), "OMP_NUM_THREADS": "1"}
        began, used = time.monotonic(), processor_seconds()
        command = [sys.executable, "-m", "atoll", *words]
        process = subprocess.run(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if process.returncode != 0:
            raise SystemExit(f"failed: {line}")
        times = {"seconds": round(processor_seconds() - used, 1), "wall": round(time.monotonic() - began, 1)}
        before[line] = times | {"told": process.stdout.splitlines()}
        ledger.write_text(json.dumps(before, indent=1))
    return {"command": line, **before[line]}


def processor_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(run: Path) -> dict[str, Any]:
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    return {
        "samples": evaluation["plan"]["count"],
        "chance": evaluation["chance"],
        "configurations": scores_of(evaluation, "class_accuracy", "fd"),
    }


def paint(work: Path, folder: Path) -> None:
    """The page's pictures: photographs, the sheet of samples, the head of the report."""
    tile, gap = 48, 2
    sheet = Image.new("RGB", (SHOWN * (tile + gap), len(CLASSES) * (tile + gap)), "white")
    for row, name in enumerate(CLASSES):
        for column in range(SHOWN):
            picture = Image.open(work / "photos" / name / f"{column:04d}.jpg").resize((tile, tile))
            sheet.paste(picture, (column * (tile + gap), row * (tile + gap)))
    sheet.save(folder / "photographs.png")
    painted = Image.open(work / "pictures" / "sheet.png")
    painted.save(folder / "sheet.png", optimize=True)
    report = (work / "runs" / "photos" / "report.html").as_uri()
    shot = folder / "report.png"
    command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}"]
    subprocess.run([*command, "--window-size=1080,1010", report], check=True, capture_output=True)
    Image.open(shot).convert("P", palette=Image.Palette.ADAPTIVE).save(shot, optimize=True)


if __name__ == "__main__":
    main()
