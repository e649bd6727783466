"""The decoder at speed: weights in bfloat16 or FP8, every step a recorded graph. `compute.model` defines what is right.

``weights`` is what a model consists of, from a seed or from files.
"""
