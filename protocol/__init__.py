"""What the daemon and its clients agree on: bytes in memory, bytes on the wire, and the names of errors.

SPEC.md is the authority. Nothing here imports ``kvd`` or ``compute``, and nothing here imports torch.
"""
