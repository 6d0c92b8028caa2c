#!/usr/bin/env bash
# The Python tests over extensions built with sanitizers, in a tree of their own under build/, so that the working
# build stays as it is. Any report of a sanitizer fails.
#   tools/sanitized.sh address tests/core                     AddressSanitizer and UndefinedBehaviorSanitizer
#   tools/sanitized.sh address fuzz/machine.py --seconds 60   one of fuzz/ in place of pytest
#   tools/sanitized.sh thread tests/threads                   ThreadSanitizer
# PYTHON has Cython, setuptools, NumPy and what the tests need. CPython itself is not built with the sanitizer: what it
# does to memory is not seen, its allocations and locks are.
set -euo pipefail
cd "$(dirname "$0")/.."

# Sources are copied only where they changed, so that only what depends on them is built again.
copy_sources() {
    local work=$1
    mkdir -p "$work/src"
    cp -au setup.py pyproject.toml README.md LICENSE csrc "$work/"
    (cd src && find tensorio \( -name '*.so' -o -name __pycache__ -o -path 'tensorio/_*.c' \) -prune -o -type f -print0 |
        xargs -0 cp -au --parents -t "../$work/src")
}

main() {
    local kind=$1 python work switch preload library reports rc=0
    shift
    python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
    work=build/$kind
    case $kind in
    address)
        switch=1
        preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
        ;;
    thread)
        switch=thread
        preload=$(gcc -print-file-name=libtsan.so)
        ;;
    *)
        echo "address or thread, not $kind" >&2
        exit 2
        ;;
    esac
    for library in $preload; do
        [ -e "$library" ] || { echo "no $(basename "$library") here: skipped (Debian: gcc)"; exit 0; }
    done
    copy_sources "$work"
    (cd "$work" && TENSORIO_SANITIZE=$switch CC=gcc "$python" setup.py -q build_ext --inplace)

    # Reports go to files: tests have children whose output nobody reads. UBSan writes to stderr, and aborts.
    reports=$PWD/$work/reports
    rm -rf "$reports"
    mkdir -p "$reports"
    export PYTHONPATH="$PWD/$work/src" PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1 TENSORIO_SANITIZED=$kind
    export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:log_path=$reports/asan"
    export UBSAN_OPTIONS="print_stacktrace=1"
    export TSAN_OPTIONS="history_size=4:report_signal_unsafe=0:die_after_fork=0:log_path=$reports/tsan"
    case ${1:-} in
    fuzz/*.py) LD_PRELOAD=$preload "$python" "$@" || rc=$? ;;
    *) LD_PRELOAD=$preload "$python" -m pytest -p no:cacheprovider --capture=sys --timeout 900 "$@" || rc=$? ;;
    esac
    if [ -n "$(ls -A "$reports")" ]; then
        head -n 60 "$reports"/* | cut -c1-200 | head -n 300
        echo "a sanitizer reports: see $reports"
        exit 1
    fi
    exit "$rc"
}

main "$@"
