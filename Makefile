# Each target makes its own .venv where it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
STAMP := $(VENV)/.installed
# The package as it is laid out when it is installed, of links: type checkers follow no import hook of an editable one.
LINKS := build/links/jacsparse
# Those that run on a GPU: first the numbers, then under Compute Sanitizer.
GPU_TESTS := $(patsubst %,tests/cuda/test_%.py,small_layer recurrent linear_recurrence levels own_cells products \
	values compiled_jacobians scans device compute_sanitizer)

# The PyTorch that test-torch tests on, in an environment of its own, and PyTorch's own index of builds for the CPU.
VERSION ?= 2.6.0
TORCH := build/torch-$(VERSION)
CPU_BUILDS ?= https://download.pytorch.org/whl/cpu

# What older x86 processors have.
SSE42 := +sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+sahf
AVX2 := $(SSE42),+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe
# The tests whose numbers kernels make; derivatives of values come from the same kernels.
NUMERIC := tests/patterns/test_operators.py $(patsubst %,tests/spgemm/test_%.py,methods sparse_jacobian sums) \
	tests/stages/test_order.py tests/jacobians/test_jacobian.py tests/codegen/test_codegen.py \
	tests/recurrence/test_linear_recurrence.py $(patsubst %,tests/sparse/test_%.py,layers sparsify sums)

.PHONY: setup demo test test-full test-portable test-portable-numbers test-portable-layers test-torch test-gpu lint docs test-docs bench clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	rm -rf $(LINKS) && mkdir -p $(LINKS)
	ln -s $(abspath $(filter-out %/__pycache__,$(wildcard jacsparse/*)) patterns spgemm models) $(LINKS)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' | \
		xargs -I @ sh -c 'echo $(abspath $(dir $(LINKS))) > @/jacsparse-links.pth'
	touch $@

demo: $(STAMP)
	$(RUN) -m examples.demo --out out/demo

# Three at a time on two cores: some tests wait for other processes.
test: $(STAMP)
	$(RUN) -m pytest -n 3 --dist worksteal --durations=15

test-full: $(STAMP)
	JACSPARSE_TESTS=full $(RUN) -m pytest -n 2 --durations=15 -m "full or not full"

# The numeric tests once more, on kernels for older processors: SSE4.2 on one thread; of layers AVX2, on two.
test-portable: test-portable-numbers test-portable-layers

test-portable-numbers: $(STAMP)
	JACSPARSE_TESTS=portable ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
	NUMBA_CPU_NAME=x86-64-v2 NUMBA_CPU_FEATURES=$(SSE42) $(RUN) -m pytest -n 2 $(NUMERIC)

test-portable-layers: $(STAMP)
	JACSPARSE_TESTS=portable ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	NUMBA_CPU_NAME=x86-64-v3 NUMBA_CPU_FEATURES=$(AVX2) JACSPARSE_TEST_THREADS=2 \
	$(RUN) -m pytest tests/recurrence/test_recurrent.py

test-torch: $(TORCH)/.installed
	JACSPARSE_CACHE_DIR=$(abspath $(TORCH))/cache $(TORCH)/bin/python -m pytest -n 2 --durations=15

# From PyTorch's index first, and alone: where that cannot be reached, PyPI's build takes gigabytes on x86.
$(TORCH)/.installed: setup.cfg pyproject.toml
	test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps \
		--extra-index-url $(CPU_BUILDS) torch==$(VERSION)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' torch==$(VERSION)
	touch $@

# With the machine's own Python where there is no .venv: it is the one that has PyTorch for its GPU.
test-gpu:
	JACSPARSE_TESTS=gpu $(firstword $(wildcard $(RUN)) $(PYTHON)) -m pytest -c tests/cuda/pytest.ini --rootdir=. $(GPU_TESTS)

# Types and imports are checked on a copy laid out as the package is: the folders beside jacsparse/ belong under it.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/jacsparse
	cp -R jacsparse/. build/types/jacsparse && cp -R patterns spgemm models build/types/jacsparse
	cp -R benchmarks examples tests build/types
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p jacsparse -p benchmarks -p examples
	cd build/types && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml

# On a copy, for pages are generated beside those that are written.
docs: $(VENV)/.documenting
	rm -rf build/docs && mkdir -p build && cp -R docs build/docs
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet -b html build/docs out/docs
	@echo out/docs/index.html

# Whether anything is cut on them, at three widths: in Chromium, where it is installed.
test-docs: docs
	$(RUN) -m pytest -q -p no:xdist tests/test_page_widths.py

$(VENV)/.documenting: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,docs]'
	touch $@

bench: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,bench]'
	$(RUN) -m benchmarks run --out out/benchmarks
	$(RUN) -m benchmarks report out/benchmarks

clean:
	rm -rf $(VENV) out build dist *.egg-info
