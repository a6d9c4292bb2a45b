# `make demo` and `make test` work from a clean clone: whatever is missing is set up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
RUNTIME := $(wildcard pliant/runtime/*.c pliant/runtime/*.h)
CHECKED := pliant tests bench demo setup.py
# `make bench MODELS="bert gpt2"`; more choices: `.venv/bin/pliant bench --help`.
MODELS ?= zoo
RESULTS := bench/results

.PHONY: demo test lint format types unit sweep clean distclean setup
.PHONY: bench bench-models bench-parts bench-gemm bench-plans bench-memory ablation

test: lint types unit

demo: setup
	$(BIN)/python -m demo.embed

lint: setup
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The slow tests alone: every model of the zoo over many shapes.
sweep: setup
	$(BIN)/python -m pytest -m slow

# Tables on the terminal and in bench/results. Needs an otherwise idle machine, and half
# an hour for the whole zoo.
bench: bench-models bench-parts

bench-models: $(VENV)/.bench
	$(BIN)/pliant bench $(MODELS) --output $(RESULTS)

bench-parts: $(VENV)/.bench
	$(BIN)/python -m bench.static
	$(BIN)/python -m bench.elementwise
	$(BIN)/python -m bench.conv
	$(BIN)/python -m bench.costs

# Matrix products of 500 random shapes against MKL and OpenBLAS; twenty minutes.
bench-gemm: setup
	$(BIN)/python -m bench.gemm

# The plan picked for 300 random products against every other plan they could have.
bench-plans: setup
	$(BIN)/python -m bench.plans

# Peaks, orders, time against memory, and training on changing lengths.
bench-memory: $(VENV)/.bench
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.order
	$(BIN)/python -m bench.finetune
	$(BIN)/python -m bench.limits --training

ablation: $(VENV)/.bench
	$(BIN)/python -m bench.ablation

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
	$(BIN)/python -m pip install -q -e '.[torch,demo,test]'
	touch $@

# The other engines, for benchmarks alone.
$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f pliant/runtime/*.so $(VENV)/.installed $(VENV)/.bench
	find pliant tests bench demo -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
