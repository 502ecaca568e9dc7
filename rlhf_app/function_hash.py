"""Whether a function of the user is still the same: a hash of its file and what that imports."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_app.config.functions import function_file
from rlhf_app.fingerprint import content_hash
from rlhf_app.home import expanded
from rlhf_app.origins import OWN_PACKAGES

# Found before anything of the user's; a change of this program is told by its version.
_NOT_THE_USERS = sys.stdlib_module_names | set(OWN_PACKAGES)


def function_hash(spec: str) -> str:
    """Hash of a function's code, or an empty text where it is no file of the user.

    Args:
        spec: `module:function` or `file.py:function`.

    Returns:
        The file's own hash; where it imports others that lie beside it or in the current
        directory, one over all of them. Nothing is run: imports are read from the source.
    """
    module = spec.rpartition(":")[0]
    if not module or (not module.endswith(".py") and module.split(".")[0] in _NOT_THE_USERS):
        return ""
    file = function_file(spec)
    if not file:
        return ""
    hashes = [content_hash(str(path)) for path in _with_imports(expanded(file), module)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _with_imports(first: Path, module: str) -> list[Path]:
    """A file and all that it imports, the order as they are met."""
    here = Path.cwd()
    start = first.resolve()
    # A module runs the `__init__.py` of the packages around it first.
    waiting = [start, *(() if module.endswith(".py") else _files(here, module))]
    # As an import sees them: beside the file where it is named as a file, else from here.
    roots = dict.fromkeys([start.parent, here] if module.endswith(".py") else [here])
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop(0).resolve()
        if path not in found:
            found[path] = None
            nodes = list(_nodes(path))
            names = list(_imports(nodes))
            waiting += [file for root in roots for name in names for file in _files(root, name)]
            waiting += _relative(path, nodes)
    return list(found)


def _files(root: Path, module: str) -> list[Path]:
    """The files that importing a dotted module runs, as far as they lie below a directory."""
    parts = module.split(".")
    names = [root.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    files = [file for name in names for file in (name / "__init__.py", name.with_suffix(".py"))]
    return [file for file in files if file.is_file()]


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names of absolute imports, anywhere in a file: some run in the function alone."""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # What is imported from a package may be a module of it.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] not in _NOT_THE_USERS)


def _relative(path: Path, nodes: Iterable[ast.AST]) -> Iterator[Path]:
    """Files that the relative imports of a file run."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            package = path.parents[min(node.level, len(path.parents)) - 1]
            for alias in node.names:
                yield from _files(package, ".".join(filter(None, (node.module, alias.name))))


def _nodes(path: Path) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it says what is wrong
        return iter(())
    return ast.walk(tree)
