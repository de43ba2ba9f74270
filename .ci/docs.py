"""Render the docstrings of every module to HTML.

``python -W error .ci/docs.py FOLDER`` fails if there is anything to warn of.
"""

import sys
from pathlib import Path
from pkgutil import walk_packages

import pdoc
from pdoc.extract import walk_specs

import fp4rt


def main(folder: str) -> None:
    """Write an HTML page for each module to `folder`."""
    # pdoc goes down a package only as far as its __all__, so the rest is named one by one.
    specs, found = ["fp4rt"], set(walk_specs(["fp4rt"]))
    for module in walk_packages(fp4rt.__path__, "fp4rt."):
        if module.name not in found and not module.name.endswith(".__main__"):
            specs.append(module.name)
            found |= set(walk_specs([module.name]))
    pdoc.render.configure(docformat="numpy")
    pdoc.pdoc(*specs, output_directory=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
