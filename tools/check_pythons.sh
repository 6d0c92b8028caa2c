#!/bin/sh
# Build the package with every Python from 3.10 on that is on the PATH, and run the tests that need no framework.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for minor in 10 11 12 13 14; do
    python=$(command -v "python3.$minor" || true)
    if [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "python3.$minor: not here"
        continue
    fi
    "$python" -m venv "$work/$minor"
    "$work/$minor/bin/python" -m pip install -q . pytest pytest-timeout pytest-benchmark hypothesis click rich
    echo "python3.$minor:"
    # From elsewhere, so that the installed package is tested and not the source folder.
    cp -r tests "$work/tests-$minor"
    (cd "$work" && "$work/$minor/bin/python" -m pytest -q -p no:cacheprovider -c "$OLDPWD/pyproject.toml" \
        --rootdir "$work/tests-$minor" "$work/tests-$minor/core" "$work/tests-$minor/formats" \
        "$work/tests-$minor/loading" \
        "$work/tests-$minor/test_unpickler.py" "$work/tests-$minor/test_storage.py")
done
