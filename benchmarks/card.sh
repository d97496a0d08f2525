#!/usr/bin/env bash
# Everything that a card would show, in half an hour, on a bare machine: Python 3.12, torch 2.11+cu130, nothing that can be installed.
#
#   benchmarks/card.sh pack              here, with a network: wheels that such a machine lacks, at most 40 MB, in out/card
#   benchmarks/card.sh rates             there: calibration, which later steps plan with; context, copies and kernels one by one
#   benchmarks/card.sh flux              FLUX.1-dev at full size: 8 GiB, 24 GiB, the smallest budget; the allocator's record beside our model of it
#   benchmarks/card.sh check             doctor, the contract of devices, graphs tiny, graphrun.attach, graphrun run
#   benchmarks/card.sh peers             FLUX.1-dev at 8 and 24 GiB by graphrun and by other tools
#   benchmarks/card.sh models            twenty other models at full size, two steps each
#   benchmarks/card.sh --rehearse STEP   the same step on the simulated accelerator, with the project's own Python
#
# A step takes at most six minutes and writes benchmarks/results/card-STEP.json (into $OUT where that is set) after every part.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }

if [ "$1" = pack ]; then
    exec "${PYTHON:-.venv/bin/python}" benchmarks/card_pack.py out/card
fi
if [ "$1" = --rehearse ]; then
    exec "${PYTHON:-.venv/bin/python}" benchmarks/card.py "$2" --rehearse
fi

site="${TMPDIR:-/tmp}/graphrun-card-site"
if [ ! -e "$site/.complete" ]; then
    mkdir -p "$site"
    for wheel in out/card/*.whl; do
        [ -e "$wheel" ] || { echo "out/card has no wheels: run 'benchmarks/card.sh pack' where there is a network" >&2; exit 2; }
        python3 -m zipfile -e "$wheel" "$site"
    done
    touch "$site/.complete"
fi
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python3 benchmarks/card.py "$@"
