#include "topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pyspec {

namespace {

constexpr int32_t n_block   = 64;           // logits that are looked at together
constexpr int32_t n_stretch = 16 * n_block; // logits that fit the L1 cache

// Adds exp(x[j]) to sums[j], for n_block values x from -87 to 0, in operations that vectorise: exp(x) = 2^n exp(f), f at
// most half of log(2) off 0, where the Taylor polynomial of degree 6 is within 2e-7.
void add_exp(const float * x, float * sums) {
    for (int32_t j = 0; j < n_block; ++j) {
        const int32_t n    = (int32_t) (x[j] * 1.44269504f - 0.5f);
        const float   f    = (x[j] - (float) n * 0.693359375f) + (float) n * 2.12194440e-4f; // log(2) in two parts
        const int32_t bits = (n + 127) << 23;
        float         scale;
        std::memcpy(&scale, &bits, sizeof(scale));

        float p = 1.0f / 720;
        p = 1.0f / 120 + f * p;
        p = 1.0f / 24 + f * p;
        p = 1.0f / 6 + f * p;
        p = 0.5f + f * p;
        p = 1.0f + f * p;
        sums[j] += (1.0f + f * p) * scale;
    }
}

double sum_of_exp(const float * logits, int32_t n, float max) {
    double total = 0.0;
    for (int32_t first = 0; first < n; first += n_stretch) {
        const int32_t end          = std::min(first + n_stretch, n);
        float         sums[n_block] = { 0.0f };
        for (int32_t i = first; i < end; i += n_block) {
            float x[n_block];
            if (end - i < n_block) {
                std::fill(x, x + n_block, -87.0f); // 1.6e-38
            }
            for (int32_t j = 0; j < std::min(n_block, end - i); ++j) {
                const float d = logits[i + j] - max;
                x[j]          = d > -87.0f ? d : -87.0f;
            }
            add_exp(x, sums);
        }
        for (float sum : sums) {
            total += sum;
        }
    }
    return total;
}

// The largest of n logits, NaN aside; -INFINITY if there is none. A single running maximum does not vectorise: every
// comparison would wait for the one before.
float maximum(const float * logits, int32_t n) {
    float most[n_block];
    std::fill(most, most + n_block, -INFINITY);
    int32_t i = 0;
    for (; i + n_block <= n; i += n_block) {
        for (int32_t j = 0; j < n_block; ++j) {
            most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
        }
    }
    for (; i < n; ++i) {
        most[0] = logits[i] > most[0] ? logits[i] : most[0];
    }
    for (int32_t width = n_block / 2; width > 0; width /= 2) {
        for (int32_t j = 0; j < width; ++j) {
            most[j] = most[j + width] > most[j] ? most[j + width] : most[j];
        }
    }
    return most[0];
}

bool any_above(const float * logits, int32_t n, float least) {
    int32_t count = 0;
    for (int32_t j = 0; j < n; ++j) {
        count += logits[j] > least;
    }
    return count > 0;
}

} // namespace

int32_t argmax(const float * logits, int32_t n) {
    float   best  = -INFINITY;
    int32_t first = 0;
    for (int32_t i = 0; i < n; i += n_stretch) {
        const float most = maximum(logits + i, std::min(n_stretch, n - i));
        if (most > best) {
            best  = most;
            first = i;
        }
    }
    const float * end   = logits + std::min(first + n_stretch, n);
    const float * found = std::find(logits + first, end, best);
    return found == end ? 0 : (int32_t) (found - logits);
}

const int32_t * TopK::select(const float * logits, int32_t n, int32_t k) {
    const auto value  = [logits](int32_t i) { return std::isnan(logits[i]) ? -INFINITY : logits[i]; };
    const auto better = [value](int32_t a, int32_t b) {
        return value(a) > value(b) || (value(a) == value(b) && a < b);
    };
    // A heap of the k best so far, the worst of them on top: one comparison for nearly every block.
    heap.resize(k);
    for (int32_t i = 0; i < k; ++i) {
        heap[i] = i;
    }
    std::make_heap(heap.begin(), heap.end(), better);
    float worst = value(heap.front());
    for (int32_t i = k; i < n; i += n_block) {
        const int32_t end = std::min(i + n_block, n);
        if (!any_above(logits + i, end - i, worst)) {
            continue;
        }
        for (int32_t j = i; j < end; ++j) {
            if (logits[j] > worst) {
                std::pop_heap(heap.begin(), heap.end(), better);
                heap.back() = j;
                std::push_heap(heap.begin(), heap.end(), better);
                worst = value(heap.front());
            }
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap.data();
}

void TopK::operator()(const float * logits, int32_t n, int32_t k, int32_t * tokens, float * log_probs) {
    const int32_t * best    = select(logits, n, k);
    const float     max     = logits[best[0]];
    const float     log_sum = (float) std::log(sum_of_exp(logits, n, max));
    for (int32_t i = 0; i < k; ++i) {
        tokens[i]    = best[i];
        log_probs[i] = logits[best[i]] - max - log_sum;
    }
}

} // namespace pyspec
