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

} // namespace pyspec
