# `make serve` and `make test` need Python 3.11, 3.12 or 3.13 (or uv, which brings one), make and a C compiler; everything
# else goes into .venv.
SHELL := /bin/bash
PORT ?= 8000
VENV := .venv
PY := $(VENV)/bin/python
# TORCH=/dev/null leaves torch out (tests/test_pythons.py).
TORCH := requirements/torch.txt
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
# uv, where it is at hand, installs faster and takes the build of torch that fits the machine's GPU or lack of one. It reads
# none of pip's settings, so machines that have some go on with pip.
UV := $(shell command -v uv)
UV := $(if $(UV),$(if $(shell python3 -m pip config list 2>/dev/null | grep -E 'index|find-links'),,$(UV)))
PIP = $(if $(UV),$(UV) pip install --quiet --python $(PY),$(PY) -m pip install --quiet --disable-pip-version-check --no-input)

# $(call step,what is being done,command): one line before and the time it took after; the command's output only if it fails.
define step
	@start=$$SECONDS; printf '  %s ...\n' '$(1)'; log=$$(mktemp); \
	if { $(2); } >"$$log" 2>&1; then printf '  %s: done in %ds\n' '$(1)' $$((SECONDS - start)); rm -f "$$log"; \
	else cat "$$log" >&2; rm -f "$$log"; printf '  %s: FAILED after %ds\n' '$(1)' $$((SECONDS - start)) >&2; exit 1; fi
endef

.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test test-node test-images test-asan fuzz lint format audit models figures bench lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

SUPPORTED = import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

$(PY):
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$python" -c '$(SUPPORTED)' 2>/dev/null; then found=$$python; break; fi; done; \
	if [ -n "$(UV)" ]; then exec $(UV) venv --quiet --seed --python "$${found:-3.13}" $(VENV); fi; \
	if [ -z "$$found" ]; then \
	  echo "Python 3.11, 3.12 or 3.13 with its venv module is needed, and none was found." >&2; \
	  echo "Install one (for example: apt install python3 python3-venv) or uv (https://docs.astral.sh/uv), and run make again." >&2; \
	  echo "PYTHON=/path/to/python3.12 make serve takes another one." >&2; exit 1; fi; \
	"$$found" -m venv $(VENV) || { echo "Could not create $(VENV): is the venv module (python3-venv) installed?" >&2; exit 1; }

$(RUNTIME): requirements/lock.txt requirements/torch.txt pyproject.toml | $(PY)
	$(call step,installing locked packages (Ray$(comma) transformers$(comma) ...),$(PIP) --require-hashes -r requirements/lock.txt)
	$(call step,installing torch (the largest download),$(PIP) $(if $(UV),--torch-backend=auto) -r $(TORCH))
	$(call step,installing this project into $(VENV),$(PIP) --no-build-isolation --no-deps --editable .)
	@touch $@

$(DEV): requirements/dev-lock.txt requirements/triton.txt requirements/train.txt $(RUNTIME)
	$(call step,installing test and lint tools,$(PIP) --require-hashes -r requirements/lock.txt -r requirements/dev-lock.txt)
	$(call step,installing Triton unless torch has brought it,$(PY) -c 'import triton' || $(PIP) --no-deps --require-hashes -r requirements/triton.txt)
	$(call step,installing PEFT,$(PIP) --no-deps --require-hashes -r requirements/train.txt)
	@touch $@

comma := ,

install: $(RUNTIME)  ## create .venv with what serving needs (instant when nothing changed)

install-dev: $(DEV)  ## the same plus tests and lint

serve: $(RUNTIME)  ## serve on 127.0.0.1:8000 (PORT=... changes it); Ctrl-C ends it
	@PORT=$(PORT) exec $(VENV)/bin/serve-app serve

test: $(DEV)  ## run the tests (ARGS="tests/engine -k draft" narrows them)
	@$(PY) -m serve_app.catalog.fetch
	@$(PY) -m $(if $(ARGS),pytest -q,tests) --durations=15 --durations-min=1 $(ARGS)

test-node: $(DEV)  ## fetch the JavaScript clients (needs npm) and run their tests, which `make test` then runs too
	$(call step,fetching JavaScript clients,npm ci --prefix tests/clients/node)
	@$(PY) -m pytest -q tests/clients/test_node.py $(ARGS)

test-images: $(DEV)  ## install diffusers and run the tests of models that draw (minutes)
	$(call step,installing diffusers,$(PIP) --no-deps --require-hashes -r requirements/images.txt)
	@$(PY) -m pytest -q -m "slow or not slow" tests/predict/test_drawing.py tests/dashboard/test_forms.py -k "drawing or drawn" $(ARGS)

test-asan: $(DEV)  ## tests of the CPU kernels, compiled with AddressSanitizer (needs the compiler's libasan; minutes)
	@$(PY) -m pytest -q -m slow tests/kernels/library/test_sanitized.py $(ARGS)

fuzz: $(DEV)  ## bad input led by coverage (ARGS="--minutes 30 --only adapter"; atheris goes into .venv)
	@$(PY) -c 'import atheris' 2>/dev/null || $(PIP) 'atheris==3.*'
	@$(PY) -m benchmarks fuzz --coverage $(ARGS)

lint: $(DEV)  ## ruff and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy

format: $(DEV)  ## let ruff sort imports and fix what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

audit: $(PY)  ## ask the database of advisories about the locked packages (needs a network; pip-audit goes into .venv/audit)
	@test -x $(VENV)/audit/bin/pip-audit || { $(PY) -m venv $(VENV)/audit && \
	  $(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check --no-input pip-audit; }
	@$(VENV)/audit/bin/pip-audit --progress-spinner off --timeout 15 --require-hashes --disable-pip -r requirements/lock.txt

models: $(DEV)  ## train the pico models again (hours on CPU; resumes where it stopped)
	@$(PY) -m training $(ARGS)

figures: $(DEV)  ## measure all of the README's table and write it there (ARGS="--only gateway"; --quick to try it out)
	@$(PY) -m serve_app.catalog.fetch
	@$(PY) -m benchmarks figures $(ARGS)

bench: $(RUNTIME)  ## run the benchmarks
	@$(PY) -m benchmarks $(ARGS)

lock: $(DEV)  ## resolve requirements/*.in again (needs pip-tools: fetched into .venv)
	$(call step,installing pip-tools,$(PIP) pip-tools)
	@$(PY) requirements/lock.py

clean:  ## remove .venv and caches (your models and keys in SERVE_APP_HOME stay)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find serve_app deployments training benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +
