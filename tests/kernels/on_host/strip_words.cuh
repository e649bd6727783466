// The words of compute/kernels/strip_words.cuh for a host: see host.cuh. Where a copy is on its way to is poisoned, for
// the address sanitizer, until the thread has waited for the copy: nobody can rely on its having come sooner.
#pragma once

#include <sanitizer/asan_interface.h>

#include <map>

#include "host.cuh"

namespace host {

// One of the two bfloat16 of a register.
inline float half_of(unsigned word, int half) { return __int_as_float(half ? word & 0xffff0000 : word << 16); }

inline float of_e4m3(unsigned byte) { return __int_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f; }

inline unsigned short bfloat16_of(float value) {
    unsigned bits = __float_as_int(value);
    return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void copy(uint4 *to, const void *from) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("a copy that is not aligned");
    memcpy(to, from, 16);
    ASAN_POISON_MEMORY_REGION(to, 16);
    self->copies.push_back({to, self->groups_of_copies});
}

}  // namespace host

inline void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct Operands { float a[4][2], b[2][2]; } own;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) own.a[i][half] = host::half_of(a[i], half);
        own.b[0][half] = host::half_of(b0, half);
        own.b[1][half] = host::half_of(b1, half);
    }
    auto lanes = host::of_warp(own);
    for (int i = 0; i < 4; i++) {
        int row = threadIdx.x % 32 / 4 + i / 2 * 8, column = threadIdx.x % 4 * 2 + i % 2;
        for (int part = 0; part < 8; part++) {  // two columns of a, rows of b
            const float *of_a = lanes[row % 8 * 4 + part % 4].a[part / 4 * 2 + row / 8];
            const float *of_b = lanes[column * 4 + part % 4].b[part / 4];
            sum[i] += of_a[0] * of_b[0] + of_a[1] * of_b[1];
        }
    }
}
inline void bfloat16_of_e4m3(unsigned word, unsigned &low, unsigned &high) {
    unsigned short values[4];
    for (int i = 0; i < 4; i++) values[i] = host::bfloat16_of(host::of_e4m3(word >> 8 * i));
    low = values[0] | (unsigned)values[1] << 16;
    high = values[2] | (unsigned)values[3] << 16;
}
inline void copy_once(uint4 *to, const unsigned char *from) { host::copy(to, from); }
inline void copy_shared(uint4 *to, const unsigned short *from) {
    if (!host::self->kernel_before_ended) host::fail("reads what the kernel before may still be writing");
    host::copy(to, from);
}
inline void end_group_of_copies() { ++host::self->groups_of_copies; }
template <int pending> void await_copies() {
    std::erase_if(host::self->copies, [](host::Copy copy) {
        bool done = copy.group < host::self->groups_of_copies - pending;
        if (done) ASAN_UNPOISON_MEMORY_REGION(copy.to, 16);
        return done;
    });
}
// What others wait for stays poisoned until all have arrived; so is what is copied to while another still reads there.
struct Arrivals { short phase, pending, count; };
namespace host {
inline std::map<Arrivals *, std::vector<uint4 *>> arriving;
}
inline void init_arrivals(Arrivals *at, int count) {
    *at = {0, short(count), short(count)};
    host::arriving[at].clear();
}
inline void arrive_with_copies(Arrivals *at) {
    auto &arriving = host::arriving.at(at);
    std::erase_if(host::self->copies, [&](host::Copy copy) {
        bool own = copy.group == host::self->groups_of_copies;
        if (own) arriving.push_back(copy.to);
        return own;
    });
    if (--at->pending > 0) return;
    for (uint4 *to : arriving) ASAN_UNPOISON_MEMORY_REGION(to, 16);
    arriving.clear();
    *at = {short(at->phase ^ 1), at->count, at->count};
}
inline void await_arrivals(Arrivals *at, int phase) {
    host::await([=] { return at->phase != phase; });
}
inline int take_ticket(int *at) { return (*at)++; }
inline unsigned short bfloat16_of(float value) { return host::bfloat16_of(value); }
inline float gated_of(float gate, float up) { return gate / (std::exp(-gate) + 1.0f) * up; }
