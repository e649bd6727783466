// A launch of a kernel of compute/kernels (SOURCE, its function KERNEL) on a host, cluster by cluster. Reads uint32
// blocks in x and y and a seed, then the kernel's arguments: a number as it is; a tensor as int64 its number of bytes,
// and these. Writes what is in the tensors then. Each is heap memory of just its size.
#include SOURCE

#include <tuple>

#ifndef CLUSTER
#define CLUSTER 1
#endif

static void read_all(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) abort();
}

template <typename Type> struct Argument {
    Type value;
    Argument() { read_all(&value, sizeof value); }
    void finish() {}
};
template <typename Type> struct Argument<Type *> {
    long long bytes;
    Type *value;
    Argument() {
        read_all(&bytes, sizeof bytes);
        value = (Type *)malloc(bytes);
        read_all((void *)value, bytes);
    }
    void finish() {
        fwrite(value, 1, bytes, stdout);
        free((void *)value);
    }
};

template <typename... Types> static void launch(void (*kernel)(Types...)) {
    unsigned head[3];
    read_all(head, sizeof head);
    host::grid = {head[0], head[1]};
    std::tuple<Argument<Types>...> arguments{Argument<Types>()...};  // read from the first to the last
    std::apply(
        [&](auto &...argument) {
            for (unsigned y = 0; y < head[1]; ++y)
                for (unsigned x = 0; x < head[0]; x += CLUSTER)
                    host::run({x, y}, CLUSTER, THREADS, head[2], [&] { kernel(argument.value...); });
            (argument.finish(), ...);
        },
        arguments);
}

int main() { launch(KERNEL); }
