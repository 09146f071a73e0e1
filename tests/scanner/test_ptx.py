"""The machine that runs PTX on the CPU sees what it is to see, in small kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpp"))

import ptx_check

KERNEL = """
.visible .entry NAME(
	.param .u64 NAME_param_0
)
.maxntid 1024, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b16 	%rs<3>;
	.reg .b32 	%r<10>;
	.reg .b64 	%rd<10>;
	.shared .align 8 .b8 NAME_shared[128];
	ld.param.u64 	%rd1, [NAME_param_0];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mov.u32 	%r3, NAME_shared;
	shl.b32 	%r4, %r1, 2;
	add.s32 	%r5, %r3, %r4;
	cvt.u64.u32 	%rd2, %r4;
	add.s64 	%rd3, %rd1, %rd2;
	setp.lt.u32 	%p1, %r1, 1;
	BODY
	ret;
}
"""  # thread i has its word of shared memory in %r5, and of global memory in %rd3

WRITE_SHARED = "st.shared.u32 [%r5], %r1;"
READ_NEXT = "xor.b32 %r6, %r5, 4; ld.shared.u32 %r7, [%r6];"
WRITE = "st.global.u32 [%rd3], %r1;"
READ_FIRST = "ld.global.u32 %r6, [%rd1];"
READ_VECTOR = "ld.global.nc.v4.u32 {%r6, %r7, %r8, %r9}"
MEET = "shfl.sync.bfly.b32 %r8|%p2, %r1, 1, 31, -1;"
TELL = """
	@!%p1 bra $L__BB0_1;
	membar.sys;
	st.volatile.global.u32 [%rd1+256], 1;
$L__BB0_1:
"""
# Blocks, threads, bytes of memory, what the kernel does, and why it fails.
FAULTS = [
    (3, 32, 4, f"{WRITE_SHARED} bar.sync 0; {READ_NEXT}", None),
    (1, 32, 4, f"{WRITE_SHARED} {READ_NEXT}", "a race on shared memory"),
    (
        1,
        32,
        4,
        f"{WRITE_SHARED} {MEET} {READ_NEXT}",
        "has written it since the barrier",
    ),
    (
        *(1, 32, 4, "ld.shared.u32 %r6, [%r3]; @%p1 st.shared.u32 [%r3], 1;"),
        "a race on shared memory",
    ),
    (1, 33, 4, WRITE_SHARED, "an access outside of shared memory"),
    (1, 2, 8, WRITE, None),
    (1, 2, 7, WRITE, "a store outside of all memory"),
    (1, 1, 15, f"{READ_VECTOR}, [%rd1];", "a load outside of all memory"),
    (1, 1, 64, f"{READ_VECTOR}, [%rd1+8];", "a misaligned access"),
    (1, 64, 4, "@%p1 bar.sync 0;", "a barrier that not all threads reach"),
    (1, 64, 4, "@%p1 bar.sync 0; @%p1 ret;\nbar.sync 0;", "barriers in two places"),
    (1, 32, 4, f"@%p1 {MEET}", "an exchange that not all lanes of the warp reach"),
    (1, 16, 4, MEET, "an exchange that not all lanes of the warp reach"),
    (2, 1, 4, WRITE, "a race on global memory"),
    (1, 64, 256, f"{WRITE} {READ_FIRST}", "a race on global memory"),
    (1, 64, 256, f"{WRITE} bar.sync 0; {READ_FIRST}", None),
    (3, 64, 4, "atom.global.add.u32 %r6, [%rd1], 2;", None),
    (1, 64, 260, f"{WRITE} {TELL}", "fence for the host"),
    (1, 64, 260, f"{WRITE} bar.sync 0; {TELL}", None),
    (1, 1, 4, "div.u32 %r6, 1, %r1;", "a division by zero"),
]

# What becomes of %r6, or of %rd6, as PTX's manual says.
RESULTS = [
    ("add.s32 %r6, 2147483647, 1;", 0x80000000),
    ("sub.s16 %rs1, 0, 1; cvt.u32.u16 %r6, %rs1;", 0xFFFF),
    ("cvt.s32.s8 %r6, 128;", 0xFFFFFF80),
    ("cvt.u32.u16 %r6, -1;", 0xFFFF),
    ("cvt.u64.u32 %rd6, -1;", 0xFFFFFFFF),
    ("cvt.s64.s32 %rd6, -1;", 0xFFFFFFFFFFFFFFFF),
    ("shl.b32 %r6, 1, 32;", 0),
    ("shl.b64 %rd6, 1, 33;", 1 << 33),
    ("shr.s32 %r6, -8, 40;", 0xFFFFFFFF),
    ("shr.u32 %r6, -8, 40;", 0),
    ("shr.u32 %r6, -8, 1;", 0x7FFFFFFC),
    ("clz.b32 %r6, 0;", 32),
    ("clz.b32 %r6, 65536;", 15),
    ("clz.b64 %r6, 65536;", 47),
    ("bfi.b32 %r6, 255, 0x12345678, 8, 4;", 0x12345F78),
    ("bfi.b64 %rd6, -1, 0, 32, 64;", 0xFFFFFFFF00000000),
    ("prmt.b32 %r6, 0x03020100, 0x07060504, 0x7531;", 0x07050301),
    ("prmt.b32 %r6, 128, 0, 0x1888;", 0x00FFFFFF),
    ("min.s32 %r6, -1, 1;", 0xFFFFFFFF),
    ("min.u32 %r6, -1, 1;", 1),
    ("min.u16x2 %r6, 0x00018000, 0x7fff7fff;", 0x00017FFF),
    ("max.u16x2 %r6, 0x00018000, 0x7fff7fff;", 0x7FFF8000),
    ("abs.s32 %r6, -2147483648;", 0x80000000),
    ("abs.f64 %rd6, 0dBFF0000000000000;", 0x3FF0000000000000),
    ("neg.f64 %rd6, 0d0000000000000000;", 0x8000000000000000),
    ("mul.hi.u32 %r6, -1, -1;", 0xFFFFFFFE),
    ("mul.wide.u32 %rd6, -1, 2;", 0x1FFFFFFFE),
    ("mul.wide.s32 %rd6, -1, 2;", 0xFFFFFFFFFFFFFFFE),
    ("mad.lo.s64 %rd6, -3, 5, 16;", 1),
    ("div.s32 %r6, -7, 2;", 0xFFFFFFFD),
    ("div.u64 %rd6, -1, 3;", 0x5555555555555555),
    ("not.pred %p2, %p1; selp.u32 %r6, 1, 2, %p2;", 2),
    ("setp.lt.s32 %p2, -1, 1; selp.u32 %r6, 1, 2, %p2;", 1),
    ("setp.lt.u32 %p2, -1, 1; selp.u32 %r6, 1, 2, %p2;", 2),
    ("mov.b32 {%rs1, %rs2}, 0x00020001; cvt.u32.u16 %r6, %rs2;", 2),
    ("mov.u16 %rs1, 1; mov.b32 %r6, {%rs1, %rs1};", 0x10001),
    (
        "mov.b64 %rd4, 0d4000000000000000; fma.rn.f64 %rd6, %rd4, %rd4, %rd4;",
        0x4018000000000000,
    ),
    ("sqrt.rn.f64 %rd6, 0d4010000000000000;", 0x4000000000000000),
    ("cvt.rn.f32.f64 %r6, 0d3FF0000000000001;", 0x3F800000),
    ("cvt.f64.f32 %rd6, 0f3F800000;", 0x3FF0000000000000),
    ("mov.u32 %r6, %ntid.x;", 1),
]
STORE_RESULT = "\nst.global.u32 [%rd1], %r6;\nst.global.u64 [%rd1+8], %rd6;"


def body_of(text):
    return f"mov.u32 %r6, 0; mov.u64 %rd6, 0;\n{text}{STORE_RESULT}"


def write_ptx(path, bodies):
    """Writes kernels k0, k1 and so on, of these bodies."""
    kernels = [
        KERNEL.replace("BODY", body).replace("NAME", f"k{i}")
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(kernels))
    return path


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs the i-th kernel of FAULTS and RESULTS; returns the ended process."""
    folder = tmp_path_factory.mktemp("ptx")
    bodies = [row[3] for row in FAULTS] + [body_of(text) for text, _ in RESULTS]
    ptx = write_ptx(folder / "kernels.ptx", bodies)
    program = ptx_check.build_without_cuda("90", ptx, folder)

    def run(number, blocks, threads, num_bytes):
        command = [program, f"k{number}", blocks, threads, num_bytes]
        command = [str(each) for each in command]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.mark.day
def test_what_no_kernel_may_do_is_seen(launch):
    for number, (blocks, threads, num_bytes, body, why) in enumerate(FAULTS):
        done = launch(number, blocks, threads, num_bytes)
        assert (done.returncode == 0) == (why is None), (body, done.stdout)
        if why is not None:
            assert done.returncode == 3, (body, done.stdout, done.stderr)
            assert done.stdout.startswith("FAIL: ") and why in done.stdout, body


@pytest.mark.day
def test_instructions_compute_what_the_manual_says(launch):
    for number, (text, expected) in enumerate(RESULTS, len(FAULTS)):
        words = [int(word) for word in launch(number, 1, 1, 16).stdout.split()]
        found = words[2] | words[3] << 32 if "%rd6" in text else words[0]
        assert found == expected, (text, hex(found))


@pytest.mark.parametrize(
    "body, named",
    [
        ("popc.b32 %r6, %r1;", "popc.b32"),
        ("ld.global.relaxed.gpu.u32 %r6, [%rd1];", "global.relaxed.gpu"),
        ("setp.ne.f64 %p2, %rd2, %rd3;", "setp.ne.f64"),
        ("redux.sync.min.s32 %r6, %r1, -1;", "redux.sync.min.s32"),
        ("ld.param.u64 %rd6, [k0_param_0+8];", "past the end of a parameter"),
        (".local .align 8 .b8 depot[8];", ".local"),
        ("mov.u32 %r6, %laneid;", "%laneid"),
    ],
)
def test_what_is_not_known_is_not_run(tmp_path, body, named):
    ptx = write_ptx(tmp_path / "kernels.ptx", [body])
    with pytest.raises(ptx_check.Untranslated) as caught:
        ptx_check.translated("90", [ptx])
    assert named in str(caught.value)
