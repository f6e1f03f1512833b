#!/bin/sh
# Everything that only a CUDA device can show, in under 8 minutes; prints one table. Needs no network.
#
#   tests/gpu/run.sh [--output DIR]            0: all checks hold, 1: one failed, 77: no CUDA device here
#   tests/gpu/run.sh --cpu-rehearsal           the same steps with tiny towers on the CPU
#
# PYTHON  (python3)  a Python from 3.11 on with torch, torchvision, transformers, Pillow and matplotlib
# WHEELS  (none)     a folder with wheels of what that Python lacks. Where there is a network:
#                    pip download --no-deps --only-binary=:all: --python-version 3.12 \
#                        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#                        -d DIR msgspec posix-ipc 'av>=18,<19' soundfile soxr cffi pycparser
set -eu

PYTHON=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# Both extensions, in place. Where that is impossible those that lie here already will do.
build() {
    command -v gcc >/dev/null || { echo "tests/gpu: no gcc to build the extensions with" >&2; return 1; }
    "$PYTHON" - <<'END' || { echo "tests/gpu: Python.h is missing for $PYTHON" >&2; return 1; }
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
END
    "$PYTHON" setup.py -q build_ext --inplace --build-temp "$place/build"
}

if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --target "$place/site" "$WHEELS"/*.whl
    PYTHONPATH="$place/site${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
"$PYTHON" - <<'END' || exit 1
import importlib.util, sys
needed = ("torch", "torchvision", "transformers", "PIL", "numpy", "matplotlib", "msgspec", "posix_ipc",
          "av", "soundfile", "soxr")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"tests/gpu: {sys.executable} lacks {', '.join(missing)} (WHEELS=DIR brings wheels)")
END
build || "$PYTHON" -c 'from shm import _core; from gpu_workers import _pixels' || exit 1

export HF_HUB_OFFLINE=1
"$PYTHON" -m tests.gpu.main "$@"
