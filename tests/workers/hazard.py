"""A kernel with a hazard, for compute-sanitizer's racecheck to find on a GPU: every thread reads from a thread block's
shared memory what another warp writes there, with no barrier between. It has the name of one of ours, so that a filter
by their names takes it too.

    hazard.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

EXCHANGE = """{
.shared .align 4 .b32 places[128];
.reg .b32 thread, place, base;
mov.u32 thread, %tid.x;
mov.u32 base, places;
mad.lo.u32 place, thread, 4, base;
st.shared.b32 [place], $1;
xor.b32 thread, thread, 64;
mad.lo.u32 place, thread, 4, base;
ld.shared.b32 $0, [place];
}"""


@triton.jit
def _cast(source, target, EXCHANGE: tl.constexpr):
    places = tl.arange(0, 128)
    read = tl.inline_asm_elementwise(EXCHANGE, "=r,r", [tl.load(source + places)], tl.int32, is_pure=False, pack=1)
    tl.store(target + places, read)


if __name__ == "__main__":
    source = torch.arange(128, dtype=torch.int32, device="cuda")
    _cast[(1,)](source, torch.empty_like(source), EXCHANGE, num_warps=4)
    torch.cuda.synchronize()
