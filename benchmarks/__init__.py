"""Benchmarks: ``kvd-bench <bench>`` prints a table, or with ``--json`` one object, of figures beside their floors."""
