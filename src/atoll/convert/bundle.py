"""Our sources as one file that runs without atoll.

A diffusers folder brings its own code. That code is not written a second time: `bundle` starts from every definition
of pipeline.py and follows the names each one uses, through our imports, to the definitions behind them. Those, and no
others, are copied in an order in which they can run, as they stand, comments and all. Imports between our modules go;
imports from outside must be on a short list, since whoever loads the folder has diffusers and not what atoll needs.

Everything lands in one namespace. Where two modules define the same name, the later one's is renamed.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, ModuleType

from .. import __version__
from ..artifacts import sha256_bytes

PACKAGE = Path(__file__).resolve().parents[1]
START = "atoll.convert.pipeline"
OUTSIDE = {"torch", "numpy", "safetensors", "diffusers", "PIL"}

# modules that stay behind, and what stands for them
LEFT_BEHIND = {
    "atoll.models.fused": '''
class fused:
    """Triton kernels stay with atoll: here it is always the plain formulas, which are the kernels' reference."""

    @staticmethod
    def available(*sizes):
        return False

    attends = attends_to_text = available
'''
}

HEADER = '''"""The code of an Atoll model: its networks, the maths between them, and the pipeline that paints.

Built by atoll {version} out of its own sources, one section per file; mend it there, not here. It imports nothing of
atoll. diffusers finds it beside every component it loads. https://www.apache.org/licenses/LICENSE-2.0
"""

from __future__ import annotations

'''


# the end of every bundle. diffusers runs the file again for each component that it loads from it; without the last
# two lines each would have classes of its own, none of which is an instance of another's
CLOSING = '''

# ---- this model
from diffusers import DiffusionPipeline


class AtollPipeline(Painting, DiffusionPipeline):
    """The model: `pipe(prompt, num_inference_steps=50, guidance_scale=2.0, route="top-2")`."""

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


# diffusers runs this file once for every component: the definitions of the first time stay
_FIRST = globals().get("_FIRST") or dict(globals())
globals().update(_FIRST)
'''


@dataclass(frozen=True)
class Bundle:
    """One Python file. Its name holds its digest: diffusers copies every folder's code into one place."""

    text: str

    @property
    def name(self) -> str:
        return f"atoll_{sha256_bytes(self.text.encode())[:12]}"


Place = tuple[str, str]  # a module and a name it defines


@dataclass(frozen=True)
class Module:
    """One of our source files, read."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def definitions(self) -> Mapping[str, ast.stmt]:
        """Top-level statements by each name they bind."""
        found: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            for name in bound(statement):
                assert name not in found, f"{self.name} binds {name} twice, a bundle can hold it once"
                found[name] = statement
        return found

    @cached_property
    def imports(self) -> Mapping[str, tuple[str, str | None]]:
        """Local name -> (module, name in it); the name is None where the module itself is meant."""
        found: dict[str, tuple[str, str | None]] = {}
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for statement in self.tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    found[alias.asname or alias.name.partition(".")[0]] = alias.name, None
            elif isinstance(statement, ast.ImportFrom):
                above = package.rsplit(".", statement.level - 1)[0] if statement.level else ""
                origin = ".".join(filter(None, [above, statement.module]))
                for alias in statement.names:
                    whole = source_of(f"{origin}.{alias.name}") is not None
                    target = (f"{origin}.{alias.name}", None) if whole else (origin, alias.name)
                    found[alias.asname or alias.name] = target
        return found

    def text_of(self, statement: ast.stmt, renamed: Mapping[str, str]) -> str:
        """A statement as it stands, with the comments right above it, and with some names replaced."""
        lines = self.source.splitlines()
        decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        for row, begin, end in sorted(places_of(statement, renamed, lines), reverse=True):
            line = lines[row - 1].encode()
            old = line[begin:end].decode()
            lines[row - 1] = (line[:begin] + renamed[old].encode() + line[end:]).decode()
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        return "\n".join(lines[first - 1 : statement.end_lineno])


def bound(statement: ast.stmt) -> list[str]:
    """Names a top-level statement defines; a statement of any other kind would be lost, and must not be there."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign():
            return [n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return []
    raise AssertionError(f"line {statement.lineno}: a bundle cannot hold a top-level {type(statement).__name__}")


def used(statement: ast.stmt) -> set[str]:
    """Names a statement mentions. Local variables among them do no harm: at worst something is copied for nothing."""
    nodes = list(ast.walk(statement))
    assert not any(isinstance(n, ast.ImportFrom) and n.level for n in nodes), f"line {statement.lineno}: imports inside"
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def places_of(statement: ast.stmt, names: Mapping[str, str], lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """Row, first and last column in bytes of every mention of these names."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id in names:
            assert node.end_col_offset is not None
            yield node.lineno, node.col_offset, node.end_col_offset
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            begin = lines[node.lineno - 1].encode().index(node.name.encode(), node.col_offset)
            yield node.lineno, begin, begin + len(node.name.encode())
        elif isinstance(node, ast.arg):
            assert node.arg not in names, f"line {node.lineno}: parameter {node.arg} has the name of something renamed"


def source_of(module: str) -> Path | None:
    """The file of one of our modules; None for anything else."""
    first, *rest = module.split(".")
    if first != "atoll":
        return None
    place = PACKAGE.joinpath(*rest)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


class Collection:
    """What a bundle needs: our definitions, and names from outside."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.wanted: dict[Place, ast.stmt] = {}
        self.outside: dict[str, tuple[str, str | None]] = {}
        self.left_behind: set[str] = set()

    def module(self, name: str) -> Module:
        if name not in self.modules:
            path = source_of(name)
            assert path is not None, f"{name} is no module of ours"
            self.modules[name] = Module(name, path)
        return self.modules[name]

    def want(self, place: Place) -> None:
        """Take a definition and all it rests on."""
        if place in self.wanted:
            return
        module = self.module(place[0])
        statement = module.definitions[place[1]]
        self.wanted[place] = statement
        for name in bound(statement):
            self.want((place[0], name))
        for name in used(statement):
            if name in module.definitions:
                self.want((place[0], name))
            elif name in module.imports:
                self.follow(name, *module.imports[name], by=place)

    def follow(self, local: str, origin: str, name: str | None, *, by: Place) -> None:
        """Take what a name was imported as, wherever it is defined."""
        while name is not None and source_of(origin) is not None:
            module = self.module(origin)
            if name in module.definitions:
                assert local == name, f"{by[0]} imports {name} as {local}; a bundle knows it by one name"
                return self.want((origin, name))
            assert name in module.imports, f"{by[0]} imports {name}, which {origin} does not define"
            origin, name = module.imports[name]
        if name is None and origin in LEFT_BEHIND:
            self.left_behind.add(origin)
            return None
        top = origin.partition(".")[0]
        assert top in OUTSIDE or top in sys.stdlib_module_names, (
            f"{by[0]}.{by[1]} uses {local} of {origin}, which is not there without atoll; keep it out of what "
            f"{START} needs, or add it to OUTSIDE"
        )
        known = self.outside.setdefault(local, (origin, name))
        assert known == (origin, name), f"{local} is {known} in one module and {(origin, name)} in {by[0]}"
        return None

    def in_order(self) -> list[Module]:
        """The modules, each after all it imports."""
        names = {place[0] for place in self.wanted}
        needs = {name: set(self.reached(name)) & names - {name} for name in sorted(names)}
        return [self.module(name) for name in TopologicalSorter(needs).static_order()]

    def reached(self, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Modules of ours that a module imports, also through packages that only pass names on."""
        direct = {origin for origin, _ in self.module(name).imports.values() if source_of(origin) is not None}
        direct -= seen | LEFT_BEHIND.keys()
        return direct.union(*(self.reached(other, seen | direct) for other in direct))

    def renamings(self) -> dict[str, dict[str, str]]:
        """Per module, new names for definitions whose names an earlier module or an import already has."""
        taken = {*self.outside, *(origin.rpartition(".")[2] for origin in self.left_behind)}
        changes: dict[str, dict[str, str]] = {}
        places = {place: place[1] for place in self.wanted}
        for module in self.in_order():
            own = [name for name in module.definitions if (module.name, name) in self.wanted]
            for name in own:
                if name in taken:
                    places[module.name, name] = f"{name}_of_{module.name.rpartition('.')[2]}"
            taken |= {places[module.name, name] for name in own}
        for module in self.in_order():
            local = {name: place for name, place in self.visible(module).items() if places[place] != name}
            changes[module.name] = {name: places[place] for name, place in local.items()}
        return changes

    def visible(self, module: Module) -> dict[str, Place]:
        """What a module's names mean, as far as it is in the bundle."""
        found = {name: (module.name, name) for name in module.definitions}
        for local, (origin, name) in module.imports.items():
            while name is not None and source_of(origin) is not None and name not in self.module(origin).definitions:
                origin, name = self.module(origin).imports[name]
            if name is not None:
                found[local] = origin, name
        return {name: place for name, place in found.items() if place in self.wanted}


@lru_cache(maxsize=1)
def core() -> str:
    """Everything but the last class, the same for every model."""
    collection = Collection()
    for name in collection.module(START).definitions:
        collection.want((START, name))
    parts = [HEADER.format(version=__version__) + import_lines(collection.outside)]
    parts += [LEFT_BEHIND[name].strip() for name in sorted(collection.left_behind)]
    renamings = collection.renamings()
    for module in collection.in_order():
        taken = {id(s): s for (name, _), s in collection.wanted.items() if name == module.name}
        parts.append(f"# ---- {module.path.relative_to(PACKAGE.parent).as_posix()}")
        parts += [module.text_of(s, renamings[module.name]) for s in module.tree.body if id(s) in taken]
    return "\n\n\n".join(parts) + "\n"


def bundle(experts: int) -> Bundle:
    """The file of a model with so many experts."""
    names = expert_names(experts)
    components = ("scheduler", "vae", "text_encoder", "tokenizer", "router", *names)
    closing = CLOSING.format(
        experts="".join(f'"{name}", ' for name in names).strip(),
        parameters="".join(f"        {name},\n" for name in components),
        modules="".join(f"            {name}={name},\n" for name in components),
    )
    return Bundle(core() + closing)


def expert_names(experts: int) -> list[str]:
    """Names of the components, in the order of their clusters."""
    return [f"expert_{k:02d}" for k in range(experts)]


def load(code: Bundle) -> ModuleType:
    """Run a bundle as the module it will be for others; the same bundle is run once."""
    if code.name not in sys.modules:
        spec = importlib.util.spec_from_loader(code.name, _Text(code))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[code.name] = module
        assert spec.loader is not None
        spec.loader.exec_module(module)
    return sys.modules[code.name]


class _Text(importlib.abc.InspectLoader):
    """Imports a bundle that lies in no file."""

    def __init__(self, code: Bundle) -> None:
        self._code = code

    def get_source(self, fullname: str) -> str:
        return self._code.text

    def source_to_code(self, data: str, path: str = "") -> CodeType:  # type: ignore[override]
        return compile(data, f"{self._code.name}.py", "exec", dont_inherit=True)


def import_lines(outside: Mapping[str, tuple[str, str | None]]) -> str:
    plain, named = set(), {}
    for local, (origin, name) in outside.items():
        if name is None:
            plain.add(f"import {origin}" if local == origin.partition(".")[0] else f"import {origin} as {local}")
        else:
            named.setdefault(origin, []).append(name if local == name else f"{name} as {local}")
    return "\n".join([*sorted(plain), *(f"from {origin} import {', '.join(sorted(named[origin]))}" for origin in sorted(named))])
