# Two commands do everything: `make run` and `make test`. Either works first; both set up .venv from the pinned versions.

# The first Python from 3.11 on; where there is none, uv brings one.
PYTHON ?= $(shell for found in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$found -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$found && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
QUICK  := tests/graph tests/solve tests/report/test_golden.py tests/report/test_outputs.py tests/report/test_progress.py tests/test_house.py tests/test_promises.py
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Hundreds of commands that tests start import compiled modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run cpu quick near test sweep fuzz mutants lint golden cast charts tables pipelines docs wheel clean

run: $(STAMP)
	@mkdir -p out
	$(BIN)/graphrun plan flux-dev --vram 8G --ram 64G --hardware rtx4090 -o out/flux-dev.plan.json
	$(BIN)/graphrun run shapes --device sim --vram 4M --overwrite \
		--output out/shapes.png --plan out/shapes.plan.json --trace out/shapes.trace.json
	$(BIN)/graphrun run shapes --device cpu --memory 2G --overwrite \
		--output out/shapes-cpu.png --plan out/shapes-cpu.plan.json --trace out/shapes-cpu.trace.json

# Two minutes: 3 GB of random weights, shaped like FLUX, run on the CPU under 2 GiB next to mmap, and deleted. FOLDER=/path is where they go.
cpu: $(STAMP)
	$(BIN)/python benchmarks/cpu.py --trial --delete $(if $(FOLDER),--weights $(FOLDER))

# Half a minute: graph files, the solver, the checker, screens.
quick: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not long" $(QUICK)

# A minute: short tests of what imports a package, as PKG=solve, in one random order. MINUTES=5 starts tests for so long.
near: $(STAMP)
	files=$$($(BIN)/python tests/near.py $(PKG)) && \
		$(BIN)/python -m pytest -n auto --dist worksteal -m "not long" --minutes=$(or $(MINUTES),0.75) $$files

# Eight minutes on two cores: lint, and a small case of everything; one that hangs fails after 15 minutes. `make sweep PART=more` runs the other cases, in twenty.
test: $(STAMP) lint
	$(BIN)/python -m pytest -n auto --dist worksteal -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# An hour and a half on two cores: PART=more, grids, mutants, kills, long campaigns. PART=faults runs one part, MINUTES=15 starts tests for so long.
sweep: $(STAMP)
	$(BIN)/python -m pytest -m sweep -n auto --dist worksteal \
		$(if $(PART),--part=$(PART)) $(if $(MINUTES),--minutes=$(MINUTES)) $(if $(PART)$(MINUTES),,--record=benchmarks/results/sweep.json)

# Mutants of files: SEED=7, SEEDS=10, MINUTES=30. Counts are added to those of other seeds in benchmarks/results/fuzz.json.
fuzz: $(STAMP)
	$(BIN)/python tests/hostile/fuzzing.py $(if $(SEED),--seed=$(SEED)) $(if $(SEEDS),--seeds=$(SEEDS)) $(if $(MINUTES),--minutes=$(MINUTES))

# Changes of a package, as PKG=verify, in one place each; those that no short test near it notices survive. SEED=7, COUNT=30, MINUTES=10,
# TEST_SECONDS=12 of tests for a change, and TESTS="tests/solve/test_check.py" for tests by hand. Written to benchmarks/results/mutants.json.
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[mutants]"
	files="$(or $(TESTS),$$($(BIN)/python tests/near.py $(PKG)))" && $(BIN)/python tests/mutants.py $(PKG) $$files \
		$(if $(SEED),--seed=$(SEED)) $(if $(COUNT),--count=$(COUNT)) $(if $(MINUTES),--minutes=$(MINUTES)) \
		$(if $(TEST_SECONDS),--seconds=$(TEST_SECONDS))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/names.py

# Two minutes: dist/graphrun-*.whl, with dry runs of the graphs (packaging/dry_runs.py), so that the first plan of one takes a second.
wheel: $(STAMP)
	$(BIN)/python -m pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir dist

# The charts of README and of the measured pages, light and dark, from benchmarks/results.
charts: $(STAMP)
	$(BIN)/python benchmarks/cpu.py --report
	$(BIN)/python benchmarks/peers_report.py benchmarks/results/peers-sim.json

tables: $(STAMP)
	$(BIN)/python benchmarks/graph_table.py

# Ten minutes: the rows of docs/pipelines.md, each from what is seen.
pipelines: $(STAMP)
	$(BIN)/python benchmarks/class_tables.py

# The site of docs/ in out/site, from pages that docs/pages.py writes from the code, and those that people write.
docs: $(STAMP)
	$(BIN)/python docs/pages.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

golden: $(STAMP)
	$(BIN)/python -m pytest tests/report tests/solve/test_plan_texts.py --update-golden

cast: $(STAMP)
	$(BIN)/python docs/cast.py

$(STAMP): pyproject.toml constraints.txt
	$(if $(PYTHON),$(PYTHON) -m venv $(VENV),uv venv --clear --seed --python 3.11 $(VENV) || { echo "graphrun needs Python 3.11 or newer, or uv" >&2; exit 1; })
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $(STAMP)

clean:
	rm -rf $(VENV) out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
