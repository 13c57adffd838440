"""Our sources as one file that runs without atoll.

A diffusers folder brings its own code. That code is not written a second time: pipeline.py and every module of ours
that it imports are embedded whole, as strings, and a small importer in the file runs them as a package. Modules
that need more than torch, numpy, safetensors and diffusers stay behind; functions here that use them are never called.

It is one file because that is all diffusers takes from a hub: for a component with weights, its weights, its config and
the one file that its class is in.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType

from .. import __version__
from ..artifacts import sha256_bytes

ROOT = Path(__file__).resolve().parents[1]
START = "convert.pipeline"
ABSENT = '''"""Not needed without atoll: every name is None."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
'''
# what stands for modules that stay behind
STAND_INS = {
    "": '"""The modules of an Atoll model."""\n',
    "artifacts": "from .digest import sha256_file\nfrom .errors import *\n\n" + ABSENT.partition("\n\n\n")[2],
    **dict.fromkeys(("data.shards", "data.space", "kernels", "models.pretrained"), ABSENT),
}

FILE = '''"""The code of an Atoll model: its networks, the maths between them, and the pipeline.

Built by atoll {version} out of its own sources, which are embedded below: change it there, not here. It imports nothing
of atoll. License: Apache-2.0.
"""

import importlib.abc
import importlib.util
import sys

from diffusers import DiffusionPipeline

PACKAGE = "{package}"
SOURCES = {{
{sources}}}


class Embedded(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the sources above as modules of PACKAGE."""

    def find_spec(self, fullname, path=None, target=None):
        known = fullname in SOURCES
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname)) if known else None

    def is_package(self, fullname):
        return any(name.startswith(fullname + ".") for name in SOURCES)

    def get_source(self, fullname):
        return SOURCES[fullname]

    def get_code(self, fullname):  # with a file name, so that tracebacks show lines and torch.compile traces it
        return compile(SOURCES[fullname], fullname.replace(".", "/") + ".py", "exec", dont_inherit=True)


# diffusers runs this file again for every component it loads; the modules of the first time stay the only ones
if PACKAGE not in sys.modules:
    sys.meta_path.append(Embedded())
pipeline = importlib.import_module(PACKAGE + ".{start}")
AtollExpert, AtollRouter, AtollScheduler = pipeline.AtollExpert, pipeline.AtollRouter, pipeline.AtollScheduler
AtollTinyAutoencoder, AtollBlockTransform = pipeline.AtollTinyAutoencoder, pipeline.AtollBlockTransform


class AtollPipeline(pipeline.PipelineMethods, DiffusionPipeline):
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
    found = modules()
    package = f"atoll_modules_{sha256_bytes(repr(found).encode())[:12]}"
    return Bundle(
        FILE.format(
            version=__version__,
            package=package,
            start=START,
            sources="".join(literal(f"{package}.{name}".rstrip("."), text) for name, text in sorted(found.items())),
            experts=" ".join(f'"{name}",' for name in names),
            parameters="".join(f"        {name},\n" for name in components),
            modules="".join(f"            {name}={name},\n" for name in components),
        )
    )


def expert_names(experts: int) -> list[str]:
    """Names of the components, in the order of their clusters."""
    return [f"expert_{k:02d}" for k in range(experts)]


def literal(name: str, text: str) -> str:
    """An entry of SOURCES, a line of it for each line of the source: none looks like an import to diffusers."""
    lines = "".join(f"        {line!r}\n" for line in text.splitlines(keepends=True))
    return f'    "{name}": (\n{lines}    ),\n' if lines else f'    "{name}": "",\n'


@lru_cache(maxsize=1)
def modules() -> dict[str, str]:
    """The source of START and of all modules of ours that it imports, by name below the package."""
    found: dict[str, str] = {}

    def embed(name: str) -> None:
        if name in found:
            return
        path = source_of(name)
        assert path is not None, f"{name} is no module of ours"
        found[name] = STAND_INS[name] if name in STAND_INS else path.read_text(encoding="utf-8")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                origin = ".".join([*filter(None, above), *filter(None, [node.module])])
                parts = [f"{origin}.{alias.name}".lstrip(".") for alias in node.names]
                for needed in [origin, *(part for part in parts if source_of(part) is not None)]:
                    embed(needed)
        embed(name.rpartition(".")[0])

    embed(START)
    return found


def source_of(module: str) -> Path | None:
    """The file of one of our modules; None for anything else."""
    place = ROOT.joinpath(*filter(None, module.split(".")))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


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
