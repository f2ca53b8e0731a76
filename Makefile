# make serve [MODEL=...] [PORT=...] [ARGS="--max-num-seqs 8"]   from a fresh clone to a running server
# make test                                                     every check and test
VENV ?= .venv
PORT ?=
MODEL ?=
ARGS ?=
BENCH ?= scheduler
export PYTHON VENV

.PHONY: help serve test lint format docs bench clean

help:
	@echo "make serve   install what is missing, fetch the default model, serve on 127.0.0.1:8000 (PORT= MODEL= ARGS=)"
	@echo "make test    install what is missing, run every check and test"
	@echo "make lint    ruff, mypy and the import rules alone"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    write docs/settings.md from the settings' definition"
	@echo "make bench   run bench/$(BENCH).py (BENCH= ARGS=)"
	@echo "make clean   remove the environment and caches (downloaded models stay in the user's cache)"
	@echo "PYTHON=/path/to/python3 chooses the interpreter for the environment"

$(VENV)/.installed: pyproject.toml constraints.txt
	@.ci/install $(VENV)

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@.ci/install $(VENV) dev

serve: $(VENV)/.installed
	@exec $(VENV)/bin/gapless serve $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

test:
	@.ci/run

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.installed
	$(VENV)/bin/python -m frontend.cli.reference > docs/settings.md

bench: $(VENV)/.installed-dev
	$(VENV)/bin/python -m bench.$(BENCH) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
