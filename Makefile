# make demo   a real vLLM on a CPU with the overlay: install, serve, ask, report, stop
# make test   all tests that need no accelerator
# make bench  what the overlay itself costs, and the code patches against the originals
# make ab     a whole comparison on this machine, to an HTML page
export OVERLAY_CACHE ?= $(HOME)/.cache/vllm-overlay
PYTHON311 ?= $(shell command -v python3.11 || command -v python3)

.PHONY: demo test bench ab lint env
env:
	@tests/testbeds/make_env.sh $(PYTHON311) >/dev/null

demo: env
	@$(OVERLAY_CACHE)/cpu/bin/python tests/testbeds/demo.py $(OVERLAY_CACHE)/smollm2

lint: env
	@$(OVERLAY_CACHE)/cpu/bin/python -m ruff check .

test: lint
	@tests/run.sh $(PYTHON311)

bench: env
	@$(OVERLAY_CACHE)/cpu/bin/python tests/bench.py

ab: env
	@$(OVERLAY_CACHE)/cpu/bin/python -m ab_runs run smollm2-spine
