PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
UNIT_TESTS := proto/tests router/tests model_server/tests launcher/tests llm/tests
WHOLE_SYSTEM_TESTS := integration-tests --ignore=integration-tests/faults --ignore=integration-tests/container --ignore=integration-tests/console
# They measure time, so nothing else may run beside them.
TIMED_TESTS := $(addprefix integration-tests/test_,fairness.py grammar.py live_replicas.py prefix_cache.py replicas.py scheduling.py throughput.py)
# Those that call what changed between releases of a library, and one of each program.
LOWEST_TESTS := proto/tests/test_wire.py proto/tests/grammar/test_compiler.py proto/tests/tracing launcher/tests/config/test_command_line.py \
  router/tests/transport/test_connection.py router/tests/telemetry/test_collectors.py model_server/tests/convert/test_gguf.py integration-tests/test_versions.py integration-tests/test_oidc.py \
  model_server/tests/models/transformers_fallback/test_fallback.py::test_two_ranks_say_what_transformers_says
LOWEST_VENV ?= .venv-lowest
BROWSER_TOOLS := playwright==1.65.2 axe-playwright-python==0.1.8
LOWEST_TOOLS := pytest pytest-asyncio hypothesis jsonschema trustme
PACKAGES := -p funitel.proto -p funitel.router -p funitel.model_server -p funitel.launcher -p funitel.llm
# With --check: only say whether they are up to date.
write_pages = for page in settings routes metrics modules examples; do $(BIN)/python scripts/$${page}_page.py $(1) || exit 1; done

# Without byte code every process that a test starts compiles all modules again, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test unit system timed clients mutants faults container console check lock lowest serving triton library fmt proto pages docs itest bench guard peers families fuzz wheel clean pictures ladder

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: ## install what tests need too into .venv (repeats cost nothing)
	@PYTHON=$(PYTHON) scripts/install.sh --extras server,otlp,oidc,av,dev,clients,docs $(VENV)

serving: # install what serving needs into .venv, and nothing else
	@PYTHON=$(PYTHON) scripts/install.sh $(VENV)

serve: serving ## serve the demo model on port 3000; make serve ARGS="--port 3001 --model-id ..."
	@$(BIN)/funitel $(ARGS)

NONE_IS_FINE := || [ $$? = 5 ]  # what ARGS chooses may be in other suites
PYTEST := $(BIN)/pytest -m "not slow"
# Files in the order of collection, which is longest first.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder

test: check triton ## all tests but those of faults; ARGS="-m slow" runs the slow tests instead
	@$(MAKE) --no-print-directory -k unit system timed

unit: setup ## tests of the packages
	@$(PYTEST) $(TWO_AT_ONCE) $(UNIT_TESTS) $(ARGS) $(NONE_IS_FINE)

system: setup ## tests of the whole system, but for those that measure time
	@$(PYTEST) $(TWO_AT_ONCE) $(WHOLE_SYSTEM_TESTS) $(TIMED_TESTS:%=--ignore=%) $(ARGS) $(NONE_IS_FINE)

timed: setup ## tests of the whole system that measure time, one after the other
	@$(PYTEST) $(TIMED_TESTS) $(ARGS) $(NONE_IS_FINE)

clients: setup ## third-party clients at pinned versions, in .venv-clients, and a table; ARGS="--only guidellm"
	@$(BIN)/python integration-tests/clients/third_party/run.py $(ARGS)

faults: setup ## kills, full disks, cut networks under load, then a soak; ARGS="--full --write" is the long form
	@$(BIN)/pytest integration-tests/faults $(ARGS)

container: setup ## build the image and run it, as root; what it needs is installed by apt-get
	@$(BIN)/pytest integration-tests/container $(ARGS)

pictures: setup ## pictures of the console's pages for the documentation, made by its tests
	@FUNITEL_SCREENSHOTS=docs/images $(MAKE) --no-print-directory console ARGS="--full -k 'fits or pictures' $(ARGS)"

console: setup ## the console in Debian's Chromium, which apt-get installs
	@$(BIN)/python -c "import playwright, axe_playwright_python" 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt $(BROWSER_TOOLS)
	@$(BIN)/pytest integration-tests/console $(ARGS)

mutants: setup ## change the pure core line by line: which changes does no test notice? ARGS="stops kv_cache"
	@PYTHON=$(PYTHON) scripts/install.sh --extras server,otlp,av,dev,clients,docs,mutants $(VENV)
	@$(BIN)/python scripts/mutants.py $(ARGS)

check: setup ## format, lint, types, imports, rules of the house, generated code and pages, version, lock
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports && $(BIN)/python scripts/house.py
	PYTHON=$(BIN)/python scripts/proto.sh --check && $(BIN)/python scripts/check_version.py && $(BIN)/python scripts/lock.py --check && $(call write_pages,--check) && PYTHONPATH=testing $(BIN)/python -m funitel_testing.conformance.page --check

lock: setup ## write constraints.txt and constraints-lowest.txt again, with the newest releases and the lowest
	PATH=$(BIN):$$PATH $(BIN)/python scripts/lock.py

lowest: ## tests of what uses libraries, with the lowest release of each that pyproject.toml allows, in .venv-lowest
	@PYTHON=$(PYTHON) scripts/install.sh --lowest --extras server,otlp,oidc,av $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python -c "import pytest" 2>/dev/null || $(LOWEST_VENV)/bin/python -m pip install --quiet --constraint constraints.txt $(LOWEST_TOOLS)
	@PYTHONPATH=testing $(LOWEST_VENV)/bin/python -m pytest -m "not slow" $(LOWEST_TESTS) $(ARGS)

triton: setup # what tests of GPU kernels interpret; 0.3 GB that serving on a CPU does without
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps "triton>=3.3" || echo "no triton for this machine: its tests are skipped"

library: setup # the CPU step in the cache; beside tests the compiler would take a multiple of the time, and they would wait for it
	@PYTHONPATH=testing $(BIN)/python -c "from funitel.model_server.cpu.build import build; from funitel_testing.cache import usual_cache; print(build(usual_cache()))"

fmt: setup ## format and sort imports
	$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

proto: setup ## regenerate code from the .proto files
	PYTHON=$(BIN)/python scripts/proto.sh

docs: setup ## build the documentation into site/, and fail on a dead link or anchor
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "open site/index.html"

pages: setup ## regenerate docs/settings.md, routes.md, metrics.md, modules.md, examples.md and differences.md
	$(call write_pages) && PYTHONPATH=testing $(BIN)/python -m funitel_testing.conformance.page

itest: setup ## tests of the whole system only
	$(BIN)/pytest $(WHOLE_SYSTEM_TESTS) $(ARGS)

ladder: setup ## the table and picture of every bit width in docs/quantization.md, 30 minutes
	$(BIN)/python benchmarks/ladder.py --write $(ARGS)

bench: setup ## benchmarks of a model on this machine; funitel bench is for servers
	@for script in $(filter-out benchmarks/serve.py benchmarks/gpu.py benchmarks/gpu_pack.py benchmarks/peers.py benchmarks/ladder.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

guard: setup ## counts of work of a request, a token, a step and a start against their bounds; ARGS=--write writes these
	@PYTHONPATH=testing $(BIN)/python -m funitel_testing.guard $(ARGS)

peers: setup ## this server beside llama.cpp, vLLM and others at their best, into docs/benchmarks.md; ARGS="--short"
	@$(BIN)/python benchmarks/peers.py --write docs/benchmarks.md $(ARGS)

families: setup ## every architecture against transformers: the worst error of each; ARGS=--full for the long form
	@PYTHONPATH=testing $(BIN)/python -m funitel_testing.families $(ARGS)

fuzz: setup ## 60,000 hostile inputs, from files to requests, and a table of what became of them; ARGS="--count 50 gguf"
	@PYTHONPATH=testing $(BIN)/python -m funitel_testing.fuzz $(ARGS)

wheel: setup ## build the sdist and the wheel in dist/, the C++ step compiled
	$(BIN)/python -m build

clean: ## remove what was built, but not .venv
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
