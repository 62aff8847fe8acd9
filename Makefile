# Everything a newcomer needs: `make demo` runs the bundled model, `make test` runs all tests. Both set up .venv themselves.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench bench-gpu clean

demo: $(READY)
	$(VENV)/bin/kimik3 generate --prompt 'ROMEO.' --max-new-tokens 80 --mode sample --temperature 0.7 --seed 4

test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python tests/bench_kda.py
	$(VENV)/bin/python tests/bench_transformers.py

bench-gpu: $(READY)
	$(VENV)/bin/python tests/bench_gpu.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis kimik3.egg-info

# Made once, and again when the dependencies or the compiled operations change.
$(READY): pyproject.toml constraints.txt $(wildcard kimik3_cli/engine/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
