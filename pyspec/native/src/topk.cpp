#include "topk.h"

#include <algorithm>
#include <cmath>

namespace pyspec {

int32_t argmax(const float * logits, int32_t n) {
    // Two passes vectorise; a single one that carries the index does not.
    float best = logits[0];
    for (int32_t i = 1; i < n; ++i) {
        best = logits[i] > best ? logits[i] : best;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (logits[i] == best) {
            return i;
        }
    }
    return 0; // only NaN
}

void TopK::operator()(const float * logits, int32_t n, int32_t k, int32_t * tokens, float * log_probs) {
    const auto better = [logits](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    // A heap of the k best so far, the worst of them on top: one comparison for nearly every logit.
    heap.resize(k);
    for (int32_t i = 0; i < k; ++i) {
        heap[i] = i;
    }
    std::make_heap(heap.begin(), heap.end(), better);
    float worst = logits[heap.front()];
    for (int32_t i = k; i < n; ++i) {
        if (logits[i] > worst) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = i;
            std::push_heap(heap.begin(), heap.end(), better);
            worst = logits[heap.front()];
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);

    const float max = logits[heap[0]];
    double      sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp(logits[i] - max);
    }
    const float log_sum = (float) std::log(sum);
    for (int32_t i = 0; i < k; ++i) {
        tokens[i]    = heap[i];
        log_probs[i] = logits[heap[i]] - max - log_sum;
    }
}

} // namespace pyspec
