"""Python files that a user names with `--plugin`: their decorators register sources and clustering methods.

A plugin runs with the rights of the user, so only the command line names one: never an order, an artifact or a URL.
A spawned worker process or a Ray task starts without the plugins of its parent, and cannot even unpickle a source whose
class one of them defines. So `atoll.executor` sends `loaded_plugins()` along and loads them before it unpickles.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from .artifacts import UserError

_loaded: dict[str, str] = {}


def loaded_plugins() -> dict[str, str]:
    """{absolute path: sha256} of the plugins of this process, in the order of loading; provenance records it."""
    return dict(_loaded)


def load_plugins(plugins: Mapping[str, str | None]) -> None:
    """Run the files at these paths, each once per process; a file must have the sha256 given, if one is."""
    for place, expected in plugins.items():
        path = Path(place).absolute()
        try:
            code = path.read_bytes()
        except OSError as error:
            raise UserError(f"--plugin {place}: cannot be read ({error.strerror}); name a Python file") from error
        digest = hashlib.sha256(code).hexdigest()
        if {_loaded.get(str(path), digest), expected or digest} != {digest}:
            raise UserError(f"--plugin {place}: changed, or differs between machines; run the same command again")
        if str(path) in _loaded:
            continue
        module = ModuleType(f"atoll_plugin_{path.stem}_{digest[:8]}")  # pickle finds its classes by this name
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(code, str(path), "exec"), vars(module))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--plugin {place}: cannot be loaded ({type(error).__name__}: {error})") from error
        _loaded[str(path)] = digest
