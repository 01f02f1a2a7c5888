#!/usr/bin/env bash
# Run tests on 64-bit Arm, emulated by qemu-user: tests/arm.sh [FOLDER [PYTEST-ARGUMENTS]]
#
# FOLDER (default: a temporary one) gets what this needs, and may be used again: qemu, an arm64 Debian, both only
# unpacked, wheels for it from PyPI, and the compiled kernels. Without arguments for pytest this runs `suite`, below.
# Needs Debian, root, Python 3.13 and some 2 GB of disk. On two cores that did other work, too, this took 9 to 71 minutes.
#
# qemu runs each program on this machine's kernel, without a chroot and without binfmt_misc: sys.executable is a script
# that starts qemu. Kernels are compiled by this machine's LLVM for the emulated processor (on_arm/cross_compile.py).
#
# What differs from an Arm processor: the emulator does not reorder stores as that may; tests/shm/test_weak_model.py
# does. Pages have 4 KiB. qemu 11.1.3 has no process_vm_readv (ENOSYS), so ranks do not read each other's memory, and
# getsockopt(TCP_INFO) returns 4 bytes. on_arm/sitecustomize.py replaces two other things that it lacks.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=${1:-$(mktemp -d)}
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd)
[ $# -gt 0 ] || trap 'rm -rf "$FOLDER"' EXIT
RELEASE=trixie PYTHON=3.13

# ---- qemu: that of Debian's next release, since 7.2 refuses the launcher's prctl; the program is linked statically ----
unpack_qemu() {
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg to="$FOLDER/apt" options
    rm -rf "$to"
    mkdir -p "$to"/{lists,archives}/partial
    echo "deb [signed-by=$keys] http://deb.debian.org/debian sid main" >"$to/sources.list"
    options=(-o "Dir::State=$to" -o Dir::State::status=/dev/null -o "Dir::Cache=$to"
        -o "Dir::Etc::sourcelist=$to/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Acquire::Languages=none -o APT::Sandbox::User=root)
    apt-get "${options[@]}" -qq update
    (cd "$to" && apt-get "${options[@]}" -qq download qemu-user)
    dpkg-deb --fsys-tarfile "$to"/qemu-user_*.deb | tar -x -C "$FOLDER" --strip-components=3 ./usr/bin/qemu-aarch64
    rm -rf "$to"
}
[ -e "$FOLDER/qemu-aarch64" ] || unpack_qemu
"$FOLDER/qemu-aarch64" --version | head -1

# ---- Debian: the packages are unpacked, and no program of theirs runs ----
if [ ! -e "$FOLDER/debian/usr/bin/python$PYTHON" ]; then
    command -v debootstrap >/dev/null ||
        { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends debootstrap; }
    rm -rf "$FOLDER/stage" "$FOLDER/debian"
    debootstrap --arch=arm64 --foreign --variant=minbase --include="python$PYTHON" $RELEASE "$FOLDER/stage"
    mkdir "$FOLDER/debian"
    for package in "$FOLDER"/stage/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$FOLDER/debian"
    done
    # qemu looks for a path in this folder first, and these must be this machine's.
    (cd "$FOLDER/debian" && rm -rf boot dev etc home media mnt opt proc root run srv sys tmp var)
    rm -rf "$FOLDER/stage"
fi

# ---- Python's packages for arm64, and for here, where kernels are compiled, the same versions ----
WHEELS=(--quiet --no-compile --only-binary=:all: --implementation cp --python-version $PYTHON
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
COMPILING=(numpy numba llvmlite posix_ipc ml_dtypes)
if [ ! -e "$FOLDER/venv/complete" ]; then
    rm -rf "$FOLDER"/{packages,venv}
    python3 -m pip install "${WHEELS[@]}" --target "$FOLDER/packages" "${COMPILING[@]}" pytest hypothesis psutil
    "python$PYTHON" -m venv "$FOLDER/venv"
    versions=()
    for package in "${COMPILING[@]}"; do
        each=$(basename "$FOLDER/packages/$package"-*.dist-info .dist-info)
        versions+=("${each/-/==}")
    done
    "$FOLDER/venv/bin/pip" install --quiet "${versions[@]}"
    "$FOLDER/venv/bin/python" -m compileall -q "$FOLDER"/{packages,"debian/usr/lib/python$PYTHON"} >/dev/null || :
    touch "$FOLDER/venv/complete"
fi

# ---- fastcoll, as pip installs it on arm64 ----
rm -rf "$FOLDER"/{sources,wheel,site}
mkdir -p "$FOLDER"/{sources,bin,kernels,config,elsewhere}
(cd "$ROOT" && cp -r pyproject.toml README.md LICENSE MANIFEST.in build_backend fastcoll fastcoll_autoload.py "$FOLDER/sources")
python3 -m pip wheel --quiet --no-deps --wheel-dir "$FOLDER/wheel" "$FOLDER/sources"
python3 -m pip install "${WHEELS[@]}" --no-deps --target "$FOLDER/site" "$FOLDER"/wheel/*.whl
"$FOLDER/venv/bin/python" -m compileall -q "$FOLDER/site"

cat >"$FOLDER/bin/python" <<END
#!/bin/sh
exec "$FOLDER/qemu-aarch64" -cpu neoverse-n1 -L "$FOLDER/debian" -0 "$FOLDER/bin/python" \
    "$FOLDER/debian/usr/bin/python$PYTHON" "\$@"
END
chmod +x "$FOLDER/bin/python"

on_arm() { # ARGUMENT...: of Python
    # PYTHONHOME is inside the unpacked Debian, as qemu sees it.
    (cd "$FOLDER/elsewhere" && PYTHONHOME=/usr PYTHONPATH="$ROOT/tests/on_arm:$FOLDER/site:$FOLDER/packages" \
        PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR="$FOLDER/kernels" "$FOLDER/bin/python" "$@")
}

# ---- kernels; those with failpoints are in files of their own ----
on_arm "$ROOT/tests/on_arm/describe_target.py" >"$FOLDER/target.json"
for failpoint in "" shm.barrier.enter:delay=0; do
    (cd "$FOLDER/elsewhere" && FASTCOLL_FAILPOINT=$failpoint PYTHONPATH="$FOLDER/site" NUMBA_CACHE_DIR="$FOLDER/kernels" \
        "$FOLDER/venv/bin/python" "$ROOT/tests/on_arm/cross_compile.py" "$FOLDER/target.json" --dtypes all)
done

# ---- tests ----
run_tests() { # ARGUMENT...: of pytest; paths are relative to the repository
    local words=()
    for word in "$@"; do
        case $word in
        tests/*) words+=("$ROOT/$word") ;;
        *) words+=("$word") ;;
        esac
    done
    on_arm -m pytest -c "$ROOT/pyproject.toml" -p no:cacheprovider --color=no "${words[@]}"
}

suite() {
    run_tests tests/conformance -k 'n2 or n3'
    run_tests tests/conformance -k 'n2 or n3' --ranks-backend tcp
    # qemu refuses madvise(MADV_POPULATE_WRITE) with EINVAL, as Linux before 5.14 does; the test expects it.
    run_tests tests/kernels/test_{arm,reduce,shared_words}.py -k 'not test_pages_of_other_sizes'
    # The tests left out start Python with another PYTHONPATH, on which the emulated packages are missing.
    run_tests tests/messages -m 'not long and not timed' -k 'not planted_faults_are_found'
    run_tests tests/launch/test_{job,launcher,lifeline}.py -m 'not long and not timed'
    # Without process_vm_readv no rank reaches the failpoint at which that test kills it.
    run_tests tests/faults/test_kill.py -m 'not long and not timed' -k 'not reads_arrays_directly'
    run_tests tests/faults/test_kill_net.py -m 'not long and not timed' -k short_call
}

if [ $# -gt 1 ]; then run_tests "${@:2}"; else suite; fi
