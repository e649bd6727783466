"""CUDA C++ is compiled at run time: for which GPUs, and what is said where it cannot be."""

from __future__ import annotations

import pytest
from cuda.bindings import nvrtc

from compute.kernels import attention_rows, panels, strips
from compute.kernels.cuda_source import compiled
from compute.kernels.topk_cluster import DEFINES
from protocol.errors import NoDevice


def _has_nvrtc() -> bool:
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:
        return False
    return True


NVRTC = _has_nvrtc()
needs_nvrtc = pytest.mark.skipif(not NVRTC, reason="needs NVRTC, which torch's builds for CUDA bring")


def _defines(cluster: int, **changed: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((DEFINES | {"CLUSTER": cluster} | changed).items()))


@needs_nvrtc
@pytest.mark.parametrize("cluster", [8, 16])
def test_the_selection_compiles(cluster: int) -> None:
    assert compiled("topk_cluster", (9, 0), _defines(cluster)).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize("name", strips.SOURCES)
def test_products_of_few_rows_compile(name: str) -> None:
    of_teams = [{"ROWS": rows, "STAGES": stages} for rows in (8, 16) for stages in (2, 3)]
    for some in of_teams if name.startswith("team") else [{"ROWS": rows} for rows in (1, 2, 4)]:
        defines = {"THREADS": 256, "SPLITS": 4, "FLOAT_OUT": 1, "CHOICES": 8, "SHARED": 1}
        defines = strips.launch_defines(defines | some)
        assert compiled(name, (9, 0), tuple(sorted(defines.items()))).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize(
    ("split", "rows"), [(False, 64), (True, 64), (False, 96), (True, 96), (False, 128), (True, 128), (False, 160)]
)
@pytest.mark.parametrize("name", panels.SOURCES)
def test_products_of_many_rows_compile(name: str, split: bool, rows: int) -> None:
    defines = panels.launch_defines(panels.tuned(split, rows) | {"FLOAT_OUT": 1, "COUNT": panels.MOST_EXPERTS})
    assert defines["SHARED_BYTES"] <= 227 << 10
    assert compiled(name, (9, 0), tuple(sorted(defines.items()))).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize("bfloat16", [0, 1])
def test_attention_compiles(bfloat16: int) -> None:
    defines = attention_rows.DEFINES | {"SPLITS": 16, "BLOCKS": 1, "BFLOAT16_QUERY": bfloat16}
    assert compiled("attention_rows", (9, 0), tuple(sorted(defines.items()))).startswith(b"\x7fELF")


@needs_nvrtc
def test_what_does_not_compile_is_said() -> None:
    with pytest.raises(
        NoDevice, match=r"topk_cluster.cu cannot be compiled for compute capability 9.0: .*shared memory"
    ):
        compiled("topk_cluster", (9, 0), _defines(16, SHARED_BYTES=1024))


@pytest.mark.skipif(NVRTC, reason="NVRTC is here")
def test_without_nvrtc_the_library_is_named() -> None:
    with pytest.raises(NoDevice, match="libnvrtc"):
        compiled("topk_cluster", (9, 0), _defines(16))
