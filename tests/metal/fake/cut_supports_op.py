#!/usr/bin/env python3
"""Cut ggml_metal_device_supports_op, which is plain C, out of ggml-metal-device.m.

cut_supports_op.py ggml-metal-device.m OUT.inc
"""

import sys

FIRST = "static bool ggml_metal_supports_mul_mat_op("
LAST = "bool ggml_metal_device_supports_op("


def main():
    path_in, path_out = sys.argv[1:]
    with open(path_in) as f:
        text = f.read()
    start, last = text.find(FIRST), text.find(LAST)
    end = text.find("\n}\n", last)
    if not 0 <= start < last < end:
        raise SystemExit(
            f"cut_supports_op.py: {path_in} has changed: {FIRST!r} ... {LAST!r} not found"
        )
    line = text.count("\n", 0, start) + 1
    with open(path_out, "w") as f:
        f.write(f'#line {line} "ggml-metal-device.m"\n' + text[start : end + 3])


if __name__ == "__main__":
    main()
