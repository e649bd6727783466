"""A decoder with sparse attention (GLM-5, DeepSeek-V3.2) that keeps its history elsewhere.

``decoder`` is the model, ``weights`` makes or reads its tensors, ``tokenizer`` turns bytes into tokens. Where rows and
keys are kept and how they are read back is a `History`; this package never sees a page.
"""
