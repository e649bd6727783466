// The words of compute/kernels/attention_words.cuh for a host: see host.cuh. Copies arrive as late as they may, when
// those have that are waited for together, and until then there is NaN; products are made a while after the warp has
// begun to wait for them, and operands that have changed since they were begun are an error.
#pragma once

#include <unordered_map>
#include <utility>

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
    Operand a, b;  // a is null where it is in registers
    int columns;
    bool add;
    const unsigned *words = nullptr;  // of a in registers
    float of_words[2][16] = {};       // the thread's rows
    uint64_t begun_with = 0;

    float of_a(int i, int row, int k) const { return a ? at(a, row, k) : of_words[i / 2 % 2][k]; }
    float of_b(int k, int column) const {
        return columns == 64 ? at(b, column, k) : at(b + column / 64 * 8192, k, column % 64);
    }
    uint64_t operands() const {  // as a number
        uint64_t number = 0;
        for (int k = 0; k < 16; ++k) {
            for (int row = 0; a && row < 64; ++row) number = number * 31 + __float_as_int(at(a, row, k));
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
struct Copy_of_16 { unsigned char *to; const char *from; };
inline std::unordered_map<Thread *, std::vector<Copy_of_16>> own_copies;
inline std::unordered_map<Arrivals *, std::vector<Copy_of_16>> arriving;

inline void make(const Products &products) {
    if (threadIdx.x % 128 == 0 && products.operands() != products.begun_with) fail("an operand that changed");
    for (int i = 0; i < products.columns / 2; ++i) {
        int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        float sum = products.add ? products.sum[i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += products.of_a(i, row, k) * products.of_b(k, column);
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

inline void copy(unsigned char *to, long long from, bool present) {
    if ((uintptr_t)to % 16 || from % 16) host::fail("a copy that is not aligned");
    memset(to, 0xff, 16);
    host::own_copies[host::self].push_back({to, present ? (const char *)from : nullptr});
}
inline void arrive_with_copies(Arrivals *own) {
    auto &copies = host::own_copies[host::self], &arriving = host::arriving[own];
    arriving.insert(arriving.end(), copies.begin(), copies.end());
    copies.clear();
    if (own->missing == 1)
        for (auto [to, from] : std::exchange(arriving, {})) from ? memcpy(to, from, 16) : memset(to, 0, 16);
    arrive(own);
}

inline float exp2_of(float value) { return std::exp2(value); }
inline float quotient_of(float dividend, float divisor) { return dividend / divisor; }
inline unsigned halves_of(float low, float high) { return host::half_of(low) | host::half_of(high) << 16; }

inline Operand by_columns(const void *own) { return (Operand)own; }
inline Operand by_rows(const void *own) { return (Operand)own; }
inline Operand moved(Operand operand, int bytes) { return operand + bytes; }
template <int count> void begin_products(float (&)[count]) { host::of_warp(0); }
inline void begin_products(float (&)[128], unsigned (&)[16]) { host::of_warp(0); }
inline void end_products() { host::products[host::self].groups.emplace_back(); }
template <int pending, int count> void await_products(float (&)[count]) { host::await_products(pending); }
template <int count> void multiply(float (&sum)[count], Operand a, Operand b, bool add) {
    host::Products some = {sum, a, b, 2 * count, add};
    if (threadIdx.x % 128 == 0) some.begun_with = some.operands();
    host::products[host::self].groups.back().push_back(some);
}
inline void multiply(float (&sum)[128], const unsigned *a, Operand b, bool add) {
    host::Products some = {sum, nullptr, b, 256, add, a};
    std::array<unsigned, 4> words;
    memcpy(&words, a, sizeof words);
    auto lanes = host::of_warp(words);
    for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half)
            some.of_words[half][k] = host::of_half(
                lanes[threadIdx.x % 32 / 4 * 4 + k / 2 % 4][k / 8 * 2 + half] >> k % 2 * 16);
    if (threadIdx.x % 128 == 0) some.begun_with = some.operands();
    host::products[host::self].groups.back().push_back(some);
}
