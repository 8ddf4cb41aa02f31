// The memory checker. Kernels are compiled with -fsanitize=thread, which makes the compiler call __tsan_* at each load and
// store; the definitions are these (libtsan is not linked), with the rules of Metal:
//
//   - an access lies in a bound buffer, in threadgroup memory, on the stack of its thread or in a global
//   - two accesses to one place by different threads, one of them a write, are separated by a barrier that covers both
//     threads (threadgroup_barrier, or simdgroup_barrier within a simdgroup) and that memory (device, threadgroup)
//   - threadgroups of one dispatch do not share device memory that one of them writes
//   - threadgroup memory is written before it is read
//
// It also counts the bytes of each buffer that a dispatch touches.

#include "runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" char __executable_start, _end;

using namespace msl;

namespace {

// the last access to a place, and which of its bytes
struct access_record {
    uint32_t     group, epoch, simd_epoch;
    uint16_t     thread;
    uint8_t      bytes, run;
    const void * pc;
};

struct place {  // 4 bytes
    access_record write, read;
    uint8_t       read_before, written_before;  // bytes, in this dispatch
};

struct region {
    char *             begin, * end;
    bool               threadgroup;
    int                buffer;
    std::vector<place> places;
    traffic            count;
};

std::vector<region> regions;
uint8_t             run_id;
uint32_t            epoch[2], simd_epoch[2][64];  // by memory: device, threadgroup
bool                on;

std::string find_source(const void * pc) {
    Dl_info info;
    if (!dladdr(pc, &info)) {
        return "?";
    }
    char command[600], line[400] = "?";
    snprintf(command, sizeof(command), "addr2line -e '%s' %#lx 2>/dev/null", info.dli_fname, (long) ((const char *) pc - 1 - (const char *) info.dli_fbase));
    if (FILE * f = popen(command, "r")) {
        if (fgets(line, sizeof(line), f)) {
            line[strcspn(line, "\n ")] = 0;
        }
        pclose(f);
    }
    const char * slash = strrchr(line, '/');
    return slash ? slash + 1 : line;
}

const std::string & source_of(const void * pc) {
    static std::map<const void *, std::string> known;
    auto it = known.find(pc);
    return (it != known.end() ? it : known.emplace(pc, find_source(pc)).first)->second;
}

void report_race(const char * what, const access_record & before, const void * pc, const region & r, const char * p) {
    violation("%s race in %s memory, byte %zd: thread %u at %s and threadgroup %u thread %u at %s", what,
        r.threadgroup ? "threadgroup" : "device", p - r.begin, running.index, source_of(pc).c_str(), before.group, before.thread, source_of(before.pc).c_str());
}

bool is_ordered(const access_record & before, uint8_t bytes, bool threadgroup) {
    if (before.run != run_id || !(before.bytes & bytes)) {
        return true;
    }
    if (before.group != running.group) {
        return threadgroup;
    }
    if (before.thread == running.index || before.epoch != epoch[threadgroup]) {
        return true;
    }
    const uint32_t simdgroup = running.index/SIMD;
    return before.thread/SIMD == simdgroup && before.simd_epoch != simd_epoch[threadgroup][simdgroup];
}

void check_place(region & r, size_t first, size_t last, bool write, const void * pc) {
    place & c = r.places[first/4];
    const uint8_t bytes = ((1 << (last - first)) - 1) << (first % 4);
    const char * p = r.begin + first;

    if (!is_ordered(c.write, bytes, r.threadgroup)) {
        report_race(write ? "write/write" : "write/read", c.write, pc, r, p);
    }
    if (write && !is_ordered(c.read, bytes, r.threadgroup)) {
        report_race("read/write", c.read, pc, r, p);
    }
    if (!write && r.threadgroup && !(c.write.run == run_id && c.write.group == running.group)) {
        violation("unwritten threadgroup memory is read, byte %zu, thread %u at %s", first, running.index, source_of(pc).c_str());
    }
    (write ? c.write : c.read) = { running.group, epoch[r.threadgroup], simd_epoch[r.threadgroup][running.index/SIMD],
        (uint16_t) running.index, bytes, run_id, pc };

    uint8_t & before = write ? c.written_before : c.read_before;
    (write ? r.count.written        : r.count.read)        += last - first;
    (write ? r.count.unique_written : r.count.unique_read) += __builtin_popcount(bytes & ~before);
    before |= bytes;
}

void access(const void * ptr, size_t n, bool write, const void * pc) {
    if (!on || !running.inside) {
        return;
    }
    const char * p = (const char *) ptr;
    const char * what = write ? "write" : "read";
    for (region & r : regions) {
        if (p < r.begin || p >= r.end) {
            continue;
        }
        if (p + n > r.end) {
            violation("%s of %zu bytes crosses the end of a buffer of %zd bytes, thread %u at %s", what, n, r.end - r.begin, running.index, source_of(pc).c_str());
        }
        const size_t last = std::min(p + n, (const char *) r.end) - r.begin;
        for (size_t first = p - r.begin; first < last; first = first/4*4 + 4) {
            check_place(r, first, std::min(last, first/4*4 + 4), write, pc);
        }
        return;
    }
    char here;
    const bool is_global = p >= &__executable_start && p < &_end;                     // tables, function constants
    const bool is_local  = p >= running.stacks && p < running.stacks_end;
    const bool on_fiber  = &here >= running.stacks && &here < running.stacks_end;
    const bool in_call   = !on_fiber && std::abs(p - &here) < 65536;                  // a simd call, run by the scheduler
    if (!is_global && !is_local && !in_call) {
        violation("%s of %zu bytes outside of all buffers, thread %u at %s", what, n, running.index, source_of(pc).c_str());
    }
}

// ---------------------------------------------------------------- hooks

void add_region(const binding & b, bool threadgroup, int buffer) {
    if (b.ptr && b.size) {
        regions.push_back({ (char *) b.ptr, (char *) b.ptr + b.size, threadgroup, buffer, {}, { buffer, 0, 0, 0, 0 } });
    }
}

void begin(const bindings & b) {
    if (++run_id == 0) {
        run_id = 1;
    }
    regions.clear();
    for (int i = 0; i < 32; i++) {
        add_region(b.buffers[i], false, i);
    }
    for (const binding & t : b.threadgroup) {
        add_region(t, true, -1);
    }
    // bindings that overlap are one region
    std::stable_sort(regions.begin(), regions.end(), [](const region & a, const region & b) { return a.begin < b.begin; });
    std::vector<region> merged;
    for (region & r : regions) {
        if (!merged.empty() && r.begin < merged.back().end) {
            merged.back().end = std::max(merged.back().end, r.end);
        } else {
            merged.push_back(r);
        }
    }
    regions = std::move(merged);
    for (region & r : regions) {
        r.places.assign((r.end - r.begin + 3)/4, place {});
    }
    on = true;
}

void add_array(binding array) {
    add_region(array, true, -1);
    regions.back().places.assign((array.size + 3)/4, place {});
}

void begin_group() {
    epoch[0] = epoch[1] = 1;
    memset(simd_epoch, 0, sizeof(simd_epoch));
}

void barrier(int scope, int simdgroup) {
    for (int threadgroup = 0; threadgroup < 2; threadgroup++) {
        if (scope & (threadgroup ? MEMORY_THREADGROUP : MEMORY_DEVICE)) {
            if (simdgroup < 0) {
                epoch[threadgroup]++;
            } else {
                simd_epoch[threadgroup][simdgroup]++;
            }
        }
    }
}

void end() {
    on = false;
    last_traffic.clear();
    for (region & r : regions) {
        if (!r.threadgroup) {
            last_traffic.push_back(r.count);
        }
    }
    std::sort(last_traffic.begin(), last_traffic.end(), [](const traffic & a, const traffic & b) { return a.buffer < b.buffer; });
}

memory_hooks checker { begin, begin_group, add_array, barrier, end };

struct install {
    install() { hooks = &checker; }
} install_;

} // namespace

// ---------------------------------------------------------------- what -fsanitize=thread calls

#define CALLER __builtin_return_address(0)
#define ACCESSES(N)                                                                   \
    void __tsan_read##N(void * p)            { access(p, N, false, CALLER); }         \
    void __tsan_write##N(void * p)           { access(p, N, true,  CALLER); }         \
    void __tsan_unaligned_read##N(void * p)  { access(p, N, false, CALLER); }         \
    void __tsan_unaligned_write##N(void * p) { access(p, N, true,  CALLER); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void * p, size_t n)  { access(p, n, false, CALLER); }
void __tsan_write_range(void * p, size_t n) { access(p, n, true,  CALLER); }
void * __tsan_memcpy(void * d, const void * s, size_t n)  { access(s, n, false, CALLER); access(d, n, true, CALLER); return memcpy(d, s, n); }
void * __tsan_memmove(void * d, const void * s, size_t n) { access(s, n, false, CALLER); access(d, n, true, CALLER); return memmove(d, s, n); }
void * __tsan_memset(void * d, int c, size_t n)           { access(d, n, true,  CALLER); return memset(d, c, n); }
}
