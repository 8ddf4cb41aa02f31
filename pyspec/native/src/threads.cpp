#include "threads.h"

#include "error.h"
#include "log.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#if defined(__APPLE__)
#    include <sys/sysctl.h>
#elif defined(__linux__)
#    include <sched.h>
#endif

namespace pyspec {

int32_t physical_cores() {
#if defined(__APPLE__)
    for (const char * name : { "hw.perflevel0.physicalcpu", "hw.physicalcpu" }) {
        int32_t n    = 0;
        size_t  size = sizeof(n);
        if (sysctlbyname(name, &n, &size, nullptr, 0) == 0 && n > 0) {
            return n;
        }
    }
#elif defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
        std::set<std::string> cores; // hyperthreads of one core list the same siblings
        int32_t               n_allowed = 0;
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &allowed)) {
                continue;
            }
            ++n_allowed;
            std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
            std::string   siblings;
            if (std::getline(file, siblings)) {
                cores.insert(siblings);
            }
        }
        if (!cores.empty()) {
            return (int32_t) cores.size();
        }
        if (n_allowed > 0) {
            return n_allowed;
        }
    }
#endif
    return std::max(1, (int32_t) std::thread::hardware_concurrency());
}

ThreadPool::ThreadPool(int32_t n_threads) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : nullptr;
    if (!reg) {
        return; // llama.cpp starts its own threads then
    }
    auto new_pool = (decltype(ggml_threadpool_new) *) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new");
    free_pool     = (decltype(ggml_threadpool_free) *) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free");
    if (!new_pool || !free_pool) {
        return;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    pool                          = new_pool(&params);
    if (!pool) {
        fail(PYSPEC_ERR_MEMORY, "cannot start %d threads", n_threads);
    }
}

ThreadPool::~ThreadPool() {
    if (pool) {
        free_pool(pool);
    }
}

void ThreadPool::attach(llama_context * ctx) const {
    if (pool) {
        llama_attach_threadpool(ctx, pool, pool);
    }
}

void ContextThreads::use(llama_context * ctx, int32_t n, int32_t n_batch) {
    if (n != used[0] || n_batch != used[1]) {
        const LogScope log; // it tells
        llama_set_n_threads(ctx, n, n_batch);
        used[0] = n;
        used[1] = n_batch;
    }
}

} // namespace pyspec
