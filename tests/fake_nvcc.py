"""Stands in for nvcc in the tests of build.py: fast, and says what it was asked to do.

Its folder holds ``version`` (the release it claims) and ``log`` (one line for each compile, as it
starts and as it ends). The source steers it by words in its comments: FAIL, SPILL, SERIALISED,
SLEEP.
"""

import re
import sys
import time
from pathlib import Path

home = Path(sys.argv[0]).resolve().parent
args = sys.argv[1:]
if args == ["--version"]:
    release = (home / "version").read_text().strip()
    print(f"nvcc: NVIDIA (R) Cuda compiler driver\nrelease {release}, V{release}.99")
    sys.exit(0)

source, target = Path(args[-1]), Path(args[args.index("-o") + 1])
text = source.read_text()


def log(event):
    with (home / "log").open("a") as file:
        file.write(f"{event} {source.stem}\n")


if "-ptx" in args:
    log("start")
    if "SLEEP" in text:
        time.sleep(0.4)
    if "FAIL" in text:
        print(f'{source}(1): error: identifier "FAIL" is undefined', file=sys.stderr)
        sys.exit(2)
    words = [f"// {word}" for word in ("SPILL", "SERIALISED") if word in text]
    ptx = [".version 9.0", ".target sm_90a", *words, f'.file 1 "{source}"']
    ptx.append('.file 2 "/toolkit/include/half.hpp"')
    ptx.append(".const .align 4 .u32 gemm_smem_bytes = 4096;")
    for name in re.findall(r'extern "C" __global__ void (\w+)', text):
        ptx.append(
            f".visible .entry {name}(\n.param .u32 {name}_param_0\n)\n.maxntid 128, 1, 1\n{{\n}}"
        )
    target.write_text("\n".join(ptx))
    log("end")
    sys.exit(0)

flags = " ".join(args[: args.index("-o")])
target.write_bytes(b"\x7fELF " + flags.encode())
for name in re.findall(r"\.entry (\w+)", text):
    print(f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'", file=sys.stderr)
    print(f"ptxas info    : Function properties for {name}", file=sys.stderr)
    spilled = 8 if "SPILL" in text else 0
    words = ("stack frame", "spill stores", "spill loads")
    print("    " + ", ".join(f"{spilled} bytes {word}" for word in words), file=sys.stderr)
    print("ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem", file=sys.stderr)
if "SERIALISED" in text:
    print(
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
        " serialized due to insufficient register resources in function 'gemm'",
        file=sys.stderr,
    )
