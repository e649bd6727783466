// Attention of many query rows on a host. Reads int32 number of selectable rows, query rows, heads, k, blocks and seed,
// float32 scale; then those rows of float16, int32 numbers of selected ones [.., k], -1 where empty, 2-byte queries
// [rows, heads, 512] and [rows, heads, 64]. Writes float16 [rows, splits, heads, 512] and float32 [rows, splits, heads,
// 2]. Each tensor is heap memory of just its size.
#include "attention_rows.cu"

template <typename Type> static Type *read_all(size_t count) {
    Type *values = (Type *)aligned_alloc(16, (count * sizeof(Type) + 15) / 16 * 16);
    if (fread(values, sizeof(Type), count, stdin) != count) abort();
    return values;
}
template <typename Type> static void write_all(Type *values, size_t count) {
    fwrite(values, sizeof(Type), count, stdout);
    free(values);
}

int main() {
    int *head = read_all<int>(6), count = head[0], rows = head[1], heads = head[2], k = head[3];
    float *scale = read_all<float>(1);
    unsigned short *halves = read_all<unsigned short>((size_t)count * ROW_BYTES / 2);
    int *selection = read_all<int>((size_t)rows * k);
    unsigned short *latent = read_all<unsigned short>((size_t)rows * heads * DIMS);
    unsigned short *rope = read_all<unsigned short>((size_t)rows * heads * ROPE_DIMS);
    size_t entries = (size_t)rows * SPLITS * heads;
    unsigned short *partial = (unsigned short *)aligned_alloc(16, entries * DIMS * 2);
    float *softmax = (float *)malloc(entries * 8);
    memset(partial, 0xff, entries * DIMS * 2);
    memset(softmax, 0xff, entries * 8);
    host::grid = {(unsigned)head[4], 1};
    host::run({0, 0}, head[4], THREADS, head[5], [&] {
        attention_rows(selection, halves, latent, rope, partial, softmax, rows, heads, k, *scale);
    });
    write_all(partial, entries * DIMS);
    write_all(softmax, entries * 2);
    free(head), free(scale), free(halves), free(selection), free(latent), free(rope);
}
