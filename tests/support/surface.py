"""Every command line, option and file name that the end-to-end tests (tests/test_stories.py) rely on.

When the surface changes, this file changes, and the stories stay as they are.
"""

from __future__ import annotations

TINY = (
    "--set training.batch=32 --set training.learning_rate=0.00212132 --set training.warmup_images=64 "
    "--set training.ema_images=64 --set network.width=32 --set network.depth=2"
)
LENIENT = "--set acceptance.max_ratio_to_gaussian=1000"  # experts of a few steps are to be accepted
ON = "--device cpu --checkpoint-seconds 0"

# from images to orders
PREPARE = "prepare {source} --out run/data --workers 1"
PREPARE_IMAGES = "prepare {source} --out run/data --size 16 --features pixels --workers 1 --device cpu"
PREPARE_FOLDERS = PREPARE_IMAGES + " --labels folder"
PREPARE_MORE = "prepare {source} --onto run/data --workers 1"
PARTITION = "partition run/data -k {k}"
PARTITION_MORE = "partition run/data-2 --onto run/partition"
PLAN = "plan run/data --objectives {mix} --images {images} {tiny} {lenient}"
PLAN_STRICT = "plan run/data --objectives {mix} --images {images} {tiny}"
PLAN_MORE = "plan run/data-2 --onto run/orders --images {images}"
PLAN_AGAIN = "plan run --reissue {cluster} --images {images}"

# islands
TRAIN = "train {order} --out {out} {on}"
TRAIN_AWAY = "train {order} --data {data} --out {out} {on}"
PUBLISH = "publish run {url} --key {key}"
JOIN = "join {url} --out {out} --key {key} --device cpu"

# the model
ADMIT = "admit {experts} --out run --device cpu"
ADMIT_INBOX = "admit --inbox {url}/inbox --signers {signers} --out run --device cpu"
ROUTER = "router run --set training.images={images} {on}"
ROLLBACK = "ensemble run --rollback {version}"
REMOVE = "ensemble run --remove {cluster}"
ROUTE = "ensemble run --route {route}"
HISTORY = "ensemble run"
STATUS = "status run"

# its use
SAMPLE = "sample {model} {prompts} -n {count} --steps 2 --out {out} --device cpu"
EVALUATE = "evaluate run -n 40 --steps 2 --route top-1 --device cpu"
DISTILL = "distill run --out {out} --set training.images={images} --device cpu"
EXPORT = "export run --out {out}"

ORDERS = "run/orders"
ORDERS_MORE = "run/orders-2"
CLUSTER_SHARDS = "run/partition/clusters/{cluster:02d}"
WEIGHTS = "model.safetensors"
CARD = "expert.json"
METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
EVALUATION = "run/evaluation.json"
REPORT = "run/report.html"
VERSIONS = "run/ensemble"
QUARANTINE = "run/quarantine"
PIPELINE = "model_index.json"
PICTURES = "*.png"
SIGNERS = "allowed_signers"
ONE_SKIPPED = "1 skipped"
