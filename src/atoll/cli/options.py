"""Options and settings: a TOML file, then options, then `--set a.b=c`, laid over a stage's own model.

An option that is a field of a stage's model has the field's type, default and help; its name in `@with_settings` is all
that a command writes. Every other field is reachable by --set.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import reduce, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError

from ..artifacts import UserError, explain
from ..plugins import load_plugins
from ..training.resources import parse_memory
from .tables import print_line

Model = TypeVar("Model")
SETTING_WIDTH = 44
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "missing")  # errors that a misspelled name leads to


def local_folder(place: str | Path) -> Path:  # typer parses defaults, too
    if "://" in str(place) or Path(place).is_file():
        raise UserError(f"--out {place}: give a local folder; send the finished one where it belongs")
    return Path(place)


def load(paths: list[str]) -> list[str]:
    load_plugins(dict.fromkeys(paths, None))
    return paths


def file_option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, metavar="<file>")


# options of several commands
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. (default: cuda if there is one)")]
Devices = Annotated[str | None, typer.Option(help="As --device of train, or several: cuda:0,cuda:1.")]
Memory = Annotated[str | None, typer.Option(help="GPU memory to stay within: 24GB. (default: what is free)")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. (default: one per core)", min=1)]
Weights = Annotated[str | None, typer.Option(help="int8: half the memory of bfloat16, slightly other images.")]
OUT: Any = typer.Option(
    "--out", help="Folder to write; work in progress is in its state/.", parser=local_folder, metavar="<folder>"
)
WorkFolder = Annotated[Path, OUT]
CheckpointSeconds = Annotated[float | None, typer.Option(help="Time between checkpoints. (default: 60 or more)")]
Tensorboard = Annotated[str | None, typer.Option(help="Folder for TensorBoard: loss, validation loss, images/s.")]
Engine = Annotated[str, typer.Option(help="local, or ray: machines that share the folders.")]
RayAddress = Annotated[str | None, typer.Option(help="A running Ray cluster. (default: this machine)")]
PLUGIN: Any = typer.Option("--plugin", callback=load, help="Python file that adds a source or clustering method.")
Plugins = Annotated[list[str], PLUGIN]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]


def parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


# every command with settings has these
CONFIG = parameter("config", Path | None, None, file_option("TOML file with settings.", "--config"))
SET = parameter("set_", list[str], [], typer.Option("--set", help="Any other setting: --set a.b=c. Repeatable."))
PRINT: Any = typer.Option("--print-config", help="Print all settings as a file for --config; do nothing.")
SHOW = parameter("print_config", bool, False, PRINT)


def gib(memory: str | None) -> float | None:
    """`--memory 24GB` in GiB."""
    return None if memory is None else parse_memory(memory)


def refuse(options: Mapping[str, object], other: str) -> None:
    """Refuse options that have no effect with another one."""
    if given := [name for name, value in options.items() if value is not None and value is not False]:
        raise UserError(f"{given[0]}: has no meaning with {other}; leave it out")


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
        whole = adapter.dump_python(base)
        values = merge(whole, self.changes)
        known = [name for name, _ in names_in(whole)]
        if is_dataclass(base) and (unknown := sorted(set(self.changes) - set(whole))):  # pydantic would ignore it
            raise UserError(f"--set {unknown[0]}: no such setting; {self.hint(known)}")
        if isinstance(base, BaseModel):
            values = {name: values[name] for name in values if name in base.model_fields_set | set(self.changes)}
        try:
            return adapter.validate_python(values)
        except ValidationError as error:
            name, _, message = explain(error).partition(": ")
            misspelled = error.errors(include_url=False)[0]["type"] in UNKNOWN
            hint = self.hint(known) if misspelled else None
            raise UserError(f"{self.flags.get(name, name)}: {message}; {hint or 'correct it'}") from error

    def over_plan(self, base: Any) -> Any:
        """The same for a plan: warm-up and average keep their fraction of another budget, unless they are set too."""
        now, kept = self.over(base), {name.removeprefix("training.") for name in self.names}
        scaled = base.training.over(now.training.images, kept)
        update = {name: getattr(scaled, name) for name in {"warmup_images", "ema_images"} - kept}
        return now.model_copy(update={"training": now.training.model_copy(update=update)})

    def hint(self, known: list[str]) -> str | None:
        """For a name that does not exist, those that may be meant: `did you mean training.batch?`"""
        for wrong in sorted(self.names - set(known)):
            same_end = [name for name in known if name.endswith(f".{wrong.rpartition('.')[2]}")]
            if near := get_close_matches(wrong, known, cutoff=0.8) or same_end:
                return f"did you mean {' or '.join(near)}?"
            return f"there are {', '.join(dict.fromkeys(re.sub('[.].*', '.*', name) for name in known))}"
        return None

    def show(self, settings: object, title: str) -> None:
        """With --print-config: print all settings as a TOML file with their meanings, and end the command."""
        if self.print_only:
            print_line(f"# {title}")
            for name, value, meaning in described(settings):
                line = f"{name} = {json.dumps(value)}" if value is not None else f"# {name} = none"
                print_line(f"{line:<{SETTING_WIDTH}}  # {meaning}")
            raise typer.Exit


def with_settings(model: Any, *paths: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for some settings of a model, in the place of its parameter `settings`.

    A path is `a.b`, or `a.b -x` for one that has a short option too; `*` stands for all fields.
    """
    wanted = about(model) if paths == ("*",) else paths
    offered = {path.split()[0]: option_of(model, *path.split()) for path in wanted}
    added = [*(option for option, _ in offered.values()), CONFIG, SET, SHOW]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            file, texts, print_only = (given.pop(each.name) for each in (CONFIG, SET, SHOW))
            values = {path: given.pop(option.name) for path, (option, _) in offered.items()}
            values = {path: value for path, value in values.items() if value is not None}
            options = [nested(path, parse_value(v) if offered[path][1] else v) for path, v in values.items()]
            tables = [{} if file is None else read_toml(file), *options, *map(parse_setting, texts)]
            flags = {path: flag_of(path) for path in values}
            command(**given, settings=Settings(reduce(merge, tables), print_only, flags))

        own = list(inspect.signature(command, eval_str=True).parameters.values())
        place = next(n for n, each in enumerate(own) if each.name == "settings")
        own[place : place + 1] = added
        taken = [each.replace(kind=each.KEYWORD_ONLY) for each in own]
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in taken}
        return run

    return decorate


def option_of(model: Any, path: str, *short: str) -> tuple[inspect.Parameter, bool]:
    """The setting at `path` as an option, None where it is not given; and whether it is a number, read as in --set."""
    *tables, name = path.split(".")
    for each in tables:
        model = get_type_hints(model)[each]
    kind, (default, meaning) = get_type_hints(model)[name], about(model)[name]
    choices = [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
    is_number = kind in (int, float, int | None, float | None)
    metavar = "<number>" if is_number else f"<{'|'.join(choices)}>" if choices else None
    shown = meaning.replace("None:", "none:") + ("" if default is None else f" (default: {default})")
    option = typer.Option(flag_of(path), *short, help=shown, metavar=metavar)
    return parameter(name, (str if metavar else kind) | None, None, option), is_number


def flag_of(path: str) -> str:
    """`source.image_column` -> `--image-column`."""
    return f"--{path.rpartition('.')[2].replace('_', '-')}"


def about(model: Any) -> dict[str, tuple[Any, str]]:
    """(default, meaning) of every field of a pydantic model or a dataclass."""
    if is_dataclass(model):
        every = fields(model)
        return {f.name: (None if f.default is MISSING else f.default, f.metadata.get("help", "")) for f in every}
    known = model.model_fields.items()
    return {name: (None if f.is_required() else f.default, f.description or "") for name, f in known}


def names_in(table: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    """(`a.b`, value) of everything a nested table sets."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from names_in(value, f"{below}{name}.")
        else:
            yield f"{below}{name}", value


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


def read_text(option: str, path: Path) -> str:
    """The text of a file that an option names."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{option} {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: not a text file in UTF-8 ({error})") from error


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text("--config", path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--config {path}: not valid TOML ({error})") from error


def parse_value(text: str) -> Any:
    """A TOML value, `none`, a count such as `500k` or `1.5M`, or else the text as it stands."""
    if text == "none":
        return None
    if (found := re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)([kKmMbB]?)", text)) and (found[2] or "," in text):
        scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[found[2].lower()]
        count = float(re.sub("[_,]", "", found[1])) * scale
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
