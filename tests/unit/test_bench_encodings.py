"""The table of encodings: what is exact is exact, and the order is what the bits allow."""

from __future__ import annotations

import argparse

from benchmarks import encodings


def test_errors_of_all_encodings() -> None:
    report = encodings.run(argparse.Namespace(tokens=96, seed=1, only=""))
    errors = {row.case: row.value for row in report.rows}
    assert len(errors) == 4 * 3
    for case, error in errors.items():
        if "f32" in case:
            assert error == 0
        else:
            assert 0.1 < error < 10
    for case in ("random", "demo model, layer 0", "demo model, layer 6"):
        assert errors[f"{case}: q8g64, 656 bytes a row"] < errors[f"{case}: fp8_ds_mla, 656 bytes a row"]
