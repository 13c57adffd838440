"""The option --plugin, of the commands that open a source or choose a clustering method."""

from __future__ import annotations

from typing import Annotated

import typer

from ..plugins import load_plugins


def load(paths: list[str] | None) -> list[str]:
    load_plugins(dict.fromkeys(paths or (), None))
    return paths or []


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        callback=load,
        help="A Python file of yours that adds a source or a clustering method (docs/extend.md); repeat it",
    ),
]
