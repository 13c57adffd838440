"""Options and settings: a TOML file, then options, then `--set a.b=c`, laid over a stage's own model.

An option is a setting that has a flag of its own: its type, default and help are the field's. A new one is a field of
the stage's model, reachable by `--set` at once; its name in the command's `@with_settings` gives it a flag.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.table import Table

from ..artifacts import UserError, explain
from ..plugins import load_plugins
from ..training.recipe import Training
from .progress import console

Model = TypeVar("Model")
NAME = "settings"  # the parameter of a command that takes them


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise typer.BadParameter(f"{text}: no such file")
    return path


def local_folder(text: str) -> Path:
    if "://" in text or Path(text).is_file():
        raise UserError(f"--out {text}: give a local folder; send the finished one where it belongs")
    return Path(text)


def load(paths: list[str]) -> list[str]:
    load_plugins(dict.fromkeys(paths, None))
    return paths


# options of several commands
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. (default: cuda if there is one)")]
Devices = Annotated[str | None, typer.Option(help="As --device of train, or several: cuda:0,cuda:1.")]
Memory = Annotated[str | None, typer.Option(help="GPU memory to stay within: 24GB. (default: what is free)")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. [default: one per core]", min=1)]
Weights = Annotated[str | None, typer.Option(help="int8: half the memory of bfloat16, slightly other images.")]
WorkFolder = Annotated[
    Path,
    typer.Option(
        "--out", help="Folder to write; work in progress is in its state/.", parser=local_folder, metavar="<folder>"
    ),
]
CheckpointSeconds = Annotated[float | None, typer.Option(help="Time between checkpoints. (default: 60 or more)")]
Tensorboard = Annotated[str | None, typer.Option(help="Folder for TensorBoard: loss, validation loss, images/s.")]
Engine = Annotated[str, typer.Option(help="local, or ray: machines that share the folders.")]
RayAddress = Annotated[str | None, typer.Option(help="A running Ray cluster. (default: this machine)")]
Plugins = Annotated[
    list[str], typer.Option("--plugin", callback=load, help="Python file that adds a source or clustering method.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
# every command with settings has these
FILE = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings.", parser=existing_file, metavar="<file>")
]
SET = Annotated[list[str], typer.Option("--set", help="Any other setting: --set a.b=c. Repeatable.")]
SHOW = Annotated[bool, typer.Option("--print-config", help="Print every setting and its meaning; do nothing.")]


@dataclass(frozen=True)
class Settings:
    """What the user sets, as one nested table."""

    changes: dict[str, Any] = field(default_factory=dict)
    print_only: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)  # setting -> the option that set it

    @property
    def names(self) -> set[str]:
        """`a.b` of everything that is set."""
        return {name for name, _ in names_in(self.changes)}

    @property
    def words(self) -> list[str]:
        """The same as `a.b=c`, for --set of another command."""
        return [f"{name}={'none' if value is None else value}" for name, value in names_in(self.changes)]

    def part(self, name: str) -> dict[str, Any]:
        """The settings of one table, such as `execution`."""
        return dict(self.changes.get(name, {}))

    def without(self, name: str) -> Settings:
        return replace(self, changes={key: value for key, value in self.changes.items() if key != name})

    def over(self, base: Model) -> Model:
        """`base` with what the user sets. What neither sets is left to the model, whose defaults may depend on it."""
        adapter = TypeAdapter(type(base))
        values = merge(adapter.dump_python(base), self.changes)
        if isinstance(base, BaseModel):
            values = {
                name: value for name, value in values.items() if name in base.model_fields_set | set(self.changes)
            }
        try:
            return adapter.validate_python(values)
        except ValidationError as error:
            name, _, message = explain(error).partition(": ")
            hint = near_names(error, known_names(base)) or "correct it"
            raise UserError(f"{self.flags.get(name, name)}: {message}; {hint}") from error

    def keep_shares(self, base: Training, now: Training) -> Training:
        """Scale warm-up and average with a changed budget, except where they are set themselves."""
        kept = {name.removeprefix("training.") for name in self.names}
        scaled = base.over(now.images, kept)
        return now.model_copy(update={n: getattr(scaled, n) for n in {"warmup_images", "ema_images"} - kept})

    def show(self, settings: object, title: str) -> None:
        """With --print-config: print all settings and end the command."""
        if self.print_only:
            console.print(settings_table(settings, title))
            raise typer.Exit


def with_settings(model: type, *paths: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for some settings of a model, in the place of its parameter `settings`.

    A path is `a.b`, or `a.b -x` for one that has a short option too; `*` stands for all fields.
    """
    wanted = [each.name for each in fields(model)] if paths == ("*",) else list(paths)
    offered = {path.split()[0]: option_of(model, *path.split()) for path in wanted}
    usual = [parameter("config", FILE, None), parameter("set_", SET, []), parameter("print_config", SHOW, False)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            file, texts, print_only = (given.pop(each.name) for each in usual)
            changes = {} if file is None else read_toml(file)
            flags = {}
            for path, (option, is_number) in offered.items():
                if (value := given.pop(option.name)) is not None:
                    changes = merge(changes, nested(path, parse_value(value) if is_number else value))
                    flags[path] = flag_of(path)
            for text in texts:
                changes = merge(changes, parse_setting(text))
            command(**given, **{NAME: Settings(changes, print_only, flags)})

        signature = inspect.signature(command, eval_str=True)
        taken = [
            other
            for one in signature.parameters.values()
            for other in (
                [*(option for option, _ in offered.values()), *usual]
                if one.name == NAME
                else [one.replace(kind=one.KEYWORD_ONLY)]
            )
        ]
        run.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in taken}
        return run

    return decorate


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_of(model: Any, path: str, *short: str) -> tuple[inspect.Parameter, bool]:
    """The setting at `path` as an option, None where it is not given; and whether it is a number, read as in --set."""
    *tables, name = path.split(".")
    for table in tables:
        model = get_type_hints(model)[table]
    kind, (default, meaning) = get_type_hints(model)[name], about(model)[name]
    choices = [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
    is_number = kind in (int, float, int | None, float | None)
    metavar = "<number>" if is_number else f"<{'|'.join(choices)}>" if choices else None
    shown = meaning if default is None else f"{meaning} (default: {default})"
    option: Any = typer.Option(flag_of(path), *short, help=shown, metavar=metavar)
    read_as: Any = str if metavar else kind
    return parameter(name, Annotated[read_as | None, option], None), is_number


def flag_of(path: str) -> str:
    """`source.image_column` -> `--image-column`."""
    return f"--{path.rpartition('.')[2].replace('_', '-')}"


def about(model: Any) -> dict[str, tuple[Any, str]]:
    """(default, meaning) of every field of a pydantic model or a dataclass."""
    if is_dataclass(model):
        return {
            f.name: (None if f.default is MISSING else f.default, f.metadata.get("help", "")) for f in fields(model)
        }
    known = model.model_fields.items()
    return {n: (None if f.is_required() else f.default, f.description or "") for n, f in known}


def near_names(error: ValidationError, known: Sequence[str]) -> str | None:
    """For a name that does not exist, those that may be meant: `did you mean training.batch?`"""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    # without the class of a union, such as logit-normal in objective.density.logit-normal.mean
    wrong = ".".join(part for n, part in enumerate(place) if f"{'.'.join(place[:n])}.name" not in known)
    if first["type"] == "missing":  # `objectives.flw.kind` begins a table that has nothing else
        wrong = wrong.rpartition(".")[0]
        known = sorted({name.rpartition(".")[0] for name in known} - {wrong, ""})
        if any(name.startswith(wrong) for name in known):
            return None
    elif first["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        return None
    elif isinstance(first.get("input"), Mapping):  # the whole table is unknown: `trunk.width` is meant by its end
        wrong = next((f"{wrong}.{below}" for below, _ in names_in(first["input"])), wrong)
    table, _, last = wrong.rpartition(".")
    ends = get_close_matches(last, {name.rpartition(".")[2] for name in known}, cutoff=0.7)
    alike = get_close_matches(wrong, known, cutoff=0.7) + [name for name in known if name.rpartition(".")[2] in ends]
    if alike:
        return f"did you mean {' or '.join(list(dict.fromkeys(alike))[:4])}?"
    there = [name for name in known if table and name.rpartition(".")[0] == table]
    return f"there are {', '.join(there or dict.fromkeys(re.sub(r'[.].*', '.*', name) for name in known))}"


def known_names(settings: Any) -> list[str]:
    return [name for name, _ in names_in(TypeAdapter(type(settings)).dump_python(settings))]


def names_in(table: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    """(`a.b`, value) of everything a nested table sets."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from names_in(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value


def settings_table(settings: Any, title: str) -> Table:
    """One line per setting: name, value, meaning; groups are set apart."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("meaning", style="dim")
    group = ""
    for name, value, meaning in described(settings):
        if group and group != name.partition(".")[0]:
            table.add_row()
        group = name.partition(".")[0]
        table.add_row(name, format_value(value), meaning)
    return table


def format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def described(settings: Any, below: str = "", meaning: str = "") -> Iterator[tuple[str, Any, str]]:
    """(name, value, meaning) of every setting; one without a meaning has that of its table."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from described(value, f"{below}{name}.", meaning)
    elif isinstance(settings, BaseModel) or is_dataclass(settings):
        for name, (_, help) in about(type(settings)).items():
            yield from described(getattr(settings, name), f"{below}{name}.", help or meaning)
    else:
        yield below.removesuffix("."), getattr(settings, "value", settings), meaning


def parse_setting(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested table."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: write it as name=value, such as --set training.batch=32")
    return nested(name, parse_value(value))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not valid TOML ({error})") from error


def parse_value(text: str) -> Any:
    """A TOML value, `none`, a count such as `500k` or `1.5M`, or else the text as it stands."""
    if text == "none":
        return None
    if (found := re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)([kKmMbB]?)", text)) and (found[2] or "," in text):
        count = (
            float(found[1].replace("_", "").replace(",", "")) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[found[2].lower()]
        )
        return round(count) if abs(count - round(count)) < 1e-6 else count
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def nested(name: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def merge(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, tables merged.

    A table of another kind (`density.name`: uniform instead of logit-normal) keeps nothing of the old one.
    """
    merged = dict(old) if new.get("name", old.get("name")) == old.get("name") else {}
    for name, value in new.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return merged
