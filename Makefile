# make demo · make test · make lint: each builds .venv by pip with constraints.txt
PYTHON ?= python3
TEST_WORKERS ?= 2
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint format install install-gguf clean

demo: .venv/installed
	.venv/bin/draftsmith demo

test: .venv/installed-test
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

lint: .venv/installed-lint
	.venv/bin/ruff check src tests recipes
	.venv/bin/ruff format --check src tests recipes
	.venv/bin/pyright

format: .venv/installed-lint
	.venv/bin/ruff check --fix src tests recipes
	.venv/bin/ruff format src tests recipes

install: .venv/installed

install-gguf: .venv/installed
	$(PIP) -e '.[gguf]'

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/installed-%: .venv/installed
	$(PIP) -e '.[$*]'
	touch $@

clean:
	rm -rf .venv runs/demo
