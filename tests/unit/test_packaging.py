"""An editable install's way to the sources; test_library.py has the wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fp4rt

ROOT = Path(fp4rt.__file__).parent.parent


def test_an_editable_install_is_a_path(tmp_path):
    """Type checkers follow a path, and not the import hook that setuptools may use instead.

    With the hook, Python takes a folder named fp4rt in the working folder, such as the clone seen
    from above, for the package.
    """
    pytest.importorskip("setuptools", minversion="77")
    clone = tmp_path / "above the clone" / "fp4rt"
    shutil.copytree(ROOT / "fp4rt", clone / "fp4rt", ignore=shutil.ignore_patterns("_*"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copy(ROOT / "fp4rt" / "__init__.py", clone / "fp4rt")
    hook = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", hook], cwd=clone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    (path,) = (p for p in installed.iterdir() if p.suffix in (".pth", ".py"))
    assert Path(path.read_text().strip()).resolve() == clone.resolve()
    code = (
        f"import site; site.addsitedir({str(installed)!r})\n"
        "from importlib.util import find_spec; print(find_spec('fp4rt').origin)"
    )
    command = [sys.executable, "-S", "-E", "-c", code]  # -S: no other fp4rt is installed
    done = subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(clone / "fp4rt" / "__init__.py"), done.stderr
