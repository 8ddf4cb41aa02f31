#include "runtime.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace msl {

memory_hooks *       hooks = nullptr;
running_thread       running;
std::vector<traffic> last_traffic;

// ---------------------------------------------------------------- registries

struct constant_slot {
    const char * file;
    int          index;
    void (*set)(int64_t);
};

static std::map<std::string, kernel_info> & kernels() {
    static std::map<std::string, kernel_info> m;
    return m;
}

static std::vector<constant_slot> & constants() {
    static std::vector<constant_slot> v;
    return v;
}

register_kernel::register_kernel(const char * name, entry run, const char * file, uint32_t buffers) {
    if (!kernels().emplace(name, kernel_info { name, run, file, buffers }).second) {
        fprintf(stderr, "msl: kernel %s is defined twice\n", name);
        abort();
    }
}

register_constant::register_constant(const char * file, int index, void (*set)(int64_t)) {
    constants().push_back({ file, index, set });
}

const kernel_info * find_kernel(const std::string & name) {
    auto it = kernels().find(name);
    return it == kernels().end() ? nullptr : &it->second;
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (auto & k : kernels()) {
        names.push_back(k.first);
    }
    return names;
}

// a constant that the pipeline does not set holds nonsense, as on a GPU
static void set_constants(const pipeline & p) {
    for (auto & slot : constants()) {
        if (strcmp(slot.file, p.kernel->file) == 0) {
            auto it = p.constants.find(slot.index);
            slot.set(it == p.constants.end() ? 0x5a5a5a5a5a5a5a5a : it->second);
        }
    }
}

options options_from_environment() {
    options o;
    const char * order = getenv("MSL_ORDER");
    const char * seed  = getenv("MSL_SEED");
    if (order) {
        o.schedule = strcmp(order, "reverse") == 0 ? order::reverse : strcmp(order, "random") == 0 ? order::random : order::in_order;
    }
    if (seed) {
        o.seed = strtoull(seed, nullptr, 10);
    }
    return o;
}

// ---------------------------------------------------------------- the run in progress

enum class state : uint8_t { ready, in_simd_call, at_simdgroup_barrier, at_threadgroup_barrier, done };

struct fiber {
    thread_info thread;
    state       at = state::done;
    simd_call * call = nullptr;
    source_line where {};
    int         scope = 0;
    char *      stack = nullptr;
#if defined(__x86_64__)
    void *      sp = nullptr;
#else
    ucontext_t  context;
#endif
};

static constexpr size_t STACK = 128*1024, PAGE = 16*1024;

static std::vector<fiber>  fibers;
static size_t              n_stacks;
static char *              stacks;
static fiber *             current;
static const kernel_info * kernel;
static const bindings *    bound;
static options             how;
static counters            counted;
static std::string         error;

static std::vector<char>             array_memory;  // threadgroup arrays declared in kernels
static std::map<std::string, size_t> array_offsets;
static size_t                        array_used, array_limit, array_next;

// ---------------------------------------------------------------- fibers

static void run_kernel() {
    const bindings    b = *bound;           // on this stack, where the memory checker lets threads read
    const thread_info t = current->thread;
    kernel->run(b, t);
}

#if defined(__x86_64__)

// A GPU does not trap on an integer division by zero, it gives some value: kernels compute, and do not use, such ones.
// Steps over the div or idiv and leaves 0.
static void skip_division(int, siginfo_t *, void * context) {
    greg_t * registers = ((ucontext_t *) context)->uc_mcontext.gregs;
    const uint8_t * code = (const uint8_t *) registers[REG_RIP], * start = code;
    while ((*code & 0xf0) == 0x40 || *code == 0x66) {  // prefixes
        code++;
    }
    const uint8_t modrm = code[1], mod = modrm >> 6, rm = modrm & 7;
    if (!running.inside || *code != 0xf7 || (modrm >> 3 & 6) != 6) {
        signal(SIGFPE, SIG_DFL);  // no division of a kernel: the program ends
        return;
    }
    code += 2;
    if (mod != 3 && rm == 4) {
        code += (*code & 7) == 5 && mod == 0 ? 5 : 1;  // with an index register
    }
    code += mod == 1 ? 1 : mod == 2 || (mod == 0 && rm == 5) ? 4 : 0;
    registers[REG_RIP] += code - start;
    registers[REG_RAX] = registers[REG_RDX] = 0;
}

static struct install_skip_division {
    install_skip_division() {
        struct sigaction action {};
        action.sa_sigaction = skip_division;
        action.sa_flags     = SA_SIGINFO;
        sigaction(SIGFPE, &action, nullptr);
    }
} install_skip_division_;

static void * scheduler_sp;

// saves the callee-saved registers and switches stacks
extern "C" void msl_switch(void ** save, void * to);
asm(R"(.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size msl_switch,.-msl_switch
)");

static void to_scheduler()       { fiber * f = current; msl_switch(&f->sp, scheduler_sp); }
static void to_fiber(fiber & f)  { msl_switch(&scheduler_sp, f.sp); }

static void fiber_main() {
    run_kernel();
    current->at = state::done;
    to_scheduler();
    abort();
}

static void prepare(fiber & f) {
    void ** sp = (void **) (f.stack + STACK - f.thread.index*192 % 4096);  // staggered, else all tops share a cache set
    *--sp = nullptr;                 // the entry's stack is misaligned by 8, as after a call
    *--sp = (void *) fiber_main;
    for (int i = 0; i < 6; i++) {
        *--sp = nullptr;
    }
    f.sp = sp;
}

#else

static ucontext_t scheduler_context;

static void to_scheduler()       { swapcontext(&current->context, &scheduler_context); }
static void to_fiber(fiber & f)  { swapcontext(&scheduler_context, &f.context); }

static void fiber_main() {
    run_kernel();
    current->at = state::done;
    to_scheduler();
    abort();
}

static void prepare(fiber & f) {
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link          = nullptr;
    makecontext(&f.context, fiber_main, 0);
}

#endif

void violation(const char * format, ...) {
    if (!error.empty()) {
        return;
    }
    char text[600];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    error = (kernel ? kernel->name : std::string("?")) + ", threadgroup " + std::to_string(running.group) + ": " + text;
    if (current) {
        to_scheduler();  // the access does not happen, the fiber is not resumed
    }
}

static void run(fiber & f) {
    current        = &f;
    running.index  = f.thread.index;
    running.inside = true;
    to_fiber(f);
    running.inside = false;
    current        = nullptr;
}

static void make_fibers(uint32_t n) {
    if (n > n_stacks) {
        if (stacks) {
            munmap(stacks, n_stacks*(STACK + PAGE));
        }
        n_stacks = n;
        stacks   = (char *) mmap(nullptr, n_stacks*(STACK + PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            perror("msl: mmap");
            abort();
        }
        fibers.resize(n);
        for (size_t i = 0; i < n_stacks; i++) {
            mprotect(stacks + i*(STACK + PAGE), PAGE, PROT_NONE);  // a guard below each stack
            fibers[i].stack = stacks + i*(STACK + PAGE) + PAGE;
        }
    }
    running.stacks     = stacks;
    running.stacks_end = stacks + n_stacks*(STACK + PAGE);
}

// ---------------------------------------------------------------- called by kernels

static void wait_at(state at, int scope, source_line where) {
    current->at    = at;
    current->scope = scope;
    current->where = where;
    to_scheduler();
}

void simd_rendezvous(simd_call & call) {
    current->call = &call;
    wait_at(state::in_simd_call, 0, call.where);
}

void simdgroup_barrier(int scope, source_line where)   { wait_at(state::at_simdgroup_barrier,   scope, where); }
void threadgroup_barrier(int scope, source_line where) { wait_at(state::at_threadgroup_barrier, scope, where); }

// Arrays lie apart, so that the memory checker sees an access past the end of one.
void * threadgroup_array(const char * name, size_t size) {
    constexpr size_t gap = 256;
    auto it = array_offsets.find(name);
    if (it == array_offsets.end()) {
        array_used += size;
        if (array_used > array_limit) {
            violation("the threadgroup arrays of the kernel need %zu bytes, %zu are left of %zu", array_used, array_limit, limits::threadgroup_memory);
        }
        it = array_offsets.emplace(name, array_next).first;
        array_next += (size + gap + 15)/16*16;
        if (hooks) {
            hooks->array({ array_memory.data() + it->second, size });
        }
    }
    return array_memory.data() + it->second;
}

// ---------------------------------------------------------------- scheduler

static uint64_t random_state;

static uint32_t random_below(uint32_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t) (random_state >> 32) % n;
}

static std::vector<uint32_t> in_schedule(uint32_t n) {
    std::vector<uint32_t> v(n);
    for (uint32_t i = 0; i < n; i++) {
        v[i] = how.schedule == order::reverse ? n - 1 - i : i;
    }
    if (how.schedule == order::random) {
        for (uint32_t i = n; i > 1; i--) {
            std::swap(v[i - 1], v[random_below(i)]);
        }
    }
    return v;
}

static bool waits_with(const fiber & a, const fiber & b) {
    return a.at == b.at && a.where.line == b.where.line && strcmp(a.where.file, b.where.file) == 0 &&
        (a.at != state::in_simd_call || a.call->resolve == b.call->resolve);
}

// all lanes of a simdgroup wait at the same place
static void resolve(const std::vector<fiber *> & lanes, int simdgroup) {
    fiber & lead = *lanes[0];
    if (lead.at == state::in_simd_call) {
        simd_call * calls[SIMD] = {};
        for (fiber * f : lanes) {
            calls[f->thread.lane] = f->call;
        }
        running.index  = lead.thread.index;  // loads and stores of matrices count as those of the first lane
        running.inside = true;
        lead.call->resolve(calls);
        running.inside = false;
        counted.simdgroup_operations++;
    } else {
        counted.simdgroup_barriers++;
        if (hooks) {
            hooks->barrier(lead.scope, simdgroup);
        }
    }
    for (fiber * f : lanes) {
        f->at = state::ready;
    }
}

// Runs the lanes of a simdgroup up to their next rendezvous. False when all are done or at the threadgroup barrier.
static bool step(int simdgroup, uint32_t n_threads) {
    fiber * first = &fibers[simdgroup*SIMD];
    const uint32_t n = std::min(SIMD, n_threads - simdgroup*SIMD);

    for (uint32_t i : in_schedule(n)) {
        if (first[i].at == state::ready) {
            run(first[i]);
            if (!error.empty()) {
                return false;
            }
        }
    }

    std::vector<fiber *> lanes, others;
    for (uint32_t i = 0; i < n; i++) {
        fiber & f = first[i];
        if (f.at == state::in_simd_call || f.at == state::at_simdgroup_barrier) {
            lanes.push_back(&f);
        } else {
            others.push_back(&f);
        }
    }
    if (lanes.empty()) {
        return false;
    }
    // lanes that run ahead, stay behind or have returned: real lanes would run the call without them
    for (fiber * f : lanes) {
        if (!waits_with(*f, *lanes[0])) {
            others.push_back(f);
        }
    }
    if (!others.empty()) {
        const fiber & a = *lanes[0], & b = *others[0];
        if (b.at == state::done) {
            violation("divergence in simdgroup %d: lane %u is at %s:%d, lane %u has returned", simdgroup, a.thread.lane, a.where.file, a.where.line, b.thread.lane);
        } else {
            violation("divergence in simdgroup %d: lane %u is at %s:%d, lane %u at %s:%d", simdgroup, a.thread.lane, a.where.file, a.where.line, b.thread.lane, b.where.file, b.where.line);
        }
        return false;
    }
    resolve(lanes, simdgroup);
    return true;
}

// False when the threads of the group have returned.
static bool pass_threadgroup_barrier(uint32_t n_threads) {
    const fiber * lead = nullptr;
    uint32_t n_done = 0;
    for (uint32_t i = 0; i < n_threads; i++) {
        const fiber & f = fibers[i];
        if (f.at == state::done) {
            n_done++;
        } else if (!lead) {
            lead = &f;
        } else if (!waits_with(f, *lead)) {
            violation("threads wait at different barriers: %s:%d and %s:%d", lead->where.file, lead->where.line, f.where.file, f.where.line);
            return false;
        }
    }
    if (!lead) {
        return false;
    }
    if (n_done) {
        violation("%u threads returned before the barrier at %s:%d", n_done, lead->where.file, lead->where.line);
        return false;
    }
    counted.threadgroup_barriers++;
    if (hooks) {
        hooks->barrier(lead->scope, -1);
    }
    for (uint32_t i = 0; i < n_threads; i++) {
        fibers[i].at = state::ready;
    }
    return true;
}

static void run_group(uint32_t n_threads, uint32_t n_simdgroups) {
    do {
        std::vector<uint32_t> live = in_schedule(n_simdgroups);
        while (!live.empty() && error.empty()) {
            const uint32_t i = how.schedule == order::random ? random_below((uint32_t) live.size()) : 0;
            if (!step((int) live[i], n_threads)) {
                live.erase(live.begin() + i);
            }
        }
    } while (error.empty() && pass_threadgroup_barrier(n_threads));
}

std::string dispatch(const pipeline & p, const bindings & given, dim3 grid, dim3 group_size, const std::vector<size_t> & threadgroup_memory,
                     const options & o, counters * count) {
    error.clear();
    running.group = 0;
    kernel        = p.kernel;
    how           = o;
    counted       = {};
    random_state  = o.seed*0x9e3779b97f4a7c15ull | 1;
    if (!kernel) {
        return "no such kernel";
    }

    const uint32_t n_threads = group_size.x*group_size.y*group_size.z, n_simdgroups = (n_threads + SIMD - 1)/SIMD;
    if (n_threads == 0 || n_threads > limits::threads_per_group) {
        violation("%u threads in a threadgroup, the limit is %u", n_threads, limits::threads_per_group);
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        violation("an empty grid: %u x %u x %u", grid.x, grid.y, grid.z);
    }
    for (int i = 0; i < 32; i++) {
        if ((kernel->buffers >> i & 1) && !given.buffers[i].ptr) {
            violation("buffer %d is not set", i);
        }
    }

    bindings b = given;
    size_t total = 0;
    std::vector<std::vector<char>> memory;
    for (size_t size : threadgroup_memory) {
        if (size % limits::threadgroup_memory_align) {
            violation("threadgroup memory %zu: the length %zu is no multiple of %zu", memory.size(), size, limits::threadgroup_memory_align);
        }
        total += size;
        memory.emplace_back(size);
        b.threadgroup[memory.size() - 1] = { memory.back().data(), size };
    }
    if (total > limits::threadgroup_memory) {
        violation("%zu bytes of threadgroup memory, the limit is %zu", total, limits::threadgroup_memory);
    }
    if (!error.empty()) {
        return error;
    }
    array_limit = limits::threadgroup_memory - total;
    array_used  = array_next = 0;
    array_offsets.clear();
    array_memory.assign(2*limits::threadgroup_memory, (char) 0xff);
    bound = &b;

    set_constants(p);
    make_fibers(n_threads);
    if (hooks) {
        hooks->begin(b);
    }
    const uint32_t n_groups = grid.x*grid.y*grid.z;
    for (uint32_t i = 0; i < n_groups && error.empty(); i++) {
        const uint32_t g = o.schedule == order::in_order ? i : n_groups - 1 - i;
        running.group = g;
        for (auto & m : memory) {
            memset(m.data(), 0xff, m.size());  // NaN in every float format
        }
        memset(array_memory.data(), 0xff, array_next);
        for (uint32_t j = 0; j < n_threads; j++) {
            thread_info & t = fibers[j].thread;
            t.group      = { g % grid.x, g/grid.x % grid.y, g/grid.x/grid.y };
            t.thread     = { j % group_size.x, j/group_size.x % group_size.y, j/group_size.x/group_size.y };
            t.group_size = group_size;
            t.grid_size  = grid;
            t.index = j; t.simdgroup = j/SIMD; t.lane = j % SIMD; t.n_simdgroups = n_simdgroups;
            fibers[j].at = state::ready;
            prepare(fibers[j]);
        }
        if (hooks) {
            hooks->begin_group();
        }
        run_group(n_threads, n_simdgroups);
        counted.threadgroups++;
    }
    if (hooks) {
        hooks->end();
    }
    if (count) {
        *count = counted;
    }
    kernel = nullptr;
    return error;
}

} // namespace msl
