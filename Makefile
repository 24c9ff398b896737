# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
# Another build of PyTorch: docs/install.md.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# The processes of the tests take 3 GB together. A third one saves a tenth of the time of test-ci, which waits more.
PROCESSES ?= 2

FIGURES := demo reshard masks record stream order scale range_reads local_cache recompute convergence pipeline

.PHONY: demo test test-ci test-all coverage bench gpu figures docs size lint clean

demo: .venv/installed
	$(BIN)/python tools/demo.py demo

# Seven of eight tests in a third of the time: all but those that take seconds each.
test: .venv/installed-dev
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile -m "not slow and not long"

# The tests that a change must pass.
test-ci: .venv/installed-dev
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile -m "not slow"

# These and the slow ones, an hour or more.
test-all: .venv/installed-dev
	$(BIN)/pytest -n $(PROCESSES) --dist loadfile

# Branches of the package that the tests reach, commands in processes of their own included.
coverage: .venv/installed-dev
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest -n $(PROCESSES) --dist loadfile -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: .venv/installed-dev
	$(BIN)/pytest benchmarks

# Checks and measurements on a GPU, in under nine minutes, with the Python that is there: nothing is installed.
# PARTS: some of them, such as "raster loader"; `python3 -m benchmarks.gpu --help` lists them.
gpu:
	$(PYTHON) -m benchmarks.gpu $(PARTS)

# The figures of the documentation that single benchmarks give: forty minutes on two idle cores. Those
# of the comparison: pytest benchmarks/test_peers.py, then python -m benchmarks.readme.
figures: .venv/installed-dev
	$(BIN)/pytest --record $(FIGURES:%=benchmarks/test_%.py)
	$(BIN)/python -m benchmarks.readme "$$(ls -t benchmarks/results/*-parts.json | head -1)"
	$(BIN)/python -m benchmarks.curves "$$(ls -t benchmarks/results/*-parts.json | head -1)"

# To build/site; a broken link or anchor ends it.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Lines, files, circles of imports and routes of data, beside the budgets that the tests hold.
size: .venv/installed-dev
	$(BIN)/python -m tests.size

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo build dist *.egg-info

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch first and pinned: a range would let another package pull a larger build.
.venv/installed: pyproject.toml | .venv/bin/python
	@echo "Installing PyTorch into .venv: minutes, and up to 6 GB of disk; docs/install.md shows the smaller CPU build"
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	@echo "Installing sa1b and the packages that it needs: about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the packages that the tests need: about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
