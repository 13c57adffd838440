"""The command line: one file per verb, each of which parses, calls and prints.

Verbs are imported when they are asked for: torch takes seconds to load, and `atoll --help` should not.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from .. import __version__
from ..artifacts import AtollWarning, UserError
from ..artifacts.credentials import credentials_missing
from .stopping import Stopped, stoppable

# verb -> (who uses it, what it does in one line); its module has its name
VERBS: dict[str, tuple[str, str]] = {
    "demo": ("Start here", "The whole pipeline on handwritten digits, in two minutes."),
    "run": ("Start here", "From a folder of pictures to a model and its report, on this machine."),
    "status": ("Start here", "What a run has, and what is missing."),
    "prepare": ("Organizer", "Turn images into normalized latents, features and an index."),
    "partition": ("Organizer", "Cut the data into clusters, one per expert."),
    "plan": ("Organizer", "Write one work order per cluster."),
    "publish": ("Organizer", "Put the orders where contributors can take them."),
    "admit": ("Organizer", "Check an expert that came back, and let it into the ensemble."),
    "router": ("Organizer", "Train the router that fuses the experts."),
    "ensemble": ("Organizer", "What the model consists of and how it came about; change it, or go back."),
    "evaluate": ("Organizer", "Sample every way to run the model, and measure them alike."),
    "distill": ("Organizer", "Train one dense network to answer as all experts together."),
    "export": ("Organizer", "Write a model as a diffusers folder that needs no atoll."),
    "join": ("Contributor", "Take an order, train it, sign it and send it."),
    "train": ("Contributor", "Train the expert one order asks for."),
    "sample": ("User", "Paint images from a prompt."),
    "describe": ("Researcher", "What an architecture costs, before anything is trained."),
    "convert": ("Researcher", "Turn somebody's checkpoint into an expert."),
}

# package -> the extra it comes with, for those that verbs import as if they were there
EXTRAS = {
    "faiss": "organizer",
    "matplotlib": "organizer",
    "pyarrow": "organizer",
    "sklearn": "organizer",
    "s3fs": "s3",
    "tensorboard": "tensorboard",
    "torchao": "torchao",
}

# what typer raises for a wrong option; its place has moved between versions, its kin has not
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(arguments: list[str] | None = None) -> None:
    """Run a verb; a user's mistake is one line on standard error and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_help()
    elif arguments[0] == "--version":
        typer.echo(f"atoll {__version__}")
    elif arguments[0] in VERBS:
        run_verb(arguments[0], arguments[1:])
    else:
        close = difflib.get_close_matches(arguments[0], VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(VERBS)}"
        fail(f"no such verb {arguments[0]!r}: {hint}", 2)


def run_verb(verb: str, arguments: list[str]) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    try:
        with stoppable():
            module = importlib.import_module(f".{verb}", __name__)
            app.command()(getattr(module, verb))
            with notices_in_a_line():
                app(arguments, prog_name=f"atoll {verb}", standalone_mode=False)
    except Stopped as stopped:
        fail(stopped.said(verb), stopped.exit_code)
    except UserError as error:
        fail(str(error), 2)
    except UsageError as error:
        fail(f"{error.format_message()} (see `atoll {verb} --help`)", 2)  # type: ignore[attr-defined]
    except ImportError as error:
        fail(f"{verb}: {explain_missing_package(error)}", 2)
    except OSError as error:
        fail(explain_os_error(error), 2)
    except Exception as error:
        from ..training.stopping import StopRequested

        if (missing := credentials_missing(error)) is not None:
            fail(f"{', '.join(a for a in arguments if '://' in a) or verb}: {missing}", 2)
        if not isinstance(error, StopRequested):
            raise
        fail(str(error), 128 + error.signal)


@contextmanager
def notices_in_a_line() -> Iterator[None]:
    """A notice looks like an error: one line, without the place in our code that it comes from."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", AtollWarning)
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, AtollWarning):
                typer.echo(f"atoll: {message}", err=True)
            else:
                as_usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def explain_missing_package(error: ImportError) -> str:
    """One line for a package of an extra that is not installed; anything else that cannot be imported is our bug."""
    for met in (error, error.__cause__):  # fsspec tells in its own words that s3fs is missing
        if isinstance(met, ModuleNotFoundError) and met.name in EXTRAS:
            return f"needs {met.name}: pip install 'atoll-diffusion[{EXTRAS[met.name]}]'"
    raise error


def explain_os_error(error: OSError) -> str:
    """One line for what the user's disk or permissions will not allow; anything else is our bug."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    mendable = (*full, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
    if error.errno not in mendable:
        raise error
    place = error.filename or "the output"
    return f"{place}: {(error.strerror or 'cannot be used').lower()}; mend that and run the same command again"


def print_help() -> None:
    """Who uses which verb, and two commands to start with."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("Train one diffusion model on islands of compute that never talk to each other.\n")
    console.print("  [bold]atoll demo[/bold]                                             see it work")
    console.print('  [bold]atoll sample runs/demo --prompt "a handwritten three"[/bold]  paint with it')
    console.print("  [bold]atoll VERB --help[/bold]                                      its options, with examples\n")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    last = ""
    for verb, (who, line) in VERBS.items():
        table.add_row(f"[dim]{who if who != last else ''}[/dim]", f"[bold]{verb}[/bold]", line)
        last = who
    console.print(table)


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"atoll: {message}", err=True)
    sys.exit(code)
