"""Run every kernel under the tools of compute-sanitizer, and say in which kernels they found errors.

Logs are kept whole in build/sanitize/, one for each tool. The status is 1 if a kernel has an error, or if a tool or the
program did not get to its end. A CUDA call that failed is listed apart and is no error of a kernel: where one matters
the program raises, and ends with a status of its own. (``cuda-bindings`` asks the driver for every function of the
newest CUDA; that an older driver has not got some is not listed.)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LOGS = Path("build/sanitize")
OPTIONS = {"memcheck": ["--ignore-getprocaddress-notfound", "--destroy-on-device-error", "kernel"]}
"""So that the kernels after one with an error are looked at too."""
PRINTED = 1000
"""Errors of a tool that are written to its log; all are counted."""

_KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in )?([^\s(+]+)(?:\(.*\))?(?:\+0x[0-9a-f]+| in |:|$)")
_FAILED_CALL = re.compile(r"Program hit (\w+) .*on CUDA API call to (\w+)")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed \((\d+) errors?)")
_NOTES = (
    "COMPUTE-SANITIZER",
    "LEAK SUMMARY",
    "Target application",
    "Error: process didn't terminate",
    "WARN",
    "Warning",
)


@dataclass
class Findings:
    """What a tool's log says."""

    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Errors by kernel and kind."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed calls by function and error."""
    total: int | None = None
    """Errors and failed calls that the tool counted; None if it did not get to its end."""

    @classmethod
    def of(cls, log: str) -> Findings:
        found = cls()
        records = re.split(r"^========= ?$", log, flags=re.MULTILINE)
        for record in records:
            lines = [line.removeprefix("========= ") for line in record.splitlines() if line.startswith("========= ")]
            while lines:
                head, *rest = lines
                inner = next((n for n, line in enumerate(rest) if not line.startswith(" ")), len(rest))
                found._add(head, rest[:inner])
                lines = rest[inner:]
        return found

    def _add(self, head: str, details: list[str]) -> None:
        if summary := _SUMMARY.match(head):
            self.total = int(summary[2] or summary[1])
        elif call := _FAILED_CALL.match(head):
            self.calls[call[2], call[1]] += 1
        elif not head.startswith(_NOTES) and " SUMMARY: " not in head:
            at = next((match[1] for line in (head, *details) if (match := _KERNEL.search(line))), "kernel not named")
            self.kernels[at, re.split(r" at | of size ", head)[0].strip()] += 1

    @property
    def clean(self) -> bool:
        """Whether the tool got to its end, and no kernel has an error."""
        return self.total is not None and not self.kernels and self.total <= sum(self.calls.values())

    def __str__(self) -> str:
        lines = [f"{count:6} {kernel}: {kind}" for (kernel, kind), count in self.kernels.most_common()]
        lines += [f"{count:6} failed calls of {name}: {error}" for (name, error), count in self.calls.most_common()]
        listed = sum(self.kernels.values()) + sum(self.calls.values())
        if self.total is None:
            lines.append("       it did not get to its end")
        elif self.total > listed:
            lines.append(f"{self.total - listed:6} more that the log does not list")
        return "\n".join(lines) or "     0 errors"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this tool (may be given several times)")
    parser.add_argument("--only", metavar="KERNEL", help="look at this kernel only, and run only what it needs")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)")
    options = parser.parse_args(arguments)
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor is an allocation of its own
    program = [sys.executable, "-m", "tests.kernels.sanitized_run", *(["--only", options.only] if options.only else [])]
    if (status := subprocess.run([*program, "--list"], check=False, env=environment).returncode) != 0:
        return status
    clean = True
    for tool in options.tool or TOOLS:
        log = LOGS / f"{tool}.log"
        log.unlink(missing_ok=True)
        command = [options.sanitizer, "--tool", tool, "--log-file", str(log), "--print-limit", str(PRINTED)]
        command += OPTIONS.get(tool, [])
        command += ["--kernel-name", f"kernel_name={options.only}"] if options.only else []
        status = subprocess.run([*command, *program], check=False, env=environment).returncode
        found = Findings.of(log.read_text(errors="replace") if log.exists() else "")
        sys.stdout.write(f"{tool}: {log}\n{found}\n")
        if status != 0:
            sys.stdout.write(f"       ended with status {status}\n")
        sys.stdout.flush()
        clean = clean and found.clean and status == 0
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
