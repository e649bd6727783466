"""The compute side of kvd: the client of the daemon, the worker, and the kernels and models that it runs.

Workers map memory that the daemon owns and do all arithmetic. Nothing here imports ``kvd``; what both sides must agree
on is in ``protocol``.
"""
