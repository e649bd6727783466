// The words of compute/kernels/attention_words.cuh for a host: see host.cuh. Products are made a while after the warp
// has begun to wait for them; operands that have changed since they were begun are an error.
#pragma once

#include <unordered_map>

#include "host.cuh"

struct Arrivals { short expected, missing; int times; };
typedef const unsigned char *Operand;

namespace host {

inline float of_half(unsigned bits) {
    unsigned short own = bits;
    _Float16 value;
    memcpy(&value, &own, 2);
    return value;
}
inline unsigned half_of(float value) {
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
// Of shared memory, swizzled: the float16 in a column of a row of 64 of them.
inline float at(Operand first, int row, int column) {
    uintptr_t address = (uintptr_t)first + row * 128 + column * 2;
    return of_half(*(const unsigned short *)(address ^ (address >> 7 & 7) << 4));
}
struct Products {
    float *sum;
    Operand a, b;
    int columns;
    bool add;
    uint64_t begun_with = 0;

    float of_b(int k, int column) const {
        return columns == 64 ? at(b, column, k) : at(b + column / 64 * 8192, k, column % 64);
    }
    uint64_t operands() const {  // as a number
        uint64_t number = 0;
        for (int k = 0; k < 16; ++k) {
            for (int row = 0; row < 64; ++row) number = number * 31 + __float_as_int(at(a, row, k));
            for (int column = 0; column < columns; ++column) number = number * 31 + __float_as_int(of_b(k, column));
        }
        return number;
    }
};
struct Products_of_thread {
    std::vector<std::vector<Products>> groups{1};  // the last is not ended yet
    unsigned waits = 0;
};
inline std::unordered_map<Thread *, Products_of_thread> products;
inline void make(const Products &products) {
    if (threadIdx.x % 128 == 0 && products.operands() != products.begun_with) fail("an operand that changed");
    for (int i = 0; i < products.columns / 2; ++i) {
        int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        float sum = products.add ? products.sum[i] : 0.0f;
        for (int k = 0; k < 16; ++k)
            sum += at(products.a, row, k) * products.of_b(k, column);
        products.sum[i] = sum;
    }
}
inline void linger(int turns) {
    for (; turns; --turns, ++progress) swapcontext(&self->context, &scheduler);
}
inline void await_products(size_t pending) {
    auto &own = products[self].groups;
    unsigned drawn = (++products[self].waits + (blockIdx.x * 3 + threadIdx.x / 128) * 40503u) * 2654435761u;
    linger((drawn >> 16 & 1) * 150);  // now and then, each warpgroup by itself
    for (; own.size() - 1 > pending; own.erase(own.begin()))
        for (const Products &some : own.front()) make(some);
    of_warp(0);
}

}  // namespace host

inline float __shfl_xor_sync(unsigned, float value, int lanes) {
    return host::of_warp(value)[threadIdx.x % 32 ^ lanes];
}
inline void init(Arrivals *own, int expected) { *own = {(short)expected, (short)expected, 0}; }
inline void publish_arrivals() {}
inline void arrive(Arrivals *own) {
    if (--own->missing == 0) own->missing = own->expected, ++own->times;
}
inline void await(Arrivals *own, int parity) {
    host::await([=] { return own->times % 2 != parity; });
}
inline void publish_to_matrix_unit() {}
template <int registers> void take_registers() {}
template <int registers> void give_registers() {}

inline void bring(long long from, int bytes) {
    if (from % 16 || bytes % 16) host::fail("bytes that are not aligned");
}
inline void copy(uint4 *to, const void *from, bool present) { *to = present ? *(const uint4 *)from : uint4{0, 0, 0, 0}; }
inline void await_copies() {}

inline float exp2_of(float value) { return std::exp2(value); }
inline float quotient_of(float dividend, float divisor) { return dividend / divisor; }
inline unsigned halves_of(float low, float high) { return host::half_of(low) | host::half_of(high) << 16; }
inline void scaled_halves(unsigned word, unsigned scale, unsigned &low, unsigned &high) {
    float values[4];
    for (int i = 0; i < 4; ++i) values[i] = (signed char)(word >> 8 * i) * host::of_half(scale);
    low = halves_of(values[0], values[1]);
    high = halves_of(values[2], values[3]);
}

inline Operand by_columns(const void *own) { return (Operand)own; }
inline Operand by_rows(const void *own) { return (Operand)own; }
inline Operand moved(Operand operand, int bytes) { return operand + bytes; }
template <int count> void begin_products(float (&)[count]) { host::of_warp(0); }
inline void end_products() { host::products[host::self].groups.emplace_back(); }
template <int pending, int count> void await_products(float (&)[count]) { host::await_products(pending); }
template <int count> void multiply(float (&sum)[count], Operand a, Operand b, bool add) {
    host::Products some = {sum, a, b, 2 * count, add};
    if (threadIdx.x % 128 == 0) some.begun_with = some.operands();
    host::products[host::self].groups.back().push_back(some);
}
