#!/usr/bin/env bash
# The Python tests over extensions built with sanitizers, in a tree of their own under build/, so that the working
# build stays as it is. Any report of a sanitizer fails.
#   tools/sanitized.sh address [pytest arguments]     AddressSanitizer and UndefinedBehaviorSanitizer
#   tools/sanitized.sh thread [pytest arguments]      ThreadSanitizer
# PYTHON has Cython, setuptools, NumPy and what the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1
shift
python=$(realpath -s "${PYTHON:-python3}")
work=build/$kind
mkdir -p "$work"

# Sources are copied only where they changed, so that make builds only what has to be.
cp -au setup.py pyproject.toml README.md LICENSE csrc "$work/"
mkdir -p "$work/src"
(cd src && find tensorio \( -name '*.so' -o -name '__pycache__' -o -path 'tensorio/_*.c' \) -prune -o -type f -print0 |
    xargs -0 cp -au --parents -t "../$work/src")

case $kind in
address)
    switch=1
    preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
    ;;
thread)
    switch=thread
    preload="$(gcc -print-file-name=libtsan.so)"
    ;;
*)
    echo "address or thread, not $kind" >&2
    exit 2
    ;;
esac
for library in $preload; do
    [ -e "$library" ] || { echo "no $(basename "$library") here: skipped (Debian: gcc)"; exit 0; }
done
(cd "$work" && TENSORIO_SANITIZE=$switch CC=gcc "$python" setup.py -q build_ext --inplace)

# Reports go to files: tests have children whose output nobody reads.
reports=$PWD/$work/reports
rm -rf "$reports" && mkdir -p "$reports"
export PYTHONPATH="$PWD/$work/src" PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1 TENSORIO_SANITIZED=$kind
export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:handle_segv=1:log_path=$reports/asan"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/ubsan"
export TSAN_OPTIONS="suppressions=$PWD/tools/tsan.txt:history_size=4:log_path=$reports/tsan:report_signal_unsafe=0:die_after_fork=0"
rc=0
LD_PRELOAD=$preload "$python" -m pytest -p no:cacheprovider --timeout 900 "$@" || rc=$?
if [ -n "$(ls -A "$reports")" ]; then
    head -n 60 "$reports"/* | cut -c1-200 | head -n 300
    echo "reports of a sanitizer in $reports"
    exit 1
fi
exit $rc
