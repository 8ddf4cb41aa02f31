#!/usr/bin/env python3
"""Run a test program that holds a mistake: it has to run, to fail, and to say what is wrong.

expect_caught.py MESSAGE PROGRAM ARGUMENTS...      MESSAGE is a regular expression
"""

import re
import subprocess
import sys


def main():
    message, *command = sys.argv[1:]
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=500, check=False
    )
    output = result.stdout + result.stderr
    print("\n".join(output.splitlines()[:20]))

    checks = re.search(r"^metal_tree_ops: (\d+) checks, (\d+) failures$", output, flags=re.M)
    if not checks or int(checks.group(1)) < 20:
        raise SystemExit("expect_caught.py: the tests did not run")
    if result.returncode == 0 or int(checks.group(2)) == 0:
        raise SystemExit("expect_caught.py: the mistake was not caught")
    if not re.search(message, output):
        raise SystemExit(f"expect_caught.py: caught, but without a message like {message!r}")
    print(
        f"caught ({checks.group(2)} of {checks.group(1)} checks): {re.search(message, output).group(0)}"
    )


if __name__ == "__main__":
    main()
