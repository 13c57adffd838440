#!/bin/sh
# From images to a model and its report, by the ordinary verbs.
#
#   examples/tiny_imagenet/run.sh tiny-imagenet/ runs/photographs
#   examples/tiny_imagenet/run.sh my-photos/ runs/mine --images 500k        # any folder, tar or parquet with captions
#   SMALL=1 examples/tiny_imagenet/run.sh tiny-imagenet/ runs/small         # minutes on a laptop, to see it work
#
# What follows the two places goes to `atoll plan`. Every step says so if it is done already, so the same
# command goes on after a stop. What may be set: SMALL, with CLASSES and EACH (images of a class) of Tiny ImageNet;
# AUTOENCODER (a folder or an id of another than taef2), CLUSTERS, SAMPLES (painted for each arm), STEPS (of the
# sampler), ROUTER (options of `atoll router`), PYTHON.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
source=${1%/} run=${2%/}
shift 2
here=$(dirname "$0")
python=${PYTHON:-python}
atoll="$python -m atoll"

if [ -n "${SMALL:-}" ]; then # 600 images of 12 classes, a network and a budget for one core
    part="--classes ${CLASSES:-12} --each ${EACH:-50}" clusters=3 samples=96 steps=12 router="--set training.images=3000"
    set -- --recipe laptop --images 3000 "$@"
else # the settings of benchmarks/results/tables-h200.csv
    part="" clusters=8 samples=10000 steps=50 router=""
    set -- --config "$here/plan.toml" "$@"
fi
clusters=${CLUSTERS:-$clusters} samples=${SAMPLES:-$samples} steps=${STEPS:-$steps}

if [ -f "$source/classes.json" ]; then # Tiny ImageNet: names, synonyms and templates instead of one caption a class
    [ -f "$run/source/held_out.json" ] || $python "$here/captions.py" "$source" "$run/source" $part
    source=$run/source
fi
$atoll prepare "$source" --out "$run/data" --size 64 --autoencoder "${AUTOENCODER:-taef2}" \
    --features efficientnet-lite0 --text-encoder minilm
$atoll partition "$run/data" -k "$clusters"
$atoll plan "$run/data" --objectives "${clusters}flow" "$@"
# each order could be trained anywhere else: the file and its shards are enough
$atoll train "$run"/orders/[0-9]*.json --out "$run/trained"
$atoll admit "$run"/trained/[0-9]* --out "$run"
$atoll router "$run" ${ROUTER:-$router}
$atoll evaluate "$run" --route top-1 --route top-2 --guidance 1 --guidance 2 -n "$samples" --steps "$steps"
if [ -f "$run/source/held_out.json" ]; then # does it understand what no training has seen?
    $python "$here/held_out.py" "$run" --count "$samples" --steps "$steps"
fi
