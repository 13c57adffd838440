"""Our sources as one file that runs without atoll.

A diffusers folder brings its own code. That code is not written a second time: a bundle starts from every definition
of pipeline.py and follows the names each one uses, through our imports, to the definitions behind them. Those, and no
others, are copied in an order in which they can run, as they stand, comments and all. Imports between our modules go;
imports from outside must be on a short list: a machine that loads the folder has diffusers only.

It is one file because that is all diffusers takes from a hub: for a component with weights, its weights, its config and
the one file that its class is in. Everything lands in one namespace, so no two modules may define the same name.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from .. import __version__
from ..artifacts import sha256_bytes

PACKAGE = Path(__file__).resolve().parents[1]
START = "atoll.convert.pipeline"
OUTSIDE = {"torch", "numpy", "safetensors", "diffusers"} | sys.stdlib_module_names

# modules that stay behind, and what stands for them
LEFT_BEHIND = {
    "atoll.kernels": '''
class NoKernels:
    """Triton kernels stay with atoll: every check for one returns False, so the plain formulas are used."""

    def __getattr__(self, name):
        return lambda *sizes: False


kernels = NoKernels()
'''
}

HEADER = '''"""The code of an Atoll model: its networks, the maths between them, and the pipeline.

Built by atoll {version} out of its own sources, one section per file: mend it there, not here. It imports nothing of
atoll. License: Apache-2.0.
"""

from __future__ import annotations

'''

CLOSING = '''

# ---- this model
from diffusers import DiffusionPipeline


class AtollPipeline(PipelineMethods, DiffusionPipeline):
    """The model: `pipe(prompt, num_inference_steps=50, guidance_scale=2.0)`, with `route="top-2"` for an ensemble."""

    _optional_components = ["vae", "text_encoder", "tokenizer", "router"]
    expert_names = ({experts})

    def __init__(
        self,
{parameters}        atoll=None,
    ):
        super().__init__()
        self.register_modules(
{modules}        )
        self.register_to_config(atoll=atoll)


# diffusers runs this file again for every component it loads; the definitions of the first time stay the only ones
_FIRST = globals().get("_FIRST") or dict(globals())
globals().update(_FIRST)
'''


@dataclass(frozen=True)
class Bundle:
    """One Python file. Its name holds its digest: diffusers copies the code of every folder it loads into one place."""

    text: str

    @property
    def name(self) -> str:
        return f"atoll_{sha256_bytes(self.text.encode())[:12]}"


def bundle(experts: int) -> Bundle:
    """The file of a model with so many experts: diffusers reads the components' names off the pipeline's `__init__`."""
    names = expert_names(experts)
    components = ("scheduler", "vae", "text_encoder", "tokenizer", "router", *names)
    closing = CLOSING.format(
        experts=" ".join(f'"{name}",' for name in names),
        parameters="".join(f"        {name},\n" for name in components),
        modules="".join(f"            {name}={name},\n" for name in components),
    )
    return Bundle(collected(START) + closing)


def expert_names(experts: int) -> list[str]:
    """Names of the components, in the order of their clusters."""
    return [f"expert_{k:02d}" for k in range(experts)]


def load(code: Bundle) -> ModuleType:
    """Run a bundle as the module that others will have; the same bundle is run once."""
    if code.name not in sys.modules:
        spec = importlib.util.spec_from_loader(code.name, _Text(code))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[code.name] = module
        spec.loader.exec_module(module)
    return sys.modules[code.name]


class _Text(importlib.abc.InspectLoader):
    """Imports a bundle that lies in no file."""

    def __init__(self, code: Bundle) -> None:
        self._code = code

    def get_source(self, fullname: str) -> str:
        return self._code.text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._code.text, f"{self._code.name}.py", "exec", dont_inherit=True)


@lru_cache(maxsize=1)
def collected(start: str) -> str:
    """A module and all it rests on, in one text."""
    collection = Collection()
    for name in collection.module(start).definitions:
        collection.want((start, name))
    parts = [HEADER.format(version=__version__) + import_lines(collection.outside)]
    parts += [LEFT_BEHIND[name].strip() for name in sorted(collection.left_behind)]
    defined: dict[str, str] = dict.fromkeys(collection.outside, "an import")
    for module in collection.in_order():
        stray = [s.lineno for s in module.tree.body if not (bound(s) or is_import(s) or is_text(s))]
        assert not stray, f"{module.name}, line {stray}: neither a definition nor an import, a bundle would lose it"
        parts.append(f"# ---- {module.path.relative_to(PACKAGE.parent).as_posix()}")
        wanted = {id(statement) for (owner, _), statement in collection.wanted.items() if owner == module.name}
        for statement in (statement for statement in module.tree.body if id(statement) in wanted):
            for name in bound(statement):
                known = defined.setdefault(name, module.name)
                assert known == module.name, f"{module.name}: {name} is also {known}'s; give one of them another name"
            parts.append(module.text_of(statement))
    return "\n\n\n".join(parts) + "\n"


Place = tuple[str, str]  # a module of ours, and a name it defines


class Outside(NamedTuple):
    """Something to import: a name of a module, or the module itself."""

    module: str
    name: str | None


class Module:
    """One of our source files: its top-level statements by the names they bind, and what its imports stand for."""

    def __init__(self, name: str) -> None:
        path = source_of(name)
        assert path is not None, f"{name} is no module of ours"
        self.name, self.path, self.source = name, path, path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)
        self.definitions = {name: statement for statement in self.tree.body for name in bound(statement)}
        self.imports: dict[str, Outside] = {}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for statement in self.tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = Outside(alias.name, None)
            elif isinstance(statement, ast.ImportFrom):
                above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
                origin = ".".join(filter(None, [above, statement.module]))
                for alias in statement.names:
                    whole = source_of(f"{origin}.{alias.name}") is not None
                    target = Outside(f"{origin}.{alias.name}", None) if whole else Outside(origin, alias.name)
                    self.imports[alias.asname or alias.name] = target

    def text_of(self, statement: ast.stmt) -> str:
        """A statement as it stands, with the comments right above it."""
        lines = self.source.splitlines()
        decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        while lines[first - 2].startswith("#"):
            first -= 1
        return "\n".join(lines[first - 1 : statement.end_lineno])


class Collection:
    """What a bundle needs: definitions of ours, and names from outside."""

    def __init__(self) -> None:
        self.module = lru_cache(maxsize=None)(Module)
        self.wanted: dict[Place, ast.stmt] = {}
        self.needs: dict[str, set[str]] = {}  # the modules whose definitions a module uses
        self.outside: dict[str, Outside] = {}
        self.left_behind: set[str] = set()

    def want(self, place: Place) -> None:
        """Take a definition and all it rests on."""
        if place in self.wanted:
            return
        module = self.module(place[0])
        statement = self.wanted[place] = module.definitions[place[1]]
        for name in [*bound(statement), *used(statement)]:
            meaning = self.meaning(module, name)
            if isinstance(meaning, Outside):
                self.want_outside(name, meaning, by=place)
            elif meaning is not None:
                assert meaning[1] == name, (
                    f"{'.'.join(place)}: {meaning[1]} is called {name} here; import it by its name"
                )
                self.needs.setdefault(place[0], set()).add(meaning[0])
                self.want(meaning)

    def want_outside(self, local: str, thing: Outside, *, by: Place) -> None:
        if thing.module in LEFT_BEHIND:
            self.left_behind.add(thing.module)
            return
        assert thing.module.partition(".")[0] in OUTSIDE, (
            f"{'.'.join(by)} needs {thing.module}, which is not there without atoll: keep it out of what {START} uses"
        )
        known = self.outside.setdefault(local, thing)
        assert known == thing, f"{'.'.join(by)}: {local} is {thing} here and {known} in another module"

    def meaning(self, module: Module, name: str) -> Place | Outside | None:
        """What a name in a module stands for; None for a local or built-in one."""
        while name not in module.definitions:
            imported = module.imports.get(name)
            if imported is None or imported.name is None or source_of(imported.module) is None:
                return imported
            module, name = self.module(imported.module), imported.name
        return module.name, name

    def in_order(self) -> list[Module]:
        """The modules, each after those whose definitions it uses."""
        owners = sorted({owner for owner, _ in self.wanted})
        needs = {name: sorted(self.needs.get(name, set()) - {name}) for name in owners}
        return [self.module(name) for name in TopologicalSorter(needs).static_order()]


def source_of(module: str) -> Path | None:
    """The file of one of our modules; None for anything else."""
    first, *rest = module.split(".")
    place = PACKAGE.joinpath(*rest)
    files = (place.with_suffix(".py"), place / "__init__.py") if first == "atoll" else ()
    return next((path for path in files if path.is_file()), None)


def bound(statement: ast.stmt) -> list[str]:
    """Names that a top-level statement defines."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign():
            return [n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def is_import(statement: ast.stmt) -> bool:
    """An import, or those that only a type checker sees."""
    checked = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    return checked or isinstance(statement, ast.Import | ast.ImportFrom)


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def used(statement: ast.stmt) -> set[str]:
    """Names that a statement mentions. Local variables among them do no harm: at worst one definition too many."""
    nodes = list(ast.walk(statement))
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), (
        f"line {statement.lineno}: a definition for a bundle imports nothing of ours by itself"
    )
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def import_lines(outside: Mapping[str, Outside]) -> str:
    """Import statements of what comes from outside."""
    whole: set[str] = set()
    parts: dict[str, list[str]] = {}
    for local, (module, name) in outside.items():
        if name is None:
            whole.add(f"import {module}" if local == module.partition(".")[0] else f"import {module} as {local}")
        else:
            parts.setdefault(module, []).append(name if local == name else f"{name} as {local}")
    named = [f"from {module} import {', '.join(sorted(parts[module]))}" for module in sorted(parts)]
    return "\n".join([*sorted(whole), *named])
