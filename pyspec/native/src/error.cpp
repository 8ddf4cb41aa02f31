#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace pyspec {

namespace {

thread_local char          last_error_line[1024] = "";
thread_local pyspec_status last_error_status     = PYSPEC_OK;

} // namespace

void fail(pyspec_status status, const char * format, ...) {
    char message[sizeof(last_error_line)];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    throw Error(status, message);
}

pyspec_status set_last_error(pyspec_status status, const char * message) noexcept {
    last_error_status = status;
    snprintf(last_error_line, sizeof(last_error_line), "%s", message);
    for (char * c = last_error_line; *c; ++c) {
        if (*c == '\n' || *c == '\r') {
            *c = ' ';
        }
    }
    return status;
}

const char * last_error() noexcept {
    return last_error_line;
}

pyspec_status last_status() noexcept {
    return last_error_status;
}

pyspec_status status_of_current_exception() noexcept {
    try {
        throw;
    } catch (const Error & error) {
        return set_last_error(error.status, error.what());
    } catch (const std::bad_alloc &) {
        return set_last_error(PYSPEC_ERR_MEMORY, "out of memory");
    } catch (const std::exception & error) {
        return set_last_error(PYSPEC_ERR_COMPUTE, error.what());
    } catch (...) {
        return set_last_error(PYSPEC_ERR_COMPUTE, "an exception of unknown type in native code");
    }
}

} // namespace pyspec
