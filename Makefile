# The one tool of development: `make` builds, `make test` tests, `make demo` shows. See CONTRIBUTING.md.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CC_STRICT = -std=c11 -O2 -Wall -Wextra -Wconversion -Wshadow -Werror
CC_SANITIZED = -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
C_TESTS = $(basename $(notdir $(wildcard tests/c/test_*.c)))
C_STYLED = $(filter-out csrc/crc32_tables.h,$(wildcard csrc/*.[ch] csrc/host/*.[ch] tests/c/*.[ch] fuzz/*.[ch]))
SOURCES = $(wildcard csrc/*.[ch] csrc/host/*.[ch] src/tensorio/*.pyx src/tensorio/*.px[di]) setup.py pyproject.toml
PYTEST = $(BIN)/python -m pytest
# Processes that run the tests; more than a few want the memory of as many copies of torch.
JOBS ?= 2

.PHONY: all test users peer-suite peer-suite-all hostile-long crash golden demo bench lint type ccheck ctest ctest-arm coverage fuzz fuzz-long asan tsan pythons \
	sdist format clean
.DELETE_ON_ERROR:

all: $(VENV)/.test

# An environment with the package in place and what its tests need. Made anew when sources of the build change.
$(VENV)/.test: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

$(VENV)/.demo: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -f $(VENV)/.test || $(BIN)/python -m pip install -q -e '.[cli]'
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

$(VENV)/.peer: $(VENV)/.test
	$(BIN)/python -m pip install -q -e '.[peer]'
	touch $@

$(VENV)/.lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q 'ruff>=0.8' 'cython-lint>=0.16' 'codespell>=2.3' 'clang-format>=18'
	touch $@

$(VENV)/.type: $(VENV)/.test
	$(BIN)/python -m pip install -q 'mypy>=1.13'
	touch $@

# What builds extensions by setup.py itself, without an environment of its own.
$(VENV)/.build: $(VENV)/.test
	$(BIN)/python -m pip install -q 'cython>=3.1' 'setuptools>=77'
	touch $@

test: $(VENV)/.test
	$(PYTEST) -n $(JOBS) $(T)

# The tests of the safetensors package, from its source release, on tensorio and beside it on safetensors.
# `peer-suite-all` installs JAX, Flax and TensorFlow first (2 GB), for theirs.
peer-suite: $(VENV)/.test
	$(BIN)/python tools/peer_suite.py $(T)

peer-suite-all: $(VENV)/.peer peer-suite

# Packages from PyPI that use safetensors and torch.load/save, unchanged, under the drop-in; in an environment of their
# own (1.5 GB), over the extensions that are built in place for `test`. Of the packages little is imported: not compiled.
users: $(VENV)/.test $(VENV)-users/.ready
	PYTHONPATH=src $(VENV)-users/bin/python -m pytest tests/users $(T)

$(VENV)-users/.ready: tests/users/requirements.txt
	test -x $(VENV)-users/bin/python || $(PYTHON) -m venv $(VENV)-users
	$(VENV)-users/bin/python -m pip install -q --no-compile -r $<
	$(VENV)-users/bin/python -m pip install -q --no-compile --no-deps timm==1.0.31
	touch $@

# The hostile tests at the size of a release: every byte by all 255 changes, 10 million changed parts. Hours.
hostile-long: $(VENV)/.test
	TENSORIO_HOSTILE=100 $(PYTEST) tests/hostile --timeout=0 $(T)

# The crash campaigns at the size of a release, and a table of how killed saves ended, others' in the same harness, too.
# Power cuts and full disks need root.
crash: $(VENV)/.test
	TENSORIO_CRASH=1000 $(PYTEST) tests/crash --timeout=0 $(T)
	$(BIN)/python tests/crash/table.py 1000

# The golden files of one release of torch, e.g. RELEASE=2.8.0 FOR=python3.11; see tests/golden/README.md.
golden:
	$(PYTHON) tools/golden_release.py $(RELEASE) $(FOR)

demo: $(VENV)/.demo
	$(BIN)/python -m tensorio demo

bench: $(VENV)/.bench
	$(PYTEST) bench --benchmark-only -q $(T)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint --max-line-length=120 src/tensorio
	$(BIN)/clang-format --dry-run --Werror $(C_STYLED)
	$(BIN)/codespell src csrc tests fuzz bench docs tools *.md Makefile
	$(BIN)/python tools/gen_crc32_tables.py --check

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_STYLED)

type: $(VENV)/.type
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --allowlist tools/stubtest.txt --ignore-unused-allowlist \
		tensorio._core tensorio._arrays tensorio._dlpack tensorio._host tensorio._source tensorio._unpickler tensorio._pickler

# The C core by itself, with every compiler there is.
ccheck:
	for cc in gcc clang; do \
		command -v $$cc >/dev/null || { echo "no $$cc here"; continue; }; \
		for f in csrc/*.c csrc/host/*.c; do $$cc $(CC_STRICT) -Icsrc -c $$f -o /dev/null || exit 1; done; \
	done

# The C tests under sanitizers, and for 64-bit ARM under emulation.
ctest:
	rm -rf build/c && mkdir -p build/c
	cd build/c && $(CC) $(CC_SANITIZED) -I../../csrc -c ../../csrc/*.c
	for t in $(C_TESTS); do \
		$(CC) $(CC_SANITIZED) -Icsrc -Itests/c tests/c/$$t.c build/c/*.o -o build/c/$$t && build/c/$$t || exit 1; \
	done

ARM_CC = aarch64-linux-gnu-gcc
ARM_RUN = qemu-aarch64 -L /usr/aarch64-linux-gnu
ctest-arm:
	rm -rf build/arm && mkdir -p build/arm
	cd build/arm && $(ARM_CC) $(CC_STRICT) -I../../csrc -c ../../csrc/*.c
	for t in $(C_TESTS); do \
		$(ARM_CC) $(CC_STRICT) -Icsrc -Itests/c tests/c/$$t.c build/arm/*.o -o build/arm/$$t \
			&& $(ARM_RUN) build/arm/$$t || exit 1; \
	done

# Lines and branches of the C core that its tests run; a gate for the parsers. ARGS=--python adds the Python tests.
coverage:
	$(PYTHON) tools/c_coverage.py $(ARGS)

# Every fuzz target for FUZZ_SECONDS each; T="json machine" for some of them. Findings go to build/fuzz/.
FUZZ_SECONDS ?= $(if $(filter fuzz-long,$(MAKECMDGOALS)),3600,20)
FUZZ = $(patsubst fuzz/fuzz_%.c,%,$(wildcard fuzz/fuzz_*.c)) machine
fuzz fuzz-long: $(VENV)/.test
	FUZZ_SECONDS=$(FUZZ_SECONDS) PYTHON=$(BIN)/python fuzz/run.sh $(or $(T),$(FUZZ))

# The Python tests over extensions built with sanitizers, which have a build of their own; any report fails.
asan: $(VENV)/.build
	PYTHON=$(BIN)/python tools/sanitized.sh address $(or $(T),tests)

tsan: $(VENV)/.build
	PYTHON=$(BIN)/python tools/sanitized.sh thread $(or $(T),tests/threads)

# Build a wheel from the sdist in an empty environment, and import it from elsewhere.
sdist:
	rm -rf build/sdist && mkdir -p build/sdist
	$(PYTHON) -m venv build/sdist/tools && build/sdist/tools/bin/python -m pip install -q build
	build/sdist/tools/bin/python -m build -q --sdist -o build/sdist .
	$(PYTHON) -m venv build/sdist/venv
	build/sdist/venv/bin/python -m pip install -q build/sdist/tensorio-*.tar.gz
	cd build/sdist && venv/bin/python -c "import tensorio, numpy as np; \
		tensorio.save({'w': np.arange(6.0)}, 'w.pt'); assert tensorio.load('w.pt')['w'][5] == 5"

# Every Python there is: build, and run the tests that need no framework.
pythons:
	tools/check_pythons.sh

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks src/*.egg-info
	rm -f src/tensorio/*.so src/tensorio/_*.c
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
