"""Machine code read from stored text, and from a kernel compiled for an H100."""

import pytest

from pallas_kernels.dev import machine_code
from pallas_kernels.dev.machine_code import parse

COMPILE_BUDGET = 0

SASS = """
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/              @!P2 BRA `(.L_x_9) ;
.L_x_15:
        /*0030*/                   WARPGROUP.ARRIVE ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], RZ, !UPT ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24, gsb0 ;
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR23], R9 ;
        /*0070*/              @!P1 BRA `(.L_x_10) ;
.L_x_30:
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R88, R24, gdesc[UR24].tnspB, R88, gsb0 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00a0*/              @P5 MUFU.EX2 R3, R3 ;
.L_x_16:
        /*00b0*/                   STL [R1], R3 ;
        /*00c0*/               @P3 BRA `(.L_x_16) ;
        /*00d0*/                   WARPGROUP.DEPBAR.LE gsb0, {wait} ;
        /*00e0*/                   MUFU.EX2 R4, R4 ;
        /*00f0*/               @P1 BRA `(.L_x_15) ;
.L_x_9:
        /*0100*/                   LDL R3, [R1] ;
        /*0110*/               @P0 EXIT ;
        /*0120*/                   EXIT ;
.L_x_10:
        /*0130*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R7+URZ], R6 ;
        /*0140*/              @!P1 BRA `(.L_x_10) ;
        /*0150*/                   BRA `(.L_x_30) ;
.L_x_40:
        /*0160*/                   BRA `(.L_x_40);
"""


def test_the_loop_is_that_of_the_program_with_its_outlying_code_and_without_inner_loops() -> None:
    [found] = parse(SASS.replace("{wait}", "0x0"))
    assert (found.name, found.local_memory, found.barriers) == ("kernel", 2, 1)
    [loop] = found.loops  # a barrier's second attempt is a loop without wgmmas
    assert [x.split()[0] for x in loop.instructions[:2]] == [
        "WARPGROUP.ARRIVE",
        "HGMMA.64x128x16.F32.BF16",
    ]
    assert loop.instructions[-1] == "BRA `(.L_x_30)"
    assert loop.count("HGMMA") == 3 and loop.count("STL") == 0
    assert loop.count("MUFU.EX2") == 2 and loop.count("MUFU") == 2


@pytest.mark.parametrize(
    ("wait", "waits", "in_flight"), [("0x0", (1, 0), (1, 0)), ("0x1", (1, 1), (1, 1))]
)
def test_what_is_in_flight_follows_from_the_waits(
    wait: str, waits: tuple[int, ...], in_flight: tuple[int, ...]
) -> None:
    [loop] = parse(SASS.replace("{wait}", wait))[0].loops
    assert loop.waits == waits
    assert loop.in_flight("MUFU.EX2") == in_flight
    # The second wgmma is issued while the first is in flight, and with wait 1 that of the pass
    # before is, too.
    assert loop.in_flight("HGMMA") == ((0, 1, 2) if wait == "0x0" else (1, 2, 3))


def test_a_summary_counts_the_instructions_between_matmuls_and_waits() -> None:
    [loop] = parse(SASS.replace("{wait}", "0x0"))[0].loops
    lines = loop.summary().splitlines()
    assert lines[:3] == [
        "  WARPGROUP:1",
        "2 x HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24, gsb0",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR23], R9",
    ]
    assert lines[5:8] == [
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "  MUFU.EX2:1",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    ]


def test_a_tool_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="nvfrobnicate is not installed; run: pip install"):
        machine_code.tool("nvfrobnicate")
