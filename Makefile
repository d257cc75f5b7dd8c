# Every command first sets up .venv, once, and again when a dependency changes. Otherwise no network
# is needed.
#
#   PYTHON=python3.12         the interpreter to build .venv with (default: see .ci/setup)
#   TORCH_INDEX=URL           an additional package index to take torch from (see .ci/README.md)
#   PORT=8888                 first port JupyterLab tries
#   ARGS="-k solver -x"       passed on by `make demo` and `make test`
#   WORKERS=3                 processes that share the tests; 0 runs them in one

VENV ?= .venv
PORT ?= 8888
ARGS ?=
NOTEBOOK ?= notebooks/01_build_H.ipynb
MARKERS ?= not gpu and not network and not notebooks
WORKERS ?= 3

RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help lab demo test notebooks pages page newest smollm2 vllm check format lock clean

help: ## print this list
	@sed -n 's/^\([a-z0-9]*\):[^#]*## \(.*\)/make \1|\2/p' Makefile | \
	    while IFS='|' read -r target text; do printf '%-12s %s\n' "$$target" "$$text"; done

$(INSTALLED): pyproject.toml .ci/requirements.txt .ci/build.txt
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/setup $(VENV)
	@touch $@

lab: $(INSTALLED) ## open JupyterLab on the first notebook (over SSH: print how to reach it)
	@sh .ci/lab $(VENV) $(PORT) $(NOTEBOOK)

demo: $(INSTALLED) ## build H of the embedded model, prune it and compare, in the terminal
	@$(RUN) cocurve_lab.cli.demo $(ARGS)

# One process more than the smallest machine has cores, because browser tests mostly wait. Each has one
# thread that sleeps while it waits, so that kernels and browsers get their share of the cores.
test: $(INSTALLED) ## run the tests that need neither a GPU nor the network
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(RUN) pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	    -m "$(MARKERS)" $(ARGS)

notebooks: $(INSTALLED) ## run all ten notebooks at their defaults
	@$(RUN) pytest tests/notebooks/test_defaults.py $(ARGS)

pages: $(INSTALLED) ## write the pages of results, and README's table, from kept values
	@$(RUN) tests.benchmarks.bench_findings
	@$(RUN) tests.benchmarks.bench_gemma --write
	@$(RUN) tests.benchmarks.bench_smollm2 --write

page: $(INSTALLED) ## write build/explore_demo.html: the demo's page with the model inside (12 MB)
	@$(RUN) cocurve_widgets.make_page

newest: $(INSTALLED) ## run the quick tests with the newest transformers, and read saved folders with 4.57
	@ARGS="$(ARGS)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/newest $(VENV)

smollm2: $(INSTALLED) ## fetch SmolLM2-135M, a real model (93 MB; becomes 0.5 GB in data/models)
	@$(RUN) cocurve_lab fetch smollm2 $(ARGS)

vllm: ## install vLLM for the tests that serve folders with it (3.5 GB, not in .venv)
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/vllm

check: $(INSTALLED) ## check format, lint and types
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy

format: $(INSTALLED) ## format the code, apply safe fixes, write the stub, strip notebook outputs
	@$(VENV)/bin/python .ci/stub.py
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .
	@find notebooks -name '*.ipynb' -not -path '*/.ipynb_checkpoints/*' \
	    -exec $(RUN) nbstripout --extra-keys metadata.widgets {} +

# The versions that stand in the files stay, unless UPGRADE=--upgrade, or UPGRADE="-P torch==2.13.0", is
# given. From Python 3.11.5 on: some of the newest releases support none before it.
LOCK := uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate \
    --custom-compile-command "make lock"
lock: ## write the versions that the tests run with, and their hashes (needs uv)
	@$(LOCK) $(UPGRADE) --all-extras pyproject.toml -o .ci/requirements.txt
	@printf 'cyllama\n' | $(LOCK) $(UPGRADE) --no-deps - -o .ci/apart.txt
	@printf 'hatchling>=1.27\nsetuptools\nwheel\n' | $(LOCK) $(UPGRADE) - -o .ci/build.txt

clean: ## remove .venv and caches; your results in notebooks/ stay
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find cocurve_lab widgets data notebooks tests -name __pycache__ -prune -exec rm -rf {} +
