"""The filter, run by a small interpreter of classic BPF: what it does with every kind of call."""

from __future__ import annotations

import os
import platform
import struct

import pytest

from fastports import _broker

NOTIFY = 0x7FC00000
ALLOW = 0x7FFF0000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}
CALLS = {"x86_64": {49, 50}, "aarch64": {200, 201}}


def run(program: bytes, nr: int, arch: int) -> int:
    """Run the filter on a struct seccomp_data; bpf(4), <linux/bpf_common.h>."""
    data = struct.pack("<IIQ6Q", nr, arch, 0, 0, 0, 0, 0, 0, 0)
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            at += yes if accumulator == k else no
        elif op == 0x06:  # BPF_RET | BPF_K
            return int(k)
        else:
            raise AssertionError(f"unexpected instruction {op:#x}")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_bind_and_listen_of_its_own_architecture_notify(machine: str) -> None:
    program = _broker.program(machine)
    notified = {nr for nr in range(1024) if run(program, nr, ARCH[machine]) == NOTIFY}
    assert notified == CALLS[machine]


@pytest.mark.parametrize(
    ("machine", "foreign"),
    [(machine, foreign) for machine in CALLS for foreign in ARCH if machine != foreign],
)
def test_calls_of_a_foreign_architecture_are_allowed_whatever_their_number(
    machine: str, foreign: str
) -> None:
    program = _broker.program(machine)
    assert {run(program, nr, ARCH[foreign]) for nr in range(1024)} == {ALLOW}


def test_x32_numbers_are_never_taken_for_x86_64_numbers() -> None:
    program = _broker.program("x86_64")
    numbers = [0x40000000 | nr for nr in range(1024)] + [0xFFFFFFFF]
    assert {run(program, nr, ARCH["x86_64"]) for nr in numbers} == {ALLOW}


def test_a_filter_for_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        _broker.program("riscv64")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the numbers in use here")
def test_the_descriptor_of_the_listener_does_not_survive_exec() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"%d" % os.get_inheritable(_broker.install()))
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"0"
    os.close(reader)
