"""What is said of the logs of compute-sanitizer: errors by kernel, failed calls apart, and nothing lost."""

from __future__ import annotations

import importlib
import pkgutil
import stat
import sys
from pathlib import Path

import pytest

import compute.kernels
from tests.kernels import sanitize
from tests.kernels.sanitize import Findings
from tests.kernels.sanitized_run import PARTS

BACKTRACE = """\
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: run_step in sanitized_run.py:77
========="""
READ = f"""\
========= Invalid __global__ read of size 4 bytes
=========     at _copy_kernel+0x1b0 in stage.py:112
=========     by thread (5,0,0) in block (1,0,0)
=========     Access at 0x7f3c00a01000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c00a00000 of size 4096 bytes
{BACKTRACE}
"""
CALL = f"""\
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "bad argument" on CUDA API call to cuFuncSetAttribute.
{BACKTRACE}
"""
HAZARD = """\
========= Error: Race reported between Write access at topk_cluster+0x220 in topk_cluster.cu:90
=========     and Read access at topk_cluster+0x290 in topk_cluster.cu:95 [16 hazards]
=========
"""
START = "========= COMPUTE-SANITIZER\n"


def test_errors_are_counted_by_kernel_and_calls_apart() -> None:
    found = Findings.of(f"{START}{READ}{READ}{CALL}========= ERROR SUMMARY: 3 errors\n")
    assert found.kernels == {("_copy_kernel", "Invalid __global__ read"): 2}
    assert found.calls == {("cuFuncSetAttribute", "CUDA_ERROR_INVALID_VALUE"): 1}
    assert not found.clean
    assert str(found).splitlines() == [
        "     2 _copy_kernel: Invalid __global__ read",
        "     1 failed calls of cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE",
    ]


@pytest.mark.parametrize(
    ("log", "clean", "said"),
    [
        (f"{START}========= ERROR SUMMARY: 0 errors\n", True, "0 errors"),
        (f"{START}{CALL}========= ERROR SUMMARY: 1 error\n", True, "failed calls of cuFuncSetAttribute"),
        (f"{START}{READ}========= ERROR SUMMARY: 34 errors\n", False, "33 more that the log does not list"),
        (f"{START}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True, "0 errors"),
        (
            f"{START}{HAZARD}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
            False,
            "topk_cluster",
        ),
        (
            f"{START}========= Barrier error detected.\n=========     at 0x90 in f(int)\n=========\n",
            False,
            "f: Barrier",
        ),
        ("", False, "did not get to its end"),
    ],
)
def test_what_counts(log: str, clean: bool, said: str) -> None:
    found = Findings.of(log)
    assert found.clean == clean
    assert said in str(found)


def test_each_tool_has_its_log_and_the_status_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a program in the sanitizer's place that writes a log with an error for memcheck, and does not run ours."""
    monkeypatch.setattr(sanitize, "LOGS", tmp_path / "logs")
    fake = tmp_path / "sanitizer"
    fake.write_text(
        f"#!{sys.executable}\nimport sys\na = sys.argv\nbad = a[a.index('--tool') + 1] == 'memcheck'\n"
        f"open(a[a.index('--log-file') + 1], 'w').write({START!r} + ({READ!r} if bad else '')\n"
        "  + f'========= ERROR SUMMARY: {int(bad)} errors\\n')\n"
        "print(*a[1:])\n"
    )
    monkeypatch.setattr(sys, "executable", "true")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    assert sanitize.main(["--sanitizer", str(fake)]) == 1
    out = capfd.readouterr().out
    assert "1 _copy_kernel: Invalid __global__ read" in out
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(f"{t}.log" for t in sanitize.TOOLS)
    assert sanitize.main(["--sanitizer", str(fake), "--tool", "racecheck", "--only", "_copy_kernel"]) == 0
    assert "--kernel-name kernel_name=_copy_kernel true -m tests.kernels.sanitized_run --only" in capfd.readouterr().out


def test_every_module_with_a_kernel_is_in_a_part() -> None:
    modules = set()
    for module in pkgutil.iter_modules(compute.kernels.__path__):
        source = Path(importlib.import_module(f"compute.kernels.{module.name}").__file__ or "").read_text()
        if "tl.program_id(" in source or "gl.program_id(" in source or "CudaKernel(" in source:
            modules.add(module.name)
    assert modules - {"triton_support", "assign"} == {name for part in PARTS for name in part.modules}
