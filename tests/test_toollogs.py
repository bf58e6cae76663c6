"""Logs of compute-sanitizer and tables of ncu, written after the formats in NVIDIA's manuals: what is read from them."""

from __future__ import annotations

import csv
import io
import time

import pytest

from kernelband.evaluate import toollogs

# --- compute-sanitizer's logs, in the format of its manual

MEMCHECK = """\
========= COMPUTE-SANITIZER
loading weights
========= Invalid __global__ read of size 16 bytes
=========     at scale_kernel+0x1a0 in candidate.py:9
=========     by thread (8,0,0) in block (3,0,0)
=========     Access to 0x7f3c7ec00f90 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00000 of size 3,984 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x8f0d] in __triton_launcher.so
=========
========= Invalid __shared__ write of size 4 bytes
=========     at void reduce_rows<float, (int)4>(const T1 *, T1 *)+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x71 is misaligned
=========
========= Invalid __global__ atomic of size 4 bytes
=========     at 0x00000cd8 in split_kernel(float*, int)
=========     by thread (0,0,0) in block (3443,0,0)
=========     Address 0x203000c8 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaFree.
=========     Saved host backtrace up to driver entry point at error
=========
========= Target application returned an error
========= ERROR SUMMARY: 1,769 errors
========= ERROR SUMMARY: 1,705 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at buggy_kernel(float *, int)+0x580
=========     and Read access at buggy_kernel(float *, int)+0x890 [4080 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""

INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at tail_kernel+0x70 in /home/me/candidate.py:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""

SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at barrier_kernel(int *)+0x2c8
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 32 errors
"""

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"

NO_START = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Tracking kernels launched by child processes requires the --target-processes all option.
"""


def test_a_memcheck_log_gives_kind_access_space_kernel_and_place():
    log = toollogs.sanitizer(MEMCHECK)
    assert log.finished and log.errors == 1769 and not log.problem
    first, second, third = log.faults
    assert (first.kind, first.access, first.space, first.size) == ("out_of_bounds", "read", "global", 16)
    assert (first.kernel, first.where) == ("scale_kernel", "candidate.py:9")
    assert "1 bytes after the nearest allocation of 3,984 bytes" in first.detail
    assert (second.kind, second.access, second.space) == ("misaligned", "write", "shared")
    assert (third.kind, third.access, third.kernel) == ("out_of_bounds", "atomic", "split_kernel")
    assert "scale_kernel (candidate.py:9)" in str(first)


@pytest.mark.parametrize("text, kind, kernel, errors", [
    (RACECHECK, "race", "buggy_kernel", 1), (INITCHECK, "uninitialized", "tail_kernel", 1),
    (SYNCCHECK, "barrier", "barrier_kernel", 32)])
def test_the_other_checks_are_read_too(text, kind, kernel, errors):
    log = toollogs.sanitizer(text)
    assert log.errors == errors and log.faults[0].kind == kind and log.faults[0].kernel == kernel


def test_no_errors_no_log_and_no_start_are_three_things():
    clean, none, unstarted = map(toollogs.sanitizer, (CLEAN, "", NO_START))
    assert clean.finished and clean.errors == 0 and not clean.faults
    assert not none.finished and none.errors == 0
    assert not unstarted.finished and "terminated before" in unstarted.problem


def test_a_log_that_breaks_off_still_shows_the_faults_before():
    log = toollogs.sanitizer(MEMCHECK[:MEMCHECK.index("Program hit")])
    assert not log.finished and log.errors == 3


def test_a_failed_call_alone_is_no_memory_error():
    text = "========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.\n"
    log = toollogs.sanitizer(text + "========= ERROR SUMMARY: 0 errors\n")
    assert log.errors == 0 and [f.kind for f in log.faults] == ["api"]


@pytest.mark.parametrize("text", [
    "========= and is " + "and is " * 500_000, "========= at " * 300_000, "========= " + "(" * 3_000_000,
    ("========= Invalid __global__ read of size 4\n" * 60_000), "\x00\ud800=========\n" * 1000])
def test_hostile_logs_take_no_time(text):
    begun = time.monotonic()
    assert len(toollogs.sanitizer(text).faults) <= toollogs.KEPT_FAULTS
    assert time.monotonic() - begun < 5


# --- ncu's tables

WIDE_HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
             "Device", "CC"]


def wide(units, *rows):
    """A "raw" page: names, units, then one launch a line. rows: (kernel, metric -> text)."""
    names = list(units)
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(WIDE_HEAD + names)
    writer.writerow([""] * len(WIDE_HEAD) + [units[n] for n in names])
    for i, (kernel, values) in enumerate(rows):
        writer.writerow([i, 19963, "python3.12", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(64, 18, 1)", 0, "9.0"]
                        + [values[n] for n in names])
    head = "==PROF== Connected to process 19963 (/usr/bin/python3.12)\n==PROF== Disconnected from process 19963\n"
    return head + out.getvalue()


UNITS = {toollogs.TIME: "ns", **dict.fromkeys(toollogs.SHARES.values(), "%"), toollogs.OCCUPANCY: "%",
         toollogs.REGISTERS: "register/thread", toollogs.SHARED: "Kbyte/block", toollogs.LOCAL[0]: "byte",
         toollogs.CONFLICTS: "", toollogs.STALLS["long_scoreboard"]: "inst", toollogs.STALLS["barrier"]: "inst"}


def launch(us_in_ns, dram, registers="40", stalls=("6.00", "2.00")):
    return {toollogs.TIME: us_in_ns, toollogs.SHARES["dram"]: dram, toollogs.SHARES["l2"]: "40.5",
            toollogs.SHARES["sm"]: "20", toollogs.SHARES["issue"]: "10", toollogs.OCCUPANCY: "50",
            toollogs.REGISTERS: registers, toollogs.SHARED: "5.12", toollogs.LOCAL[0]: "1,024", toollogs.CONFLICTS: "n/a",
            toollogs.STALLS["long_scoreboard"]: stalls[0], toollogs.STALLS["barrier"]: stalls[1]}


def test_counters_of_several_kernels_are_averaged_by_their_time():
    text = wide(UNITS, ("scale_kernel", launch("300,000", "90.0")),
                ("void at::native::reduce_kernel<512, 1>(T3, T4)", launch("100,000", "10.0", "96")))
    found = toollogs.counters(toollogs.ncu_rows(text))
    assert found is not None and found.us == pytest.approx(400)
    assert found.load["dram"] == pytest.approx(0.7) and found.load["l2"] == pytest.approx(0.405)
    assert found.load["compute"] == found.load["sm"] == pytest.approx(0.2)
    assert (found.occupancy, found.registers, found.shared, found.local_bytes) == (0.5, 96, 5120, 2048)
    assert found.stalls == {"long_scoreboard": 0.75, "barrier": 0.25}
    assert found.kernels[0] == ("scale_kernel", pytest.approx(300))


def test_a_row_for_each_metric_is_read_too():
    head = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",' \
           '"CC","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    row = '"{}","1","python","127.0.0.1","saxpy","1","7","(256, 1, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics",' \
          '"{}","{}","{}"\n'
    text = head + row.format(0, toollogs.TIME, "usecond", "1,205.00") + row.format(0, toollogs.SHARES["dram"], "%", "80")
    text += row.format(1, toollogs.TIME, "ms", "1.205") + row.format(1, toollogs.SHARES["dram"], "%", "n/a")
    rows = toollogs.ncu_rows(text)
    assert [r.metrics[toollogs.TIME] for r in rows] == [1205.0, pytest.approx(1205.0)]
    found = toollogs.counters(rows, calls=2)
    assert found is not None and found.us == pytest.approx(1205) and found.load == {"dram": 0.8}


PERMISSION = """\
==PROF== Connected to process 20101 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0.
==PROF== Disconnected from process 20101
==WARNING== No kernels were profiled.
"""


@pytest.mark.parametrize("text, said", [
    (PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
    ("==ERROR== Failed to find metric regex:^sm__nothing(\\..*)?$\n", "does not know the metric"),
    ("==ERROR== Cuda driver is not compatible with Nsight Compute\n", "not compatible"),
    ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "no kernel was launched"), ("", "")])
def test_why_there_are_no_counters(text, said):
    assert toollogs.ncu_rows(text) == [] and toollogs.counters([]) is None
    assert said in toollogs.ncu_problem(text) and bool(said) == bool(toollogs.ncu_problem(text))


@pytest.mark.parametrize("text", ['"ID","Kernel Name"\n"' + "x" * 3_000_000 + '"\n', '"Kernel Name"\n"a","b"\n"",\n',
                                  '"ID","Kernel Name","' + toollogs.TIME + '"\n"","","ns"\n"0","k","inf"\n"1","k","-4"\n'])
def test_broken_tables_give_nothing(text):
    assert toollogs.counters(toollogs.ncu_rows(text)) is None
