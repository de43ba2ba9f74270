"""Imports only point down the layers, and nothing heavy happens at import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fp4rt

PACKAGE = Path(fp4rt.__file__).parent

# A module may import modules of lower layers only. A new module needs a line here and in the table
# of fp4rt/ARCHITECTURE.md.
LAYERS = {
    -1: {"html", "errors", "tensor_map"},
    0: {"codes", "abi", "device", "progress"},
    1: {"nvfp4", "library", "model", "host", "interop"},
    2: {"layout", "reference", "rows", "cpu", "cuda", "emulator"},
    3: {"problem"},
    4: {"arguments", "choice", "plan_cache"},
    5: {"launches", "weights"},
    6: {"blas", "kernels"},
    7: {"transfer"},
    8: {"one_call", "pipeline"},
    9: {"plan"},
    10: {"gemm"},
    11: {"__init__"},
    12: {"minilm", "info", "verify"},
    13: {"demo", "bench"},
    14: {"__main__"},
}

THIRD_PARTY = {
    "cuda": {"cuda", "interop"},  # who may import it, at any place in the module
    "numpy": None,
    "ml_dtypes": None,
    "cupy": {"bench"},
    "matplotlib": {"bench"},
    "torch": {"bench"},
    "tokenizers": {"demo", "minilm"},
    "safetensors": {"demo", "minilm"},
}


def layer_of(module: str) -> int:
    return next(layer for layer, names in LAYERS.items() if module in names)


def submodule(name: str) -> str:
    """The module that ``from fp4rt import name`` reads: a submodule, or the package itself."""
    is_module = (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()
    return name if is_module else "__init__"


def imports(path: Path) -> set[tuple[str, bool]]:
    """Absolute names of imported modules and whether the import runs at import time."""
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node in top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = path.parent != PACKAGE and node.level == 1
            assert node.level == 0 or inside, f"{path.name}:{node.lineno}: use absolute imports"
            if inside:
                continue
            names = {node.module or ""}
            if node.module == "fp4rt":
                names = {f"fp4rt.{submodule(alias.name)}" for alias in node.names}
            found |= {(name, node in top) for name in names}
    return found


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    """The name that LAYERS uses: packages count as one module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    module = module_name(path)
    for name, _ in imports(path):
        if not name.startswith("fp4rt."):
            continue
        target = name.split(".")[1]
        if target == module:  # between the modules of one package
            continue
        assert layer_of(target) < layer_of(module), f"{module} imports {target}, not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_party_imports_are_the_declared_ones(path):
    module = module_name(path)
    for name, at_import in imports(path):
        root = name.split(".")[0]
        if root == "fp4rt" or root in sys.stdlib_module_names:
            continue
        assert root in THIRD_PARTY, f"{module} imports {root}, which is no declared dependency"
        allowed = THIRD_PARTY[root]
        if allowed is not None:
            assert module in allowed, f"only {sorted(allowed)} may import {root}, not {module}"
            assert not at_import or module == "cuda", f"{module} must import {root} lazily"


def test_only_device_knows_the_device_modules():
    for path in MODULES:
        module = module_name(path)
        for name, _ in imports(path):
            for hidden in ("fp4rt.cuda", "fp4rt.emulator", "fp4rt.cpu"):
                if name == hidden or name.startswith(hidden + "."):
                    assert module == hidden.split(".")[1], f"{module} imports {name}; use device()"


def test_importing_fp4rt_loads_no_driver_and_no_extra():
    code = (
        "import sys, fp4rt\n"
        "bad = [m for m in ('cuda', 'cuda.bindings', 'torch', 'tokenizers', 'safetensors', "
        "'fp4rt.cuda', 'fp4rt.emulator') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_exist():
    for name in fp4rt.__all__:
        assert getattr(fp4rt, name).__doc__, f"fp4rt.{name} has no docstring"


def test_the_architecture_page_has_every_module():
    page = (PACKAGE / "ARCHITECTURE.md").read_text()
    table = page[page.index("## Modules") :]
    assert not {module_name(p) for p in MODULES if f"`{module_name(p)}`" not in table}
