"""How to sample, on the command line: one option per field of `Sampling`, made from the field itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from ..ensemble.routes import parse_route
from ..sampling import Sampling

NAME = "sampling"  # the parameter of a verb that takes them all

# where the experts go, which makes no other images but for int8
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, mps, or several: cuda:0,cuda:1; default: cuda if there is one")
]
Memory = Annotated[
    str | None, typer.Option(help="What experts may take of a device: 12GB; default: what is free on a GPU")
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads (default: as many as torch takes, that is one per core)", min=1)
]
Weights = Annotated[str | None, typer.Option(help="int8: half the memory of bfloat16, slightly other images")]


def sampling_options(*, own: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of `Sampling` in the place of its parameter `sampling`, which gets the object.

    Those in `own` are left out: the verb has another way to ask for them.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        types = get_type_hints(Sampling)
        offered = [parameter(each, types[each.name]) for each in fields(Sampling) if each.name not in own]

        @wraps(verb)
        def run(**given: Any) -> None:
            sampling = Sampling(**{each.name: given.pop(each.name) for each in offered})
            if sampling.route is not None:
                parse_route(sampling.route)  # a name that means nothing is better known before the model is loaded
            verb(**given, **{NAME: sampling})

        signature = inspect.signature(verb, eval_str=True)
        taken = [
            other
            for one in signature.parameters.values()
            for other in (offered if one.name == NAME else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)])
        ]
        # typer reads both
        run.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in taken}
        return run

    return decorate


def parameter(of: Field[Any], kind: Any) -> inspect.Parameter:
    """A field as an option: its name, type, default and help."""
    annotation = Annotated[kind, typer.Option(help=of.metadata["help"], rich_help_panel="How to sample")]
    return inspect.Parameter(of.name, inspect.Parameter.KEYWORD_ONLY, default=of.default, annotation=annotation)
