# Everything a person or the CI does here has a target: `make help`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# How packages get onto the system, by apt or dnf; empty: they are there already.
APT ?= PYTHON="$(PYTHON)" scripts/system_packages.sh
# What pip is told to install as torch, and where from: TORCH_FLAGS="--index-url …" for a build without CUDA, say,
# which is 0.2 GB instead of several. TORCH= (empty): without torch, and without the tests that import it.
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
WITH_TORCH = $(TORCH) $(TORCH_FLAGS)
# The library whose files and order the loader must agree with; it also keeps numpy below 2.2.
STREAMING ?= mosaicml-streaming==0.13.0

VENV := .venv
AS_ROOT = $(if $(filter 0,$(shell id -u)),,sudo)
PIP_FLAGS := --quiet --disable-pip-version-check --no-input --root-user-action ignore
# For an environment that has setuptools: else pip makes another one for it, each time.
BUILT_HERE := --no-build-isolation

# Where `make install` puts the daemon: a virtual environment of its own, without torch.
PREFIX ?= /opt/fusecache
DAEMON_VENV := $(PREFIX)/venv
BINDIR ?= /usr/local/bin
# mount(8) looks for mount.fusecache in no other place.
SBINDIR ?= /usr/sbin
SYSCONFDIR ?= /etc
UNITDIR ?= $(SYSCONFDIR)/systemd/system
# The man page and the completions.
SHAREDIR ?= /usr/local/share
DESTDIR ?=
# More for pip, when installing without a network: PIP_INSTALL="--no-index --find-links wheels".
PIP_INSTALL ?=

DAEMON_PACKAGES := e2fsprogs fuse3 gcc libc6-dev libfuse3-dev pkg-config python3 python3-dev python3-venv
TEST_PACKAGES := attr ca-certificates fio git openssl procps rsync shellcheck unzip zip
CEPH_PACKAGES := ceph-common ceph-mon ceph-osd radosgw
BENCH_PACKAGES := fio s3fs
SYSTEMD_PACKAGES := debootstrap rsync systemd-container
MONITORING_PACKAGES := prometheus
PAGE_PACKAGES := chromium chromium-driver fonts-dejavu-core
TRACE_PACKAGES := rsync strace
CONTAINER_PACKAGES := $(SYSTEMD_PACKAGES) iproute2
DEPLOY_PACKAGES := $(CONTAINER_PACKAGES) podman runc netavark
RELEASE_PACKAGES := $(SYSTEMD_PACKAGES) git
IMAGE_PACKAGES := buildah mmdebstrap
PODMAN_PACKAGES := podman runc
CLUSTER_PACKAGES := default-jre-headless

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- setting up

.PHONY: setup
setup: fuse-device $(VENV)/.installed ## system packages and .venv; asks for root only if packages are missing

# First of all, and again once apt has installed python3.
REQUIRE_PYTHON = scripts/require_python.sh $(PYTHON) $(MAKECMDGOALS)

.PHONY: fuse-device
fuse-device:
	@$(REQUIRE_PYTHON)
	@scripts/require_fuse.sh

$(VENV)/.packages: scripts/system_packages.sh
	@$(if $(APT),$(APT) $(DAEMON_PACKAGES) $(TEST_PACKAGES))
	@mkdir -p $(VENV) && touch $@

# Its own mark, as python is there long before pip; what is whole already stays. A newer pip than Debian 12's, which
# tries versions of the trainers' packages one after the other for many minutes.
$(VENV)/.created: | $(VENV)/.packages
	@echo "virtual environment: $(VENV)"
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { $(REQUIRE_PYTHON) && $(PYTHON) -m venv --clear $(VENV); }
	@$(VENV)/bin/pip install $(PIP_FLAGS) 'pip>=25'
	@touch $(VENV)/.packages $@

$(VENV)/.installed: pyproject.toml Makefile | $(VENV)/.created
ifeq ($(strip $(TORCH)),)
	@echo "python packages: fusecache with what its tests need, without torch"
	@$(VENV)/bin/pip install $(PIP_FLAGS) --editable '.[test-without-torch]'
else
	@echo "python packages: $(TORCH)"
	@$(VENV)/bin/pip install $(PIP_FLAGS) $(WITH_TORCH)
	@echo "python packages: fusecache with what its tests need, $(STREAMING)"
	@$(VENV)/bin/pip install $(PIP_FLAGS) --editable '.[test]' $(STREAMING) $(WITH_TORCH)
endif
	@touch $@

# ---- looking at it

.PHONY: demo
demo: setup ## a tour on this machine; BUCKET=name and AWS_ENDPOINT_URL for a bucket of yours
	@$(VENV)/bin/python -m examples.demo $(if $(BUCKET),--bucket $(BUCKET))

$(VENV)/.docs: pyproject.toml $(VENV)/.installed
	@echo "python packages: mkdocs-material, argparse-manpage, shtab"
	@$(VENV)/bin/pip install $(PIP_FLAGS) $(BUILT_HERE) --editable '.[docs]' $(STREAMING) $(WITH_TORCH)
	@touch $@

.PHONY: docs
docs: setup $(VENV)/.docs ## the documentation as a site, the man page and completions for bash and zsh, in build
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict -f scripts/site/mkdocs.yml
	@packaging/manual $(VENV)/bin/python build/share site-functions
	@echo "build/site/index.html; below build/share: man/man1, bash-completion/completions, zsh/site-functions"

# ---- testing

# Most of a test's time is waiting for daemons and servers, of which each worker has its own.
IN_PARALLEL ?= -n 4 --dist worksteal

TESTS ?= tests

.PHONY: test
test: setup ## all tests that need no other store and no systemd; TESTS, PYTEST_ARGS for parts
	$(VENV)/bin/python -m pytest $(TESTS) --ignore=tests/ceph --ignore=tests/systemd --ignore=tests/trainers \
	    --ignore=tests/recipes --ignore=tests/clusters --ignore=tests/cluster_cache --ignore=tests/serving --ignore=tests/page $(IN_PARALLEL) $(PYTEST_ARGS)

$(VENV)/.trainers: pyproject.toml $(VENV)/.installed
	@echo "python packages: trainers"
	@$(VENV)/bin/pip install $(PIP_FLAGS) $(BUILT_HERE) --editable '.[trainers]' $(STREAMING) $(WITH_TORCH)
	@touch $@

.PHONY: test-trainers
test-trainers: setup $(VENV)/.trainers ## checkpoints of transformers, accelerate, Lightning and DCP on a mount
	$(VENV)/bin/python -m pytest tests/trainers -n 2 --dist worksteal $(PYTEST_ARGS)

$(VENV)/.page: pyproject.toml $(VENV)/.installed
	@$(if $(APT),$(APT) $(PAGE_PACKAGES))
	@echo "python packages: selenium"
	@$(VENV)/bin/pip install $(PIP_FLAGS) $(BUILT_HERE) --editable '.[page]' $(STREAMING) $(WITH_TORCH)
	@touch $@

.PHONY: test-page
test-page: setup $(VENV)/.page ## the web page of mounts in a headless Chromium, also with 100 000 pending files
	$(VENV)/bin/python -m pytest tests/page -n 2 --dist worksteal -o faulthandler_timeout=0 $(PYTEST_ARGS)

.PHONY: pictures
pictures: setup $(VENV)/.page docs ## the pictures in docs/how-to/page: the web page in five situations, and the site
	@$(VENV)/bin/python -m scripts.page_pictures

$(VENV)/.streaming-suite: $(VENV)/.installed
	@echo "python packages: moto"
	@$(VENV)/bin/pip install $(PIP_FLAGS) moto==5.2.5 $(STREAMING) $(WITH_TORCH)
	@touch $@

.PHONY: test-streaming-suite
test-streaming-suite: suite-is-there setup $(VENV)/.streaming-suite ## MosaicML's own tests on loader.streaming; SUITE=DIR, github.com/mosaicml/streaming at v0.13.0; 2 minutes
	$(VENV)/bin/python -m tests.streaming_suite "$(SUITE)"

.PHONY: suite-is-there
suite-is-there:
	@[ -d "$(SUITE)/tests" ] || { echo "SUITE=$(SUITE) has no folder tests: clone github.com/mosaicml/streaming there first" >&2; exit 1; }

# Trainers whose versions contradict each other, so each has its own virtual environment; 1 GB each.
RECIPES ?= composer deepspeed litgpt llm-foundry

build/recipes/%/.installed: tests/recipes/%.txt
	@echo "python packages: $*"
	@$(PYTHON) -m venv build/recipes/$*
	@build/recipes/$*/bin/pip install $(PIP_FLAGS) $(WITH_TORCH)
	@build/recipes/$*/bin/pip install $(PIP_FLAGS) --no-deps --requirement $<
	@touch $@

.PHONY: test-recipes
test-recipes: setup $(RECIPES:%=build/recipes/%/.installed) ## examples/recipes on mounts: killed, resumed elsewhere, same losses
	FUSECACHE_TEST_RECIPES=$(CURDIR)/build/recipes $(VENV)/bin/python -m pytest tests/recipes \
	    -o faulthandler_timeout=0 $(PYTEST_ARGS)

build/clusters/.installed: pyproject.toml
	@$(if $(APT),$(APT) $(CLUSTER_PACKAGES))
	@echo "python packages: ray, pyspark"
	@$(PYTHON) -m venv build/clusters
	@build/clusters/bin/pip install $(PIP_FLAGS) --editable '.[ray,spark]' tokenizers
	@touch $@

.PHONY: test-cluster-cache
test-cluster-cache: setup ## nodes that fill from each other, in network namespaces: killed, cut off, slow, with other keys; as root
	@$(AS_ROOT) env FUSECACHE_TEST_NAMESPACES=1 $(VENV)/bin/python -m pytest tests/cluster_cache $(PYTEST_ARGS)

.PHONY: test-clusters
test-clusters: setup build/clusters/.installed ## conversions on a real Ray and a real Spark, with workers and drivers killed
	FUSECACHE_TEST_CLUSTERS=$(CURDIR)/build/clusters $(VENV)/bin/python -m pytest tests/clusters \
	    -o faulthandler_timeout=0 $(PYTEST_ARGS)

build/serving/.installed: tests/serving/requirements.txt pyproject.toml
	@echo "python packages: what loads models"
	@$(PYTHON) -m venv build/serving
	@build/serving/bin/pip install $(PIP_FLAGS) $(WITH_TORCH)
	@build/serving/bin/pip install $(PIP_FLAGS) --editable '.[loader]' --requirement $< $(WITH_TORCH)
	@build/serving/bin/pip install $(PIP_FLAGS) --no-deps $(TORCHTITAN)
	@touch $@

# It asks for an older datasets than the tests of its data loader need.
TORCHTITAN ?= torchtitan==0.3.0
# Of each model.
SERVING_MIB ?= 48

.PHONY: test-serving
test-serving: setup build/serving/.installed ## libraries that load models, Grain and torchtitan on mounts; SERVING_MIB of each model, SERVING_MIB=2100 by hand
	FUSECACHE_TEST_SERVING=$(CURDIR)/build/serving FUSECACHE_TEST_SERVING_MIB=$(SERVING_MIB) \
	    $(VENV)/bin/python -m pytest tests/serving -o faulthandler_timeout=0 $(PYTEST_ARGS)

build/clients/.installed: tests/mount/clients.txt
	@echo "packages of PyPI and npm: programs that speak S3"
	@$(PYTHON) -m venv build/clients
	@build/clients/bin/pip install $(PIP_FLAGS) --requirement $<
	@npm install --prefix build/clients --silent --no-audit --no-fund $(S3_JAVASCRIPT)
	@touch $@

S3_JAVASCRIPT ?= @aws-sdk/client-s3@3.1175.0

.PHONY: test-clients
test-clients: setup $(VENV)/.trainers build/clients/.installed ## programs that speak S3, each of the newest version, on `fusecache serve`
	FUSECACHE_TEST_CLIENTS=$(CURDIR)/build/clients $(VENV)/bin/python -m pytest tests/mount/test_serve_clients.py $(PYTEST_ARGS)

# What the daemon asks of a FUSE library: reading, writing, names, the end of a mount.
PYFUSE3_TESTS ?= $(addprefix tests/mount/test_,names.py reading.py writing.py) tests/cases/test_changes_of_names.py

.PHONY: test-pyfuse3
test-pyfuse3: setup ## some of the mount's tests on pyfuse3, which serves where the own FUSE session cannot
	FUSECACHE_TEST_FUSE_LIBRARY=pyfuse3 $(VENV)/bin/python -m pytest $(PYFUSE3_TESTS) $(IN_PARALLEL) $(PYTEST_ARGS)

.PHONY: test-posix
test-posix: setup ## pjdfstest on a mount; PJDFSTEST=DIR, a built copy of github.com/pjd/pjdfstest; POSIX_TESTS="rename link"; as root
	@[ -x "$(PJDFSTEST)/pjdfstest" ] || { echo "PJDFSTEST=$(PJDFSTEST) has no program pjdfstest: build it there first" >&2; exit 1; }
	$(VENV)/bin/python -m tests.posix "$(PJDFSTEST)" $(POSIX_TESTS)

.PHONY: test-random-operations
test-random-operations: setup ## xfstests' fsx and fsstress on mounts, 100 000 operations; XFSTESTS=DIR with both programs; as root; five minutes
	@[ -x "$(XFSTESTS)/fsx" ] || { echo "XFSTESTS=$(XFSTESTS) has no program fsx: build xfstests' ltp/fsx.c there first" >&2; exit 1; }
	$(VENV)/bin/python -m tests.posix.random_operations "$(XFSTESTS)"

CEPH_TESTS ?= tests/contract tests/mount tests/unit/examples/test_buckets.py

.PHONY: test-ceph
test-ceph: setup ## contract, mounts and examples/buckets against Ceph's S3 gateway, started for them
	@$(if $(APT),$(APT) $(CEPH_PACKAGES))
	$(VENV)/bin/python tests/ceph/ceph.py run -- \
	    $(VENV)/bin/python -m pytest $(CEPH_TESTS) -m "not s3server_only" $(IN_PARALLEL) $(PYTEST_ARGS)

# A store that is not ours: Microsoft's emulator of Azure Blob Storage.
AZURITE ?= azurite@3.35.0

build/azurite/.installed: Makefile
	@echo "npm packages: $(AZURITE)"
	@mkdir -p build/azurite
	@npm install --prefix build/azurite --silent --no-audit --no-fund $(AZURITE)
	@touch $@

.PHONY: test-stores
test-stores: setup build/azurite/.installed ## contract and mounts on Azurite (by npm) and on a fake of Google Cloud Storage
	FUSECACHE_TEST_STORES=1 $(VENV)/bin/python -m pytest tests/contract/test_store.py tests/contract/test_clouds.py \
	    tests/mount/test_stores.py $(IN_PARALLEL) $(PYTEST_ARGS)

.PHONY: test-monitoring
test-monitoring: setup ## examples/monitoring with Debian's Prometheus: its tool, and a scrape of a mount
	@$(if $(APT),$(APT) $(MONITORING_PACKAGES))
	FUSECACHE_TEST_PROMETHEUS=1 $(VENV)/bin/python -m pytest tests/mount/test_prometheus.py tests/mount/test_metrics.py \
	    $(PYTEST_ARGS)

.PHONY: test-install
test-install: $(VENV)/.installed ## each extra by pip, from the index, in bare virtual environments without a compiler
	FUSECACHE_TEST_INSTALL=1 $(VENV)/bin/python -m pytest tests/install $(PYTEST_ARGS)

# Bare machines in which README is followed; for Ubuntu's noble, MIRROR and COMPONENTS=main,universe too.
DISTRIBUTIONS ?= bookworm trixie

.PHONY: test-readme
test-readme: setup ## README's commands and programs word by word, by a user on bare machines; DISTRIBUTIONS; needs root
	@$(if $(APT),$(APT) $(SYSTEMD_PACKAGES))
	@$(AS_ROOT) $(if $(AS_ROOT),--preserve-env) env DISTRIBUTIONS="$(DISTRIBUTIONS)" TORCH="$(TORCH)" \
	    TORCH_FLAGS="$(TORCH_FLAGS)" tests/readme/run

.PHONY: test-systemd
test-systemd: fuse-device ## install into a bare Debian, boot it, and use the service; needs root
	@$(if $(APT),$(APT) $(SYSTEMD_PACKAGES))
	@$(AS_ROOT) tests/systemd/run

# Which folders of examples/deploy; empty: all.
PLATFORMS ?=

$(VENV)/.deploy: pyproject.toml $(VENV)/.installed
	@echo "python packages: podman-compose"
	@$(VENV)/bin/pip install $(PIP_FLAGS) $(BUILT_HERE) --editable '.[deploy]' $(STREAMING) $(WITH_TORCH)
	@touch $@

.PHONY: test-deploy
test-deploy: setup $(VENV)/.deploy ## examples/deploy: a real Slurm, podman, cloud-init and others; PLATFORMS; needs root
	@$(if $(APT),$(APT) $(DEPLOY_PACKAGES))
	@$(AS_ROOT) tests/deploy/run $(PLATFORMS)

.PHONY: test-package
test-package: fuse-device release-packages ## the .deb in a bare Debian: install, upgrade, remove; DISTRIBUTION; needs root
	@$(AS_ROOT) $(if $(AS_ROOT),--preserve-env) tests/package/run

.PHONY: test-image
test-image: setup release ## the OCI image, with podman: mounts, reads, writes; needs root
	@$(if $(APT),$(APT) $(PODMAN_PACKAGES))
	@$(AS_ROOT) env FUSECACHE_TEST_IMAGE=1 $(VENV)/bin/python -m pytest tests/package $(PYTEST_ARGS)

# What runs in the container: COMMAND="make test", say, or COMMAND="make fuzz".
COMMAND ?= make test

.PHONY: test-container
test-container: fuse-device ## make test in a bare Debian without a network; DISTRIBUTION, LOAD, COMMAND; needs root
	@$(if $(APT),$(APT) $(CONTAINER_PACKAGES))
	@$(AS_ROOT) $(if $(AS_ROOT),--preserve-env) tests/container/run $(COMMAND)

HISTORIES ?= 10000

.PHONY: fuzz
fuzz: setup ## random histories with crashes at any commit, request and file operation; HISTORIES, SEED
	@$(VENV)/bin/python -m tests.history --histories $(HISTORIES) $(if $(SEED),--seed $(SEED))

ROUNDS ?= 200

.PHONY: traces-all
traces-all: setup ## traces of trainers, the node ended at every moment; 10 minutes; PYTEST_ARGS="-k dcp" for parts
	FUSECACHE_TEST_TRACES=all $(VENV)/bin/python -m pytest tests/traces $(IN_PARALLEL) $(PYTEST_ARGS)

# In a folder of their own: they would change what the trainers import.
TRACED ?= tensorboard==2.21.0 tensorboard-data-server==0.7.2 absl-py==2.5.1 grpcio==1.85.3 markdown==3.11.3 \
    protobuf==7.36.2 werkzeug==3.1.9
WANDB ?= wandb==0.31.0
TRACED_RECIPES ?= composer deepspeed litgpt

build/traces/.installed: Makefile
	@echo "python packages: tensorboard, wandb"
	@$(VENV)/bin/pip install $(PIP_FLAGS) --target build/traces --upgrade --no-deps $(TRACED)
	@$(VENV)/bin/pip install $(PIP_FLAGS) --target build/traces --upgrade $(WANDB)
	@touch $@

.PHONY: traces
traces: setup $(VENV)/.trainers $(TRACED_RECIPES:%=build/recipes/%/.installed) build/traces/.installed ## record tests/traces/recorded anew, with strace; NAMES="transformers mds" for some
	@$(if $(APT),$(APT) $(TRACE_PACKAGES))
	@$(VENV)/bin/python -m tests.traces.record $(NAMES)

.PHONY: kill-rounds
kill-rounds: setup ## kill -9 of real daemons after a close, with a slow bucket; ROUNDS, SEED
	@$(VENV)/bin/python -m scripts.kill_rounds --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

.PHONY: kept-rounds
kept-rounds: setup ## kill -9 of a daemon whose mount outlives it, under readers and writers; ROUNDS; AGAINST=commit for upgrades
	@$(VENV)/bin/python -m scripts.kept_rounds --rounds $(ROUNDS) $(if $(filter-out HEAD,$(AGAINST)),--against $(AGAINST))

.PHONY: kept-rounds-ceph
kept-rounds-ceph: ROUNDS = 6
kept-rounds-ceph: setup ## the same with a bucket of Ceph's S3 gateway, started for it; ROUNDS
	@$(if $(APT),$(APT) $(CEPH_PACKAGES))
	@$(VENV)/bin/python tests/ceph/ceph.py run -- $(VENV)/bin/python -m scripts.kept_rounds --rounds $(ROUNDS)

OPERATIONS ?= 20000
UPGRADES ?= 100

.PHONY: fuzz-kept
fuzz-kept: KILLS = 200
fuzz-kept: MINUTES =
fuzz-kept: setup ## random histories on a mount under kills and upgrades, with a model; OPERATIONS, KILLS, UPGRADES, SEED, MINUTES
	@$(VENV)/bin/python -m tests.kept_fuzz --operations $(OPERATIONS) --kills $(KILLS) --upgrades $(UPGRADES) \
	    $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(FUZZ_ARGS)

KILLS ?= 20

.PHONY: kept-training
kept-training: setup $(VENV)/.trainers ## two ranks train while their mount's daemon is killed: same losses, same checkpoints; KILLS
	FUSECACHE_TEST_KILLS=$(KILLS) $(VENV)/bin/python -m pytest tests/trainers/test_kept_training.py -rP \
	    -o faulthandler_timeout=0 $(PYTEST_ARGS)

.PHONY: movers
movers: KILLS = 500
movers: DAEMON_KILLS = 100
movers: setup ## reads while helper processes and daemons are killed, every byte compared: 30 minutes as root; KILLS, DAEMON_KILLS
	FUSECACHE_TEST_MOVER_KILLS=$(KILLS) FUSECACHE_TEST_MOVER_DAEMON_KILLS=$(DAEMON_KILLS) \
	    $(VENV)/bin/python -m pytest tests/mount/test_movers.py $(PYTEST_ARGS)

MINUTES ?= 10
# A container that begins while the disk of a run is mounted would hold that disk, and the run could not repair it.
PRIVATE_MOUNTS = $(if $(AS_ROOT),,unshare --mount --propagation slave)

.PHONY: soak
soak: setup ## sixteen readers at random, every byte compared, limits watched; MINUTES
	@$(VENV)/bin/python -m scripts.soak --minutes $(MINUTES)

.PHONY: chaos
chaos: MINUTES = 30
chaos: SHAPE = one
chaos: setup ## faults at random under a trainer's load; MINUTES, SEED, SHAPE=endpoints, CHAOS_ARGS=--kept; disk faults as root
	@$(PRIVATE_MOUNTS) $(VENV)/bin/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) \
	    --shape $(SHAPE) $(CHAOS_ARGS)

.PHONY: check
check: $(VENV)/.installed ## format, lint, types, layers; under a minute
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest --quiet tests/test_layers.py tests/test_prose.py tests/unit/docs \
	    tests/cases/test_table.py
	@$(VENV)/bin/python -m tests.support.rooms --report

.PHONY: fmt
fmt: $(VENV)/.installed ## format, and mend what ruff can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Another resolver than the tests' environment has: it knows hashes, and all versions of Python at once.
UV ?= uv==0.13.9

.PHONY: lock
lock: ## resolve what `make install` installs into requirements.lock, with hashes; UV_ARGS="--upgrade" for newer ones
	@$(PYTHON) -m venv build/uv && build/uv/bin/pip install $(PIP_FLAGS) $(UV)
	@build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(UV_ARGS) \
	    --extra pyfuse3 --extra metrics --custom-compile-command "make lock" pyproject.toml -o requirements.lock
	@build/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(UV_ARGS) \
	    --custom-compile-command "make lock" packaging/requirements.in -o packaging/requirements.lock

# ---- measuring it

$(VENV)/.bench: pyproject.toml $(VENV)/.installed
	@$(if $(APT),$(APT) $(BENCH_PACKAGES))
	@$(VENV)/bin/pip install $(PIP_FLAGS) --editable '.[bench]' $(STREAMING) $(WITH_TORCH)
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps $(ENERGON)
	@touch $@

# Without their requirements: s3fs would install an older botocore than boto3 accepts. Local files need no s3fs.
ENERGON = megatron-energon==7.4.1 multi-storage-client==1.3.1 opentelemetry-api==1.45.2 rapidyaml==0.15.2 \
    deprecation==2.1.0 filetype==1.2.0 lark==1.3.1 psutil==7.2.2 wcmatch==10.2.1 bracex==3.2.3 xattr==1.3.0

.PHONY: bench
bench: setup $(VENV)/.bench ## every benchmark, beside other programs; all, whatever the first one finds
	@status=0; for name in read write loader; do \
	    $(VENV)/bin/python -m benchmarks.$$name $(BENCH_ARGS) || status=1; done; exit $$status

.PHONY: bench-read
bench-read: setup $(VENV)/.bench ## reading, beside rclone, s3fs and bounds; 20 minutes as root; BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.read $(BENCH_ARGS)

.PHONY: bench-write
bench-write: setup $(VENV)/.bench ## writing, beside rclone, s3fs, boto3 and a local disk; 20 minutes as root; BENCH_ARGS
	@$(VENV)/bin/python -m benchmarks.write $(BENCH_ARGS)

.PHONY: bench-loader
bench-loader: setup $(VENV)/.bench ## the loader, beside six other libraries; an hour as root; BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.loader $(BENCH_ARGS)

.PHONY: bench-file-hints
bench-file-hints: setup $(VENV)/.bench ## single files and tars, with hints and without; 6 minutes as root
	@$(VENV)/bin/python -m benchmarks.file_hints $(BENCH_ARGS)

.PHONY: bench-serving
bench-serving: setup $(VENV)/.bench ## loading a model's weights, cold and again; 7 minutes as root; BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.serving $(BENCH_ARGS)

AGAINST ?= HEAD

.PHONY: bench-cluster
bench-cluster: setup ## nodes that fill from each other, in network namespaces; 15 minutes as root; BENCH_ARGS="--only same"
	@$(AS_ROOT) $(VENV)/bin/python -m benchmarks.cluster $(BENCH_ARGS)

.PHONY: simulate-cluster
simulate-cluster: setup ## 1 024 nodes that fill from each other, simulated; some minutes; BENCH_ARGS="--model-part 40 --data-part 4000", or --check as root
	@$(VENV)/bin/python -m benchmarks.cluster_simulation $(BENCH_ARGS)

.PHONY: bench-pairs
bench-pairs: setup $(VENV)/.bench ## this tree beside an older commit, in turns; AGAINST=commit, BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.pairs --against $(AGAINST) $(BENCH_ARGS)

.PHONY: bench-http
bench-http: setup $(VENV)/.bench ## the HTTP client, beside boto3, awscrt and obstore; 15 minutes; BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.http_clients $(BENCH_ARGS)

.PHONY: bench-session
bench-session: setup $(VENV)/.bench ## the own FUSE session beside pyfuse3, idle and busy; 4 minutes; BENCH_ARGS for parts
	@$(VENV)/bin/python -m benchmarks.session $(BENCH_ARGS)

.PHONY: bench-node
bench-node: setup $(VENV)/.bench ## what the daemon itself needs for a GiB, with movers and without; 3 minutes; BENCH_ARGS
	@$(VENV)/bin/python -m benchmarks.node $(BENCH_ARGS)

.PHONY: bench-passthrough
bench-passthrough: setup $(VENV)/.bench ## passthrough beside the native file and the daemon; root, Linux 6.9, fio; 5 minutes
	@$(VENV)/bin/python -m benchmarks.passthrough $(BENCH_ARGS)
	@$(VENV)/bin/python -m benchmarks.handed_files

.PHONY: bench-scale
bench-scale: setup $(VENV)/.bench ## what a huge index and many directories cost a node, at a smaller size
	@$(VENV)/bin/python -m benchmarks.scale $(BENCH_ARGS)

.PHONY: bench-trees
bench-trees: setup $(VENV)/.bench ## seconds and requests of cp -r, mv and rm -rf of a directory, 40 ms away; BENCH_ARGS=--files 500
	@$(VENV)/bin/python -m benchmarks.trees $(BENCH_ARGS)

# ---- releasing it

RELEASE = $(AS_ROOT) env DAEMON_PACKAGES="$(DAEMON_PACKAGES)" \
    $(foreach name,DISTRIBUTION MIRROR COMPONENTS REVISION,$(if $($(name)),$(name)="$($(name))")) packaging/release

.PHONY: release
release: release-packages ## sdist, wheel, .deb and OCI image of this commit, in build/release; DISTRIBUTION; needs root
	@$(if $(APT),$(APT) $(IMAGE_PACKAGES))
	@$(RELEASE) image

.PHONY: release-packages
release-packages:
	@$(if $(APT),$(APT) $(RELEASE_PACKAGES))
	@$(RELEASE) packages

RPM_FILE = %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm

.PHONY: rpm
rpm: ## an RPM of this commit, for this distribution and architecture, in build/release; PYTHON=python3.11
	@$(REQUIRE_PYTHON)
	@$(if $(APT),$(APT) $(DAEMON_PACKAGES) git rpm-build)
	@rm -rf build/rpm && mkdir -p build/rpm/tree build/release
	@git archive HEAD | tar -x -C build/rpm/tree
	@rpmbuild -bb --quiet --define '_topdir $(CURDIR)/build/rpm' --define '_rpmdir $(CURDIR)/build/release' \
	    --define '_rpmfilename $(RPM_FILE)' --define 'tree $(CURDIR)/build/rpm/tree' \
	    --define "python $$(readlink -f "$$(command -v $(PYTHON))")" \
	    --define "version_of_it $$(sed -n 's/^__version__ = "\(.*\)"/\1/p' fusecache/__init__.py | sed -E 's/\.?(dev|a|b|rc)/~\1/')" \
	    packaging/fusecache.spec
	@ls build/release/*.rpm

# ---- installing the daemon

.PHONY: install
install: ## the daemon, its command, unit, man page and completions; PREFIX, DESTDIR
	@$(REFUSE_BESIDE_PACKAGE)
	@$(REQUIRE_PYTHON)
	@$(if $(APT),$(APT) $(DAEMON_PACKAGES))
	@$(REQUIRE_PYTHON)
	@echo "fusecache: $(DESTDIR)$(PREFIX)"
	@$(PYTHON) -m venv $(DESTDIR)$(DAEMON_VENV)
	@# From a copy: a build leaves its leftovers where it is done, and the next one would pack them. Compiled now, whatever
	@# pip's settings say: users may not write there, and each of their commands would compile the whole program again.
	@copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; \
	cp -r pyproject.toml README.md LICENSE fusecache loader "$$copy"; \
	$(DESTDIR)$(DAEMON_VENV)/bin/pip install $(PIP_FLAGS) $(PIP_INSTALL) --compile --require-hashes -r requirements.lock; \
	$(DESTDIR)$(DAEMON_VENV)/bin/pip install $(PIP_FLAGS) $(PIP_INSTALL) --compile --no-deps "$$copy"; \
	$(DESTDIR)$(DAEMON_VENV)/bin/pip install $(PIP_FLAGS) $(PIP_INSTALL) --require-hashes --target "$$copy/tools" \
	    -r packaging/requirements.lock; \
	PYTHONPATH="$$copy/tools" packaging/manual $(DESTDIR)$(DAEMON_VENV)/bin/python $(DESTDIR)$(SHAREDIR) site-functions
	@# A script names its interpreter; under DESTDIR that is not yet where it will be.
	@$(if $(DESTDIR),sed --in-place '1s|^#!$(abspath $(DESTDIR))|#!|' $(addprefix $(DESTDIR)$(DAEMON_VENV)/bin/,fusecache mount.fusecache))
	@install -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(SBINDIR) $(DESTDIR)$(UNITDIR) $(DESTDIR)$(SYSCONFDIR)/fusecache
	@ln -sfn $(DAEMON_VENV)/bin/fusecache $(DESTDIR)$(BINDIR)/fusecache
	@ln -sfn $(DAEMON_VENV)/bin/mount.fusecache $(DESTDIR)$(SBINDIR)/mount.fusecache
	@install -m 755 systemd/fusecache-mountpoint systemd/fusecache-updatedb $(DESTDIR)$(DAEMON_VENV)/bin/
	@sed -e 's|/opt/fusecache/|$(PREFIX)/|' \
	    -e 's|/etc/fusecache/|$(SYSCONFDIR)/fusecache/|' \
	    systemd/fusecache@.service > $(DESTDIR)$(UNITDIR)/fusecache@.service
	@install -m 644 systemd/example.toml $(DESTDIR)$(SYSCONFDIR)/fusecache/example.toml.sample
	@systemd/fusecache-updatedb add $(DESTDIR)$(SYSCONFDIR)/updatedb.conf
	@$(RELOAD_SYSTEMD)

.PHONY: uninstall
uninstall: ## what install made; never a config, a cache or a bucket
	@$(REFUSE_BESIDE_PACKAGE)
	@if [ -z "$(DESTDIR)" ] && $(DAEMON_RUNS); then \
	    echo "a daemon still runs; first: systemctl disable --now 'fusecache@*'" >&2; exit 1; fi
	@rm -f $(DESTDIR)$(BINDIR)/fusecache $(DESTDIR)$(SBINDIR)/mount.fusecache $(DESTDIR)$(UNITDIR)/fusecache@.service
	@rm -f $(DESTDIR)$(SYSCONFDIR)/fusecache/example.toml.sample $(addprefix $(DESTDIR)$(SHAREDIR)/,$(MANUAL))
	@systemd/fusecache-updatedb remove $(DESTDIR)$(SYSCONFDIR)/updatedb.conf
	@rm -rf $(DESTDIR)$(DAEMON_VENV)
	@for folder in $(DESTDIR)$(SYSCONFDIR)/fusecache $(DESTDIR)$(PREFIX); do \
	    if [ -d "$$folder" ]; then rmdir --ignore-fail-on-non-empty "$$folder"; fi; done
	@$(RELOAD_SYSTEMD)

MANUAL = man/man1/fusecache.1 bash-completion/completions/fusecache zsh/site-functions/_fusecache

# Both would have the same links, and one of them would remove the other's.
REFUSE_BESIDE_PACKAGE = if [ -z "$(DESTDIR)" ] && [ -d /opt/fusecache/dist ]; then \
    echo "the package fusecache is installed; to use this instead, first: apt-get remove fusecache" >&2; exit 1; fi

# Some process is this installation's python, at `fusecache mount`, however that was spelled.
DAEMON_RUNS = for file in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$$file || true; echo; done 2>/dev/null \
    | grep -E '^$(DAEMON_VENV)/bin/python[^ ]* (.* )?(-m |[^ ]*/)fusecache mount ' >/dev/null

# Only where systemd runs, and never for a packager's DESTDIR.
RELOAD_SYSTEMD = if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

.PHONY: clean
clean: ## caches of the tools, and build/
	@for tree in build/*-root build/container build/deploy build/bare; do \
	    [ ! -e "$$tree" ] || $(AS_ROOT) rm -rf --one-file-system "$$tree"; done
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find fusecache loader tests -name __pycache__ -type d -prune -exec rm -rf {} +
