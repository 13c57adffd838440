"""How to train, on the command line: what the verbs that train have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; default: cuda if there is one")]
Memory = Annotated[
    str | None, typer.Option(help="Stay within this much of a GPU's memory: 24GB; default: what is free")
]
CheckpointSeconds = Annotated[
    float | None, typer.Option(help="Save the state this often; default: 60, more for large networks")
]
SettingsOnly = Annotated[
    bool, typer.Option("--settings", help="Show every setting, its value and its meaning; train nothing")
]
