# One command per task; `make help` lists them. Each makes the environment that it needs.
PYTHON ?= python3
VENV := .venv
VENV_TL3 := .venv-tl3
VENV_NDIF := .venv-ndif
VENV_OLDEST := .venv-oldest
TL4 := transformer-lens==4.3.0
TL3 := transformer-lens==3.9.0
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests run in one process a core; more threads in each would only wait for each other.
# Each process begins with a part of the tests in their order, so that those of a file share their fixtures.
PYTEST := -m pytest -n auto --dist worksteal
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Compiled modules and rewritten tests are kept: many tests start a process that imports the package.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help check demo test test-heavy test-all test-tl3 test-ndif test-oldest mutation lint types docs screenshots pictures examples dist bench format clean

help: ## List every task
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) "$(TL4)" -e .
	@touch $@

$(VENV)/test: $(VENV)/base
	$(VENV)/bin/python $(PIP_INSTALL) "$(TL4)" -e ".[test,oracles]"
	@touch $@

$(VENV)/dev: $(VENV)/test
	$(VENV)/bin/python $(PIP_INSTALL) "$(TL4)" -e ".[dev,docs,oracles]"
	@touch $@

$(VENV_TL3)/test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_TL3)
	$(VENV_TL3)/bin/python $(PIP_INSTALL) "$(TL3)" -e ".[test]"
	@touch $@

demo: $(VENV)/base ## Measure the model that ships, and write an HTML report
	$(VENV)/bin/tl-layersim report --out layersim-report

# Two levels of tests; tests/running/levels.py says which test belongs to which.
test: $(VENV)/test ## Run the light tests with the newest TransformerLens 4
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST)

test-heavy: $(VENV)/test ## Run the other tests: simulations, killed runs, servers, Ray, browsers, documentation, all pairs of products
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) -m heavy

test-all: test test-heavy ## Run all tests: make test, then make test-heavy

check: $(VENV)/dev ## Check style, types, structure and the laws that every analyzer obeys: about a minute
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST) tests/structure tests/contract

# The tests that build a TransformerLens model, which tests/running/levels.py marks: all others would run the same code twice. They are in
# files that name such a model or a helper that builds one; no others are collected.
TL3_WORDS := transformer_?lens|TransformerLens|[Hh]ooked_?[Tt]ransformer|[Bb]ridge|gpt2_of_kind|each_model
TL3_TESTS = $(shell grep -rlE '$(TL3_WORDS)' tests --include='test_*.py' --exclude-dir=ndif --exclude-dir=architecture)

test-tl3: $(VENV_TL3)/test ## Run the tests of TransformerLens models with 3.9, which still has HookedTransformer
	OMP_NUM_THREADS=1 $(VENV_TL3)/bin/python $(PYTEST) -m "tl3 and not heavy" $(TL3_TESTS)

# The lowest version of each requirement that pyproject.toml declares; pip cannot resolve downwards, uv can.
$(VENV_OLDEST)/test: pyproject.toml
	$(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV_OLDEST)/bin/uv pip install --quiet --python $(VENV_OLDEST)/bin/python --resolution lowest-direct -e ".[test]"
	@touch $@

test-oldest: $(VENV_OLDEST)/test ## Run the contract tests with the lowest version of each requirement
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python $(PYTEST) tests/contract

# A real server, in an environment of its own. It says that it needs Python 3.12 and runs on 3.11.
$(VENV_NDIF)/server: tests/ndif/requirements.txt
	$(PYTHON) -m venv $(VENV_NDIF)
	$(VENV_NDIF)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/ndif/requirements.txt
	$(VENV_NDIF)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python ndif==0.1.2
	@touch $@

test-ndif: $(VENV)/test $(VENV_NDIF)/server ## Run the tests against a real NDIF server on this machine; needs redis-server
	@command -v redis-server >/dev/null || { echo "no redis-server: apt-get install redis-server"; exit 1; }
	OMP_NUM_THREADS=1 TL_LAYERSIM_NDIF_PYTHON=$(abspath $(VENV_NDIF))/bin/python $(VENV)/bin/python -m pytest -m "" tests/ndif --durations=8

mutation: $(VENV)/test ## Sample mutants of the measures and list those that no test notices: make mutation ARGS="--count 40 lens.py"
	$(VENV)/bin/python -m tests.mutation $(ARGS)

lint: $(VENV)/dev ## Check style and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev ## Check types, strictly
	$(VENV)/bin/mypy

# The tests of pages read the outputs that the build has kept.
docs: $(VENV)/dev ## Build the documentation into site/, warnings are errors, test its outputs, and open its pages in a browser
	$(VENV)/bin/mkdocs build --strict --quiet
	TL_LAYERSIM_SITE=site $(VENV)/bin/python -m pytest -q -m "" tests/docs/test_site.py tests/docs/test_gallery.py tests/docs/test_pages.py -k "not code_on_a_page"

screenshots: $(VENV)/dev ## Take screenshots of pages and figures of the documentation, into screenshots/; needs chromium
	$(VENV)/bin/mkdocs build --strict --quiet
	$(VENV)/bin/python -m tests.docs.screenshots site screenshots

pictures: $(VENV)/test ## Render the pictures of the README and of docs/ again; needs chromium
	$(VENV)/bin/python -W ignore -m tests.docs.pictures

# Two at a time, each on one core; the output of each follows its name.
examples: $(VENV)/base ## Run every example
	@ls examples/*.py | OMP_NUM_THREADS=1 xargs -P 2 -I {} sh -c \
	  'out=$$($(VENV)/bin/python -W ignore {} 2>&1); status=$$?; printf "== %s\n%s\n" {} "$$out"; exit $$status'

# The wheel is unpacked beside the dependencies that are there; it must hold all that the command needs.
dist: $(VENV)/dev ## Build the wheel and the source archive into dist/, check them, and measure the demo model with the wheel alone
	rm -rf dist build/wheel
	$(VENV)/bin/python -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel ../$(VENV)/bin/python -c 'import tl_layersim; assert "/wheel/" in tl_layersim.__file__, tl_layersim.__file__'
	cd build && PYTHONPATH=wheel ../$(VENV)/bin/python wheel/bin/tl-layersim report --max-tokens 2048 --out report

bench: $(VENV)/dev ## Time and weigh the analyzers against their peers: make bench MODEL=folder TEXT=file
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r benchmarks/requirements.txt
	$(VENV)/bin/python benchmarks/bench_analyze.py --model "$(MODEL)" --data "$(TEXT)"
	$(VENV)/bin/python benchmarks/bench_lens.py --model "$(MODEL)" --data "$(TEXT)"
	$(VENV)/bin/python benchmarks/bench_coupling.py
	$(VENV)/bin/python benchmarks/bench_aligned.py --model "$(MODEL)" --data "$(TEXT)"

format: $(VENV)/dev ## Format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove what the other tasks made
	rm -rf $(VENV) $(VENV_TL3) $(VENV_NDIF) $(VENV_OLDEST) build dist site screenshots layersim-report examples/out .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutation
