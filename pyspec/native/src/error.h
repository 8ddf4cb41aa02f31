// Errors: thrown as Error inside libpyspec, turned into a status and a thread-local line at its C boundary.
#pragma once

#include "pyspec.h"

#include <new>
#include <stdexcept>
#include <string>

namespace pyspec {

class Error : public std::runtime_error {
public:
    Error(pyspec_status code, const std::string & message) : std::runtime_error(message), status(code) {}

    pyspec_status status;
};

[[noreturn]] void fail(pyspec_status status, const char * format, ...) __attribute__((format(printf, 2, 3)));

// What pyspec_last_error() and pyspec_last_status() return in this thread. Newlines in the message become spaces.
pyspec_status set_last_error(pyspec_status status, const char * message) noexcept; // returns status
const char *  last_error() noexcept;
pyspec_status last_status() noexcept;

// The status of the exception in flight; remembers it with its message. Only inside a catch block.
pyspec_status status_of_current_exception() noexcept;

// Runs body() so that nothing is thrown across the C boundary. body returns nothing, the status is the result.
template <typename Body>
pyspec_status guard(Body && body) noexcept {
    try {
        body();
        return PYSPEC_OK;
    } catch (...) {
        return status_of_current_exception();
    }
}

// As guard, for functions whose result is a value: `failed` stands for an error.
template <typename Result, typename Body>
Result guard_value(Result failed, Body && body) noexcept {
    try {
        return body();
    } catch (...) {
        status_of_current_exception();
        return failed;
    }
}

} // namespace pyspec
