"""The command line: one file per command, loaded when it is given, so that `atoll --help` need not wait for torch."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..artifacts import AtollWarning, UserError, storage_problem, suggest
from ..training import StopRequested

# command -> (who uses it, what it does); its module and function have its name
COMMANDS = {
    "demo": ("Start here", "Train eight experts on handwritten digits, in two minutes."),
    "run": ("Start here", "Turn a folder of images into a model and its report, on this machine."),
    "status": ("Start here", "Show what a run has and what is missing."),
    "prepare": ("Organizer", "Turn images into latents, features and an index."),
    "partition": ("Organizer", "Split the data into clusters, one per expert."),
    "plan": ("Organizer", "Write one work order per cluster."),
    "publish": ("Organizer", "Copy the work orders to where contributors read."),
    "admit": ("Organizer", "Check contributed experts and add them to the model."),
    "router": ("Organizer", "Train the router that weights the experts."),
    "ensemble": ("Organizer", "Show, change or roll back the versions of the model."),
    "evaluate": ("Organizer", "Compare sampling settings on the same prompts and noise."),
    "distill": ("Organizer", "Train one dense network on the predictions of all experts."),
    "export": ("Organizer", "Write the model as a diffusers folder that needs no atoll."),
    "join": ("Contributor", "Take a published order, train it, sign it and send it."),
    "train": ("Contributor", "Train the expert of one work order."),
    "sample": ("User", "Generate images from a prompt."),
    "describe": ("Researcher", "Print what an architecture costs to train."),
    "convert": ("Researcher", "Turn a foreign checkpoint into an expert."),
}
# packages of extras that commands import
EXTRAS = {"faiss": "organizer", "matplotlib": "organizer", "pyarrow": "organizer", "sklearn": "organizer"}
EXTRAS |= {"s3fs": "s3", "tensorboard": "tensorboard", "torchao": "torchao"}
FIXABLE = (errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
# the base of typer's errors about options; its module differs between versions of typer
UsageError: Any = typer.BadParameter.__mro__[1]


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an Exception, so that no `except Exception` continues from here."""


class Commands(TyperGroup):
    """The commands of the table; the module of one is imported when it is given."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        panel, line = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=line, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            raise UserError(f"no such command {args[0]!r}: {suggest(args[0], list(COMMANDS))}")
        return args[0], command_of(args[0]), args[1:]


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True, no_args_is_help=True)
def atoll(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Train one diffusion model on isolated machines.

    Start with `atoll demo`, then `atoll sample runs/demo --prompt "a handwritten three"`.
    `atoll COMMAND --help` shows options and examples.
    """
    if version:
        typer.echo(f"atoll {__version__}")


def command_of(name: str) -> Any:
    """A command with its options, as typer's own object."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    single.command(name)(getattr(importlib.import_module(f".{name}", __name__), name))
    command: Any = typer.main.get_command(single)
    for option in command.params:  # typer writes the Python types of flags and lists
        if not option.metavar and (getattr(option, "is_flag", False) or getattr(option, "multiple", False)):
            option.metavar = "" if option.is_flag else "<text>"
    return command


def main(arguments: list[str] | None = None) -> None:
    """Run a command. A mistake of the user is one line on standard error and exit code 2, a stop is exit code 130."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    try:
        with interruptible(), warnings.catch_warnings():
            warnings.simplefilter("default", AtollWarning)
            warnings.showwarning = print_warning
            app(arguments or ["--help"], prog_name="atoll", standalone_mode=False)
    except (Interrupted, StopRequested) as stop:
        fail(str(stop), 130)
    except UserError as error:
        fail(str(error), 2)
    except UsageError as error:
        fail(f"{error.format_message()} (see `atoll {name} --help`)", 2)
    except Exception as error:
        if (message := explain_failure(error, name, [word for word in arguments if "://" in word])) is None:
            raise
        fail(message, 2)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first Ctrl-C or SIGTERM; later ones do not disturb the cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot receive signals
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted("Interrupted. Run the same command again.")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_warning(message: Warning | str, *where: object, **more: object) -> None:
    """One line, without the place in the code."""
    typer.echo(f"atoll: {' '.join(str(message).split())}", err=True)


def explain_failure(error: Exception, command: str, urls: list[str]) -> str | None:
    """One line for what the user can mend: a missing extra, a full disk, a store out of reach; None for a bug."""
    for cause in (error, error.__cause__):  # fsspec wraps the error for s3fs
        if isinstance(cause, ModuleNotFoundError) and cause.name in EXTRAS:
            return f"{command}: needs {cause.name}: pip install 'atoll-diffusion[{EXTRAS[cause.name]}]'"
    place = getattr(error, "filename", None)
    if (problem := storage_problem(error)) is not None:
        return f"{place or ', '.join(urls) or command}: {problem}"
    if isinstance(error, OSError) and error.errno in FIXABLE:
        return f"{place or 'the output'}: {str(error.strerror).lower()}; fix it and run the same command again"
    return None


def fail(message: str, code: int) -> NoReturn:
    typer.echo(f"atoll: {message}", err=True)
    sys.exit(code)
