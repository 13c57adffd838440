"""The command line: one file per verb, each of which parses, calls and prints.

Verbs are imported when they are asked for: torch takes seconds to load, and `atoll --help` should not.
"""

from __future__ import annotations

import importlib
import sys

import click
import typer

from ..artifacts import UserError

# verb -> (who uses it, what it does in one line); its module has its name
VERBS: dict[str, tuple[str, str]] = {
    "demo": ("Start here", "The whole pipeline on handwritten digits, in about three minutes."),
    "status": ("Start here", "What a run has, and what is missing."),
    "prepare": ("Organiser", "Turn images into normalised latents, features and an index."),
    "partition": ("Organiser", "Cut the data into clusters, one per expert."),
    "plan": ("Organiser", "Write one work order per cluster."),
    "admit": ("Organiser", "Check an expert that came back, and let it into the ensemble."),
    "router": ("Organiser", "Train the router that fuses the experts."),
    "evaluate": ("Organiser", "Sample every way to run the model, and measure them alike."),
    "train": ("Contributor", "Train the expert one order asks for."),
    "sample": ("User", "Paint images from a prompt."),
    "describe": ("Researcher", "What an architecture costs, before anything is trained."),
    "convert": ("Researcher", "Turn somebody's checkpoint into an expert."),
    "export": ("Researcher", "Turn an expert into a diffusers folder."),
}


class Verbs(click.Group):
    """A group whose commands are loaded by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f".{name}", __name__)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        app.command(name, no_args_is_help=False)(getattr(module, name))
        command: click.Command = typer.main.get_command(app)
        command.name = name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for who in dict.fromkeys(who for who, _ in VERBS.values()):
            with formatter.section(who):
                formatter.write_dl([(name, line) for name, (user, line) in VERBS.items() if user == who])


HELP = """Train one diffusion model on islands of compute that never talk to each other.

\b
  atoll demo                                             see it work
  atoll sample runs/demo --prompt "a handwritten three"  paint with it
  atoll VERB --help                                      options and examples of one verb
"""


@click.group(cls=Verbs, help=HELP, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(package_name="atoll-diffusion", prog_name="atoll")
def root() -> None:
    pass


def main() -> None:
    """Run a verb; a user's mistake is one line on standard error and exit code 2."""
    try:
        root.main(prog_name="atoll", standalone_mode=False)
    except UserError as error:
        fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "atoll"
        fail(f"{error.format_message()} (see `{where} --help`)", 2)
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted; run the same command to go on", 130)
    except Exception as error:
        from ..training.stopping import StopRequested

        if not isinstance(error, StopRequested):
            raise
        fail(str(error), 143)


def fail(message: str, code: int) -> None:
    click.echo(f"atoll: {message}", err=True)
    sys.exit(code)
