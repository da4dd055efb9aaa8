# Each target makes its own .venv where it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-full test-gpu lint bench clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(STAMP)
	$(RUN) -m jacsparse.models.demo --out out/demo

test: $(STAMP)
	$(RUN) -m pytest -n 2 --durations=15

test-full: $(STAMP)
	JACSPARSE_TESTS=full $(RUN) -m pytest -n 2 --durations=15 -m "full or not full"

test-gpu: $(STAMP)
	JACSPARSE_TESTS=gpu $(RUN) -m pytest tests/cuda/test_products.py tests/cuda/test_values.py tests/cuda/test_recurrent.py

# Types are checked on a copy laid out as the package is: the folders beside jacsparse/ belong under it.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/jacsparse
	cp -R jacsparse/. build/types/jacsparse && cp -R patterns spgemm models build/types/jacsparse
	cp -R benchmarks build/types
	cd build/types && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p jacsparse -p benchmarks

bench: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,bench]'
	$(RUN) -m benchmarks run --out out/benchmarks
	$(RUN) -m benchmarks report out/benchmarks

clean:
	rm -rf $(VENV) out build dist *.egg-info
