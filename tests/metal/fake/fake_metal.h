// What tests see of the fake Metal device.

#pragma once

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

} // namespace fake_metal
