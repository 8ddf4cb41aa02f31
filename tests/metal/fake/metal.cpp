// The part of ggml's Metal backend that is Objective-C (ggml-metal-device.m, ggml-metal-context.m), on the MSL runtime.
// The rest of the backend is upstream's: graph optimisation, fusion, pipelines, arguments, grids, barriers.
//
//   pipeline      a registered kernel and function constants
//   buffer        host memory, filled with NaN
//   encoder       records dispatches; those between two memory barriers run in any order, since a GPU may run them at once
//   device        an M-series GPU without tensor units and bfloat; a program links the kernels that it needs
//
// Environment, besides the runtime's: MSL_TRACE=1 prints the dispatches.

#include "fake_metal.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal.h"

#include "ggml-metal-common.h"
#include "ggml-metal-context.h"
#include "ggml-metal-device.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-impl.h"
#include "ggml-metal-ops.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

struct ggml_metal_cv       { std::map<int, int64_t> values; };
struct ggml_metal_pipeline { msl::pipeline pipeline; };
struct ggml_metal_library  { ggml_metal_device_t device; ggml_metal_pipelines_t pipelines; };
struct ggml_metal_buffer   { char * base; size_t size; bool shared, owned; };
struct ggml_metal_device   { ggml_metal_device_props props; ggml_metal_library library; ggml_metal_fusion_info * fusion; };
struct ggml_metal          { ggml_metal_device_t device; };

struct recorded_dispatch {
    msl::pipeline       pipeline;
    msl::bindings       bindings;
    std::vector<size_t> threadgroup_memory;
    msl::dim3           grid, group_size;
    std::map<int, std::vector<char>> bytes;  // arguments by value
};

struct ggml_metal_encoder {
    recorded_dispatch              next;
    std::vector<recorded_dispatch> recorded;
};

// ---------------------------------------------------------------- what tests see

std::vector<fake_metal::dispatch_record> fake_metal::log;
bool                                     fake_metal::keep_log = false;

static int n_violations = 0;
static int n_graphs     = 0;

int fake_metal::violations() { return n_violations; }
int fake_metal::graphs()     { return n_graphs; }

ggml_metal_device_props & fake_metal::props() { return ((ggml_metal_device_t) ggml_backend_dev_by_name("MTL0")->context)->props; }

static const bool trace = getenv("MSL_TRACE") != nullptr;

// A program must not succeed after a violation, even when the wrong kernel gave the right values.
static struct fail_at_exit {
    ~fail_at_exit() {
        if (n_violations) {
            fprintf(stderr, "msl: %d violations\n", n_violations);
            fflush(nullptr);
            _exit(3);
        }
    }
} fail_at_exit_;

// the checker knows the bounds of tensors, not just of buffers; views are tensors too
static std::map<const char *, size_t> tensor_sizes;

static void add_tensor(const ggml_tensor * t, const char * p) {
    const size_t size = t->view_src ? ggml_nbytes(t) : ggml_backend_buft_get_alloc_size(t->buffer->buft, t);
    if (!t->view_src) {  // what lay there before
        tensor_sizes.erase(tensor_sizes.upper_bound(p), tensor_sizes.lower_bound(p + size));
    }
    tensor_sizes[p] = size;
}

// bytes from p to the end of its tensor, or of the buffer
static size_t bytes_left(const char * p, size_t in_buffer) {
    auto it = tensor_sizes.upper_bound(p);
    if (it == tensor_sizes.begin() || (--it)->first + it->second <= p) {
        return in_buffer;
    }
    return it->first + it->second - p;
}

extern "C" {

// ---------------------------------------------------------------- function constants, pipelines

ggml_metal_cv_t ggml_metal_cv_init(void) { return new ggml_metal_cv; }
void ggml_metal_cv_free(ggml_metal_cv_t cv) { delete cv; }
void ggml_metal_cv_set_int16(ggml_metal_cv_t cv, int16_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) { cv->values[idx] = value; }
void ggml_metal_cv_set_bool (ggml_metal_cv_t cv, bool    value, int32_t idx) { cv->values[idx] = value; }

void ggml_metal_pipeline_free(ggml_metal_pipeline_t pipeline) { delete pipeline; }
int  ggml_metal_pipeline_max_theads_per_threadgroup(struct ggml_metal_pipeline_with_params) { return msl::limits::threads_per_group; }

ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) { return lib->device; }

struct ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params res {};
    res.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return res;
}

struct ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t cv) {
    ggml_metal_pipeline_with_params res {};
    const msl::kernel_info * kernel = msl::find_kernel(base);
    if (!kernel) {
        GGML_ABORT("fake metal: no kernel %s", base);
    }
    res.pipeline = new ggml_metal_pipeline { { kernel, cv ? cv->values : std::map<int, int64_t> {} } };
    ggml_metal_pipelines_add(lib->pipelines, name, res.pipeline);
    return res;
}

// ---------------------------------------------------------------- encoder

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t, bool) { return new ggml_metal_encoder {}; }
void ggml_metal_encoder_free(ggml_metal_encoder_t encoder) { delete encoder; }
void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t, const char *) {}
void ggml_metal_encoder_debug_group_pop (ggml_metal_encoder_t) {}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, struct ggml_metal_pipeline_with_params pipeline) {
    GGML_ASSERT(pipeline.pipeline);
    encoder->next.pipeline = pipeline.pipeline->pipeline;
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    GGML_ASSERT(size <= msl::limits::bytes_argument);
    encoder->next.bytes[idx].assign((char *) data, (char *) data + size);
    encoder->next.bindings.buffers[idx] = {};
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, struct ggml_metal_buffer_id id, int idx) {
    auto * buffer = (ggml_metal_buffer_t) id.metal;
    encoder->next.bytes.erase(idx);
    if (!buffer) {
        encoder->next.bindings.buffers[idx] = {};
        return;
    }
    GGML_ASSERT(id.offs <= buffer->size);
    char * p = buffer->base + id.offs;
    encoder->next.bindings.buffers[idx] = { p, bytes_left(p, buffer->size - id.offs) };
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int idx) {
    auto & sizes = encoder->next.threadgroup_memory;
    if ((int) sizes.size() <= idx) {
        sizes.resize(idx + 1);
    }
    sizes[idx] = size;
}

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    encoder->next.grid       = { (uint32_t) tg0,   (uint32_t) tg1,   (uint32_t) tg2 };
    encoder->next.group_size = { (uint32_t) tptg0, (uint32_t) tptg1, (uint32_t) tptg2 };
    encoder->recorded.push_back(encoder->next);
}

static void run_dispatch(recorded_dispatch & d, const msl::options & options) {
    for (auto & b : d.bytes) {
        d.bindings.buffers[b.first] = { b.second.data(), b.second.size() };
    }
    if (trace) {
        fprintf(stderr, "msl: %s, grid %u %u %u, threadgroup %u %u %u\n", d.pipeline.kernel->name.c_str(),
            d.grid.x, d.grid.y, d.grid.z, d.group_size.x, d.group_size.y, d.group_size.z);
    }
    fake_metal::dispatch_record record;
    const std::string error = msl::dispatch(d.pipeline, d.bindings, d.grid, d.group_size, d.threadgroup_memory, options, &record.counters);
    if (!error.empty()) {
        n_violations++;
        fprintf(stderr, "msl: %s\n", error.c_str());
    }
    if (fake_metal::keep_log) {
        record.kernel  = d.pipeline.kernel->name;
        record.traffic = msl::last_traffic;
        fake_metal::log.push_back(record);
    }
}

void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t encoder) {
    static const msl::options options = msl::options_from_environment();
    static std::mt19937_64 rng(options.seed);
    auto & recorded = encoder->recorded;
    if (options.schedule == msl::order::reverse) {
        std::reverse(recorded.begin(), recorded.end());
    } else if (options.schedule == msl::order::random) {
        std::shuffle(recorded.begin(), recorded.end(), rng);
    }
    for (auto & d : recorded) {
        run_dispatch(d, options);
    }
    recorded.clear();
}

void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t encoder) { ggml_metal_encoder_memory_barrier(encoder); }

// ---------------------------------------------------------------- device

ggml_metal_device_t ggml_metal_device_init(int device, int) {
    auto * dev = new ggml_metal_device {};
    auto & props = dev->props;
    props.device = props.device_phys = device;
    snprintf(props.name, sizeof(props.name), "MTL%d", device);
    snprintf(props.desc, sizeof(props.desc), "Metal kernels on the CPU");
    props.max_buffer_size            = (size_t) 8 << 30;
    props.max_working_set_size       = (size_t) 8 << 30;
    props.max_theadgroup_memory_size = msl::limits::threadgroup_memory;
    props.has_simdgroup_reduction    = true;
    props.has_simdgroup_mm           = true;
    props.has_unified_memory         = true;
    props.use_shared_buffers         = true;
    props.supports_gpu_family_apple7 = true;
    props.op_offload_min_batch_size  = 32;
    props.gpu_family                 = 7;
    props.device_id                  = GGML_METAL_DEVICE_GENERIC;
    dev->library = { dev, ggml_metal_pipelines_init() };
    dev->fusion  = ggml_metal_fusion_info_init(!getenv("GGML_METAL_FUSION_DISABLE"), 0);
    return dev;
}

void ggml_metal_device_free(ggml_metal_device_t dev) {
    ggml_metal_pipelines_free(dev->library.pipelines);
    ggml_metal_fusion_info_free(dev->fusion);
    delete dev;
}

ggml_metal_library_t                   ggml_metal_device_get_library(ggml_metal_device_t dev)     { return &dev->library; }
const struct ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev)       { return &dev->props; }
struct ggml_metal_fusion_info *        ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) { return dev->fusion; }
void ggml_metal_device_get_memory(ggml_metal_device_t, size_t * free, size_t * total) { *free = *total = (size_t) 8 << 30; }
const char * ggml_metal_device_id_token(enum ggml_metal_device_id) { return "GENERIC"; }

ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t) { return (ggml_metal_event_t) malloc(1); }
void ggml_metal_device_event_free(ggml_metal_device_t, ggml_metal_event_t ev) { free(ev); }
void ggml_metal_device_event_synchronize(ggml_metal_device_t, ggml_metal_event_t) {}

#include "supports_op.inc"  // ggml_metal_device_supports_op, cut out of ggml-metal-device.m

// ---------------------------------------------------------------- buffers

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t, size_t size, bool shared) {
    constexpr size_t page = 16*1024;
    char * p = (char *) aligned_alloc(page, size/page*page + page);
    memset(p, 0xff, size);
    return new ggml_metal_buffer { p, size, shared, true };
}

ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t, void * ptr, size_t size, size_t) {
    return new ggml_metal_buffer { (char *) ptr, size, true, false };
}

void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    if (buf->owned) {
        free(buf->base);
    }
    delete buf;
}

void * ggml_metal_buffer_get_base (ggml_metal_buffer_t buf) { return buf->base; }
bool   ggml_metal_buffer_is_shared(ggml_metal_buffer_t buf) { return buf->shared; }
void   ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t, struct ggml_tensor * t, uint8_t value, size_t offset, size_t size) { memset((char *) t->data + offset, value, size); }
void   ggml_metal_buffer_set_tensor(ggml_metal_buffer_t, struct ggml_tensor * t, const void * data, size_t offset, size_t size) { memcpy((char *) t->data + offset, data, size); }
void   ggml_metal_buffer_get_tensor(ggml_metal_buffer_t, const struct ggml_tensor * t, void * data, size_t offset, size_t size) { memcpy(data, (const char *) t->data + offset, size); }
void   ggml_metal_buffer_clear(ggml_metal_buffer_t buf, uint8_t value) { memset(buf->base, value, buf->size); }
bool   ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

struct ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const struct ggml_tensor * t) {
    const char * p = (const char *) t->data;
    const size_t size = ggml_nbytes(t);
    if (p < buf->base || p + size > buf->base + buf->size) {
        GGML_ABORT("fake metal: tensor %s is not in its buffer", t->name);
    }
    add_tensor(t, p);
    return { buf, (size_t) (p - buf->base) };
}

// ---------------------------------------------------------------- context

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) { return new ggml_metal { dev }; }
void         ggml_metal_free(ggml_metal_t ctx) { delete ctx; }
const char * ggml_metal_get_name(ggml_metal_t ctx) { return ctx->device->props.name; }
void         ggml_metal_synchronize(ggml_metal_t) {}

void ggml_metal_set_tensor_async(ggml_metal_t, struct ggml_tensor * t, const void * data, size_t offset, size_t size) { memcpy((char *) t->data + offset, data, size); }
void ggml_metal_get_tensor_async(ggml_metal_t, const struct ggml_tensor * t, void * data, size_t offset, size_t size) { memcpy(data, (const char *) t->data + offset, size); }
bool ggml_metal_cpy_tensor_async(ggml_metal_t, ggml_metal_t, const struct ggml_tensor *, struct ggml_tensor *) { return false; }

enum ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, struct ggml_cgraph * gf) {
    const int before = n_violations;
    n_graphs++;
    ggml_metal_op_t op = ggml_metal_op_init(ctx->device, nullptr, gf, ctx->device->fusion, 0, gf->n_nodes, true, false, 0);
    for (int i = 0; i < ggml_metal_op_n_nodes(op);) {
        const int n = ggml_metal_op_encode(op, i);
        if (n == 0) {
            break;
        }
        i += n;
    }
    ggml_metal_op_free(op);
    return n_violations == before ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

void ggml_metal_graph_optimize(ggml_metal_t, struct ggml_cgraph * gf) { ggml_graph_optimize(gf); }

void ggml_metal_event_record(ggml_metal_t, ggml_metal_event_t) {}
void ggml_metal_event_wait  (ggml_metal_t, ggml_metal_event_t) {}
ggml_metal_event_t ggml_metal_get_ev_cpy(ggml_metal_t) { return nullptr; }
void ggml_metal_set_n_cb(ggml_metal_t, int) {}
void ggml_metal_set_abort_callback(ggml_metal_t, ggml_abort_callback, void *) {}
bool ggml_metal_supports_family(ggml_metal_t ctx, int family) { return family <= ctx->device->props.gpu_family; }
void ggml_metal_capture_next_compute(ggml_metal_t) {}

} // extern "C"

// ---------------------------------------------------------------- registration, before main

static struct register_backend {
    register_backend() { ggml_backend_register(ggml_backend_metal_reg()); }
} register_backend_;
