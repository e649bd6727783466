"""An explanation of where memory is, for people."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.stat.explain import DeviceTerms, Explanation, HostTerms, ProcessTerms
from kvd.units import format_bytes


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """A sum for each device, one for host RAM, and the processes."""
    for device in explanation.devices:
        yield from _device(device)
    yield from _host(explanation.host)


def _device(terms: DeviceTerms) -> Iterator[str]:
    yield f"device {terms.device}: {_size(terms.in_use)} in use"
    yield _term("committed by the daemon", terms.committed)
    yield _term("reserved by workers' torch", terms.torch_reserved)
    yield _term("contexts of workers", terms.contexts)
    yield _term("the driver's own", terms.driver)
    yield _term("kept for the daemon", terms.daemon)
    yield _term("unexplained", terms.unexplained)
    if terms.others:
        yield _term("  of which other programs'", terms.others)
    if terms.silent:
        yield f"  {terms.silent} leases do not report what they have beside the daemon's memory"


def _host(terms: HostTerms) -> Iterator[str]:
    yield f"host RAM: {_size(terms.in_use)} of shared memory in use, {_size(terms.shm)} of it the daemon's"
    yield _term("committed by the daemon", terms.committed)
    yield _term("unexplained", terms.unexplained)
    yield "beside that"
    yield _term("page tables of these processes", terms.page_tables)
    yield _term("page cache of saved sessions", terms.saved_page_cache)
    for process in terms.processes:
        yield f"  process {process.pid}, {_owner(process)}"
        yield _term("  page tables", process.page_tables)
        yield _term("  resident, anonymous", process.rss_anon)
        yield _term("  resident, of files", process.rss_file)
        yield _term("  resident, of shared memory", process.rss_shmem)


def _owner(process: ProcessTerms) -> str:
    return f"lease {process.lease}, {process.client}" if process.lease else process.client


def _term(name: str, nbytes: int | None) -> str:
    return f"  {name:<32}{_size(nbytes):>16}"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)
