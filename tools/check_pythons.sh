#!/bin/sh
# Build the package with every Python from 3.10 on that is on the PATH, and run the tests that need no framework.
# The builds are quick ones, from a copy, so that nothing is left here; `make sdist` builds as users do.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=$work/source
mkdir "$source"
cp -r setup.py pyproject.toml README.md LICENSE csrc src "$source"
# Without what builds made: the copies of generated C are as new as their sources, however old they are.
find "$source" \( -name '*.so' -o -name __pycache__ -o -name '*.egg-info' -o -path '*/tensorio/_*.c' \) -prune -exec rm -rf {} +
tests="core formats loading asynchronous manager encryption threads test_unpickler.py test_storage.py"
cp -r examples "$work"  # which tests of a training loop run
export TENSORIO_QUICK=1
for minor in 10 11 12 13 14; do
    python=$(command -v "python3.$minor" || true)
    if [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "python3.$minor: not here"
        continue
    fi
    "$python" -m venv "$work/$minor"
    pip="$work/$minor/bin/python -m pip install -q --no-compile"
    # In this environment and not in one of its own, which would have the same packages once more.
    $pip 'setuptools>=77' 'cython>=3.1' 'numpy>=2' 'ml_dtypes>=0.6' 'click>=8.1' 'rich>=13' cryptography safetensors==0.8.0 \
        pytest pytest-timeout pytest-benchmark hypothesis
    $pip --no-build-isolation --no-deps "$source"
    echo "python3.$minor:"
    # From elsewhere, so that the installed package is tested and not the source folder.
    cp -r tests "$work/tests-$minor"
    (cd "$work/tests-$minor" && "$work/$minor/bin/python" -m pytest -q -p no:cacheprovider \
        -c "$source/pyproject.toml" --rootdir "$work/tests-$minor" $tests)
done
