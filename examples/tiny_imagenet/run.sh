#!/bin/sh
# From images to a model and its report, by the ordinary verbs.
#
#   examples/tiny_imagenet/run.sh tiny-imagenet/ runs/photographs
#   examples/tiny_imagenet/run.sh my-photos/ runs/mine --images 500k        # any folder, tar or parquet with captions
#
# What follows the two places goes to `atoll plan`. Every step says so if it is done already, so the same
# command goes on after a stop. Set AUTOENCODER to a folder or an id of another autoencoder than taef2.
set -eu
source=$1 run=$2
shift 2
here=$(dirname "$0")
python=${PYTHON:-python}
atoll="$python -m atoll"

if [ -f "$source/classes.json" ]; then # Tiny ImageNet: names, synonyms and templates instead of one caption a class
    [ -f "$run/source/held_out.json" ] || $python "$here/captions.py" "$source" "$run/source"
    source=$run/source
fi
$atoll prepare "$source" --out "$run/data" --size 64 --autoencoder "${AUTOENCODER:-taef2}" \
    --features efficientnet-lite0 --text-encoder minilm
$atoll partition "$run/data" -k "${CLUSTERS:-8}"
$atoll plan "$run/data" --config "$here/plan.toml" "$@"
for order in "$run"/orders/[0-9]*.json; do # each could be trained anywhere else: an order and its shards are enough
    name=$(basename "$order" .json)
    $atoll train "$order" --out "$run/trained/$name"
    $atoll admit "$run/trained/$name" --out "$run"
done
$atoll router "$run" ${ROUTER:-}
$atoll evaluate "$run" --route top-1 --route top-2 --guidance 1 --guidance 2 -n "${SAMPLES:-10000}"
