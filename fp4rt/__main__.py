"""The command line: ``python -m fp4rt COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fp4rt import __version__, bench, demo, info, verify
from fp4rt.device import DriverError, EmulatorFault, NoKernelError
from fp4rt.minilm import MissingModelError

COMMANDS = {
    "info": (info.add_arguments, info.main, "devices, driver, kernels that are built"),
    "demo": (
        demo.add_arguments,
        demo.main,
        "encode sentences with every linear layer in NVFP4, and compare with fp32",
    ),
    "bench": (
        bench.add_arguments,
        bench.main,
        "time every kernel variant against the roofline and its peers",
    ),
    "verify": (
        verify.add_arguments,
        verify.main,
        "check random problems on a device against the oracle",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4rt",
        description="NVFP4 grouped GEMM from numpy, without PyTorch.",
        epilog="Exit codes: 0 done, 1 a check or the device failed, 2 wrong use, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"fp4rt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (add_arguments, _, text) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=f"{name}: {text}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    _, run, _ = COMMANDS[args.command]
    try:
        code = run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`… | head`); what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MissingModelError, NoKernelError, DriverError, EmulatorFault) as error:
        print(f"fp4rt {args.command}: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
