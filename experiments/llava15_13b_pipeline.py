"""LLaVA 1.5 on Vicuna 13B as a pipeline of 8 H200 GPUs. A plan: compiled for them, never run."""

import dataclasses

from mmjax.config import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainingConfig
from mmjax.presets.llava import llava_1_5_7b


def run() -> RunConfig:
    """Rows of 2,048 tokens with up to three pictures, 16 a step, each a micro-batch of its own.

    python -m mmjax.train --experiment llava15_13b_pipeline --cluster 1x8xh200 --dry-run
    Expect: the second row of this table (scripts/bench_pipeline.py --mesh pipe=8 --mesh pipe=4,tensor=2). Rows and
    micro-batches are the same in all. The pure pipeline has tower and embedding on its first stage, the hybrid one runs
    them data parallel over all stages before its loop. Memory is that of the compiled step on one GPU; idle is counted
    from the schedule's table and the stages' FLOPs, of all devices' time in a step.

        mesh               schedule   layers of the stages   memory     temporaries   step       idle
        pipe=8             pure       5 5 5 5 5 5 5 5        43.3 GiB   18.1 GiB      876 T      38.4 %
        pipe=8             hybrid     5 5 5 5 5 5 5 5        42.8 GiB   17.6 GiB      809 T      33.3 %
        pipe=4, tensor=2   pure       9 10 11 10             41.0 GiB   17.6 GiB      691 T      22.1 %
        pipe=4, tensor=2   hybrid     10 10 10 10            39.3 GiB   15.9 GiB      671 T      19.8 %

    A step's T are TFLOPs that one device could do from its start to its end. Three pictures are 1.2 TFLOP forward, next
    to 1.3 of a layer: too much for a stage of five layers, too little to take one away from it.
    """
    model = llava_1_5_7b()
    attention = dataclasses.replace(model.grouped_attention, num_heads=40, num_key_heads=40)
    return RunConfig(
        run_dir="runs/llava15_13b_pipeline",
        mesh=MeshConfig(pipe=8),
        model=dataclasses.replace(
            model,
            width=5120,
            num_layers=40,
            full_attention_layers=tuple(range(40)),
            grouped_attention=attention,
            moe=dataclasses.replace(model.moe, num_dense_layers=40, dense_width=13_824),
            parameter_dtype="float32",
        ),
        data=DataConfig(
            source="corpus/conversations.jsonl",
            tokenizer="corpus/tokenizer.json",
            rows=16,
            row_tokens=2048,
            row_patches=3 * 577,
            image_max_patches=577,
            bad_sample="skip",
            too_long="drop",
        ),
        optimizer=OptimizerConfig(name="adamw", learning_rate=2e-5, warmup_steps=100, weight_decay=0.0),
        checkpoint=CheckpointConfig(every_steps=500),
        training=TrainingConfig(steps=5000, accumulation=16, pipeline_edges="data_parallel", eval_every_steps=0),
    )
