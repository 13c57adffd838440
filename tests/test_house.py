"""`make house`: lines, code and docstrings are counted apart, and every file once."""

from __future__ import annotations

import runpy
from pathlib import Path

HOUSE = runpy.run_path(str(Path(__file__).resolve().parents[1] / "tools" / "house.py"))
TEXT = '''"""Two lines
of docstring."""

# a comment
def f(x):
    """One."""
    return (x,  # code and comment
            """not a
docstring""")
'''


def test_every_line_is_counted_once() -> None:
    assert HOUSE["count"](TEXT) == (9, 3, 4)
    rows = {line[:20].strip(): [part.replace(",", "") for part in line[20:].split()] for line in HOUSE["table"]()}
    for column in (1, 3):  # lines and code now
        assert sum(int(rows[name][column]) for name in HOUSE["LIMITS"]) == int(rows["all of src"][column])
    assert int(rows["pipeline, cli, API"][1]) > 1000
