# Two commands do everything: `make run` and `make test`. Either works first; both set up .venv from the pinned versions.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: sweep run test rehearse lint faults golden tables clean

run: $(STAMP)
	@mkdir -p out
	$(BIN)/graphrun plan graphs/flux-dev.yaml --vram 8G --ram 64G --hardware rtx4090 -o out/flux-dev.plan.json
	$(BIN)/graphrun run graphs/flux-tiny.yaml --device sim --vram 6M --output out/flux-tiny.png --plan out/flux-tiny.plan.json --trace out/flux-tiny.trace.json

test: $(STAMP) lint
	$(BIN)/python -m pytest -n auto --dist worksteal

rehearse: $(STAMP)
	@mkdir -p out
	$(BIN)/python benchmarks/gpu.py --rehearse --out out/gpu-rehearsal.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

faults: $(STAMP)
	$(BIN)/python -m pytest -m faults --override-ini="addopts=-q --import-mode=importlib" tests/runtime

sweep: $(STAMP)
	$(BIN)/python -m pytest -m sweep -n auto --dist worksteal tests/sweep

tables: $(STAMP)
	$(BIN)/python benchmarks/graph_table.py

golden: $(STAMP)
	$(BIN)/python -m pytest tests/report --update-golden

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
