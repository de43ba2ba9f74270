"""Instructions that the emulator leaves out, each with the reason."""

from __future__ import annotations

from .program import Decoder, Handler, register
from .ptx import Instruction

_TEXTURES = "textures and surfaces are not emulated; read the data through global memory"
_REASONS = {
    **dict.fromkeys(("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"), _TEXTURES),
    "mma.sp": "sparse matrices are not emulated",
    "mma.sp::ordered_metadata": "sparse matrices are not emulated",
    "multimem": "multicast objects span several GPUs, and the emulator is one",
    "vote": "votes without .sync ended with sm_70; use vote.sync",
    "shfl": "shuffles without .sync ended with sm_70; use shfl.sync",
}


@register(*_REASONS)
def _refuse(ins: Instruction, d: Decoder) -> Handler:
    reason = _REASONS.get(ins.parts[0]) or _REASONS[".".join(ins.parts[:2])]
    raise d.unsupported(reason)
