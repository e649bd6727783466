"""One model on several processes: pipeline stages over nodes, and tensor parallelism over the devices of a node.

    grid        which rank does what, and the process groups between ranks
    peers       messages and tensors within a group, with time-outs and typed errors
    team        what all ranks do or none
    stages      a range of layers on each stage, activations from one to the next
    splitting   heads and experts' inner dimensions cut into shards, partial results added in one order
    sessions    a session on all ranks: one host copy for each stage, one committed row for all
    worker      `compute.worker.Worker` over all of it

All ranks run the same calls in the same order, under ``torchrun``. docs/parallel.md tells how it is used.
"""
