// Selections by the cluster's kernel on a host. Reads int32 rows, k, columns, seed; then int64 lengths [rows], float32
// scores [rows, columns], int32 maxima [rows, 4096]; writes int32 selections [rows, k] and the maxima. Each tensor is
// heap memory of just its size.
#include "topk_cluster.cu"

template <typename Type> static Type *read_all(size_t count) {
    Type *values = (Type *)malloc(count * sizeof(Type));
    if (fread(values, sizeof(Type), count, stdin) != count) abort();
    return values;
}

int main() {
    int *head = read_all<int>(4), rows = head[0], k = head[1], columns = head[2];
    long long *lengths = read_all<long long>(rows);
    float *scores = read_all<float>((size_t)rows * columns);
    int *maxima = read_all<int>((size_t)rows * CLASSES);
    int *selection = (int *)malloc(sizeof(int) * rows * k);
    memset(selection, 0x77, sizeof(int) * rows * k);
    for (int row = 0; row < rows; ++row)
        host::run({0, unsigned(row)}, CLUSTER, THREADS, head[3],
                  [&] { topk_cluster(scores, lengths, maxima, selection, columns, k); });
    fwrite(selection, sizeof(int), (size_t)rows * k, stdout);
    fwrite(maxima, sizeof(int), (size_t)rows * CLASSES, stdout);
    free(head), free(lengths), free(scores), free(maxima), free(selection);
}
