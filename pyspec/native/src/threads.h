// Threads of the CPU backend.
#pragma once

#include <cstdint>

struct ggml_threadpool;
struct llama_context;

namespace pyspec {

// Physical cores this process may run on (performance cores on a Mac), at least 1.
int32_t physical_cores();

// A pool of worker threads that outlives single forward passes, so that none is started per pass.
class ThreadPool {
public:
    explicit ThreadPool(int32_t n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &)             = delete;
    ThreadPool & operator=(const ThreadPool &) = delete;

    void attach(llama_context * ctx) const;

private:
    ggml_threadpool * pool = nullptr;
    void (*free_pool)(ggml_threadpool *) = nullptr;
};

// The threads of a context's passes; llama.cpp is told of changes only.
class ContextThreads {
public:
    // n: threads of a pass of one token; n_batch: of several.
    void use(llama_context * ctx, int32_t n, int32_t n_batch);

private:
    int32_t used[2] = { 0, 0 };
};

} // namespace pyspec
