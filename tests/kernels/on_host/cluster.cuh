// The words of compute/kernels/cluster.cuh for a host: one cluster of thread blocks. See host.cuh.
#pragma once

#include "host.cuh"

#define APART

struct Arrival { int phase, pending, bytes; };

namespace host {

inline void arrived(Arrival *at) {
    if (at->pending == 0 && at->bytes == 0) at->phase ^= 1, at->pending = 1;
}

}  // namespace host

inline void cluster_arrive() { host::self->cluster_generation = host::arrive(host::cluster, host::threads_of_cluster()); }
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() { host::leave(host::cluster, host::self->cluster_generation); }
inline void cluster_barrier() { cluster_arrive(), cluster_wait(); }
inline void store_remote(int2 *own, unsigned rank, int2 value) { *host::in_block(own, rank) = value; }
inline void add_remote(int *own, unsigned rank, int value) { *host::in_block(own, rank) += value; }
inline void init_arrival(Arrival *own) { *own = {0, 1, 0}; }
inline void publish_arrivals() {}
inline void expect_bytes(Arrival *own, int bytes) {
    if (own->pending != 1) host::fail("a barrier in shared memory that nobody is expected at");
    own->pending = 0, own->bytes += bytes;
    host::arrived(own);
}
inline void send(int2 *own, unsigned rank, int2 value, Arrival *arrival) {
    *host::in_block(own, rank) = value;
    Arrival *at = host::in_block(arrival, rank);
    at->bytes -= sizeof value;
    host::arrived(at);
}
inline void await_bytes(Arrival *own, int phase) {
    host::await([=] { return own->phase != phase; });
}
inline int4 load_fresh(const int4 *address) { return *address; }
