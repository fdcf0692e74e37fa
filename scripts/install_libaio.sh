#!/usr/bin/env bash
# Installs libaio with its headers: DeepSpeed's async_io, which offloads to NVMe, is compiled against it.
# Does nothing where it is there already.
set -euo pipefail

found() { printf '#include <libaio.h>\nint main(void) { return 0; }\n' | "${CC:-cc}" -x c - -laio -o /dev/null 2>/dev/null; }

if found; then
    echo "libaio is there."
    exit 0
fi
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
if command -v apt-get >/dev/null; then
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y --no-install-recommends libaio-dev
elif command -v dnf >/dev/null; then
    "${as_root[@]}" dnf install -y libaio-devel
elif command -v pacman >/dev/null; then
    "${as_root[@]}" pacman -S --noconfirm libaio
else
    echo "No apt-get, dnf or pacman here: install libaio and its headers (libaio.h) by hand." >&2
    exit 1
fi
found || { echo "libaio is installed, but a program does not link against it (-laio)." >&2; exit 1; }
