"""Run by test_pipeline.py in an environment of its own: load exported folders with diffusers alone, and paint."""

import importlib.util
import json
import sys

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

for package in ("atoll", "pydantic", "transformers"):
    print("no" if importlib.util.find_spec(package) is None else "there is", package)

torch.set_num_threads(1)
pipes = {}
for job in json.loads(sys.argv[1]):
    if job["folder"] not in pipes:
        first = DiffusionPipeline.from_pretrained(job["folder"], trust_remote_code=True)
        first.save_pretrained(job["folder"] + "-again")
        pipes[job["folder"]] = DiffusionPipeline.from_pretrained(job["folder"] + "-again", trust_remote_code=True)
    pipe = pipes[job["folder"]]
    pipe.set_progress_bar_config(disable=True)
    if job["solver"] == "euler":
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    seeds = [torch.Generator().manual_seed(job["seed"] + i) for i in range(3)]
    images = pipe(
        job["prompt"],
        num_images_per_prompt=3,
        num_inference_steps=job["steps"],
        guidance_scale=2.0,
        generator=seeds,
        output_type="np",
    ).images
    np.save(job["out"], np.round(images * 255) / 255)
