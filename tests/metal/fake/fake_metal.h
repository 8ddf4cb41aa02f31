// What tests see of the fake Metal device.

#pragma once

#include "ggml-metal-device.h"
#include "runtime.h"

#include <string>
#include <vector>

namespace fake_metal {

struct dispatch_record {
    std::string               kernel;
    msl::counters             counters;
    std::vector<msl::traffic> traffic;  // with the memory checker
};

extern bool                         keep_log;
extern std::vector<dispatch_record> log;

// since the start of the program
int violations();
int graphs();

// of MTL0; a test may take abilities away
ggml_metal_device_props & props();

} // namespace fake_metal
