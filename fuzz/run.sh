#!/usr/bin/env bash
# Fuzz targets one after another, FUZZ_SECONDS each. The corpus stays in build/fuzz/<target>/corpus and grows from
# run to run; findings go to build/fuzz/<target>/ and make this fail.
#   fuzz/run.sh json st_header machine
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-20}
python=${PYTHON:-python3}
clang=${CLANG:-clang}
flags=(-std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Wconversion -Wshadow -Werror
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
failed=()

declare -A longest=([json]=4096 [st_header]=4096 [zip_read]=32768 [tensor_ops]=1024 [zip_write]=256 [crc32]=512)
declare -A dict=([json]=json [st_header]=st_header [zip_read]=zip [tensor_ops]=pickle)

have_libfuzzer() {
    local folder
    folder=$(mktemp -d)
    printf '%s\n' '#include <stddef.h>' 'int LLVMFuzzerTestOneInput(const void *p, size_t n);' \
        'int LLVMFuzzerTestOneInput(const void *p, size_t n) { (void)p, (void)n; return 0; }' >"$folder/t.c"
    "$clang" -fsanitize=fuzzer,address,undefined "$folder/t.c" -o "$folder/t" 2>/dev/null
    local rc=$?
    rm -rf "$folder"
    return $rc
}

fuzz_c() {
    local target=$1 folder=build/fuzz/$1 options=()
    mkdir -p "$folder/corpus" "$folder/seeds"
    "$clang" "${flags[@]}" -Icsrc "fuzz/fuzz_$target.c" csrc/*.c -o "$folder/$target" || return 1
    "$python" fuzz/seeds.py "$target" "$folder/seeds" 2>"$folder/seeds.log" || { cat "$folder/seeds.log"; return 1; }
    [ -n "${dict[$target]:-}" ] && options+=("-dict=fuzz/dicts/${dict[$target]}.dict")
    # Of wall time, on a machine that may be busy: that cost is linear, the targets check by counting.
    if ! "$folder/$target" -max_total_time="$seconds" -max_len="${longest[$target]:-4096}" -timeout=20 \
        -rss_limit_mb=1024 -malloc_limit_mb=256 -use_value_profile=1 -print_final_stats=1 -artifact_prefix="$folder/" \
        -reload=0 "${options[@]}" "$folder/corpus" "$folder/seeds" >"$folder/log" 2>&1; then
        grep -E 'does not hold|ERROR|SUMMARY|Test unit written|runtime error|^Base64' "$folder/log" | head -20
        return 1
    fi
    awk -v target="$target" '
        / cov: / { for (i = 1; i < NF; i++) value[$i] = $(i + 1) }
        /number_of_executed_units/ { runs = $2 }
        /average_exec_per_sec/ { rate = $2 }
        END { printf "%-11s %12d executions, %7d per second, %5d edges, %6d features, %s units\n", target, runs, rate,
              value["cov:"], value["ft:"], value["corp:"] }' "$folder/log"
}

for target in "$@"; do
    if [ "$target" = machine ]; then
        "$python" fuzz/machine.py --seconds "$seconds" || failed+=("$target")
    elif ! have_libfuzzer; then
        echo "$target: no libFuzzer with $clang here, skipped (Debian: clang and libclang-rt-dev)"
    else
        fuzz_c "$target" || failed+=("$target")
    fi
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "findings in build/fuzz/: ${failed[*]}"
    exit 1
fi
