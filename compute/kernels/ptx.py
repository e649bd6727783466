"""What kernels say in PTX because Triton has no word for it, each with a portable form of the same meaning."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.triton_support import INTERPRETED

PTX = not INTERPRETED and torch.version.hip is None
"""Kernels are compiled for NVIDIA; what their parameter ``PTX`` is given."""


@triton.jit
def scaled_halves(values, scales, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8 ``values`` times float16 ``scales`` of the same shape, in float16.

    In PTX four values take eight instructions: 0x6400 in front of a byte u is the float16 1024 + u, and u is the value
    plus 128. It is not declared pure, so that a value that two products need is not converted twice.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 bytes, low, high;
              xor.b32 bytes, $2, 0x80808080;
              prmt.b32 low, bytes, 0x64646464, 0x4140;
              prmt.b32 high, bytes, 0x64646464, 0x4342;
              sub.f16x2 low, low, $5;
              sub.f16x2 high, high, $5;
              mul.f16x2 $0, low, $3;
              mul.f16x2 $1, high, $4; }
            """,
            "=r,=r,r,r,r,r,r",
            [values, scales, tl.full(values.shape, 1152.0, tl.float16)],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return values.to(tl.float16) * scales


@triton.jit
def halves_of_e4m3(values, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes that are e4m3 as float16, exactly; a NaN byte becomes some finite value unless in PTX."""
    if PTX:
        return values.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = values.to(tl.int16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0  # the exponents' biases are 7 and 15


@triton.jit
def prefetch_lines(addresses, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the L2 cache lines at int64 ``addresses``; no more than a hint."""
    if PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def bfloat16_of_e4m3(words, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 ``words`` of four e4m3 bytes: the first to the fourth as bfloat16, exactly; a NaN becomes ±480.

    The seven bits below the sign, moved to where bfloat16 has exponent and mantissa, are the value times 2**-120. In
    PTX the four take ten instructions, if first and second, and third and fourth, stay together in one register; the
    sign goes from bit 11, where the shift takes it, to bit 15 by an addition of 0x7800.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 low, high, a, b, factors;
              mov.b32 factors, 0x7b807b80;
              prmt.b32 low, $4, 0, 0x4140;
              prmt.b32 high, $4, 0, 0x4342;
              and.b32 a, low, 0x00800080;
              and.b32 b, high, 0x00800080;
              shl.b32 low, low, 4;
              shl.b32 high, high, 4;
              mad.lo.u32 a, a, 0xf0, low;
              mad.lo.u32 b, b, 0xf0, high;
              mul.rn.bf16x2 a, a, factors;
              mul.rn.bf16x2 b, b, factors;
              mov.b32 {$0, $1}, a;
              mov.b32 {$2, $3}, b; }
            """,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    return (
        _bfloat16_of_byte(words),
        _bfloat16_of_byte(words >> 8),
        _bfloat16_of_byte(words >> 16),
        _bfloat16_of_byte(words >> 24),
    )


@triton.jit
def _bfloat16_of_byte(bits):  # type: ignore[no-untyped-def]
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (bits.to(tl.float32, bitcast=True) * 2.0**120).to(tl.bfloat16)
